"""The models against torchvision's, transformers', NumPy's and their own graphs; losses and layers."""

import dataclasses
import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import special
from step_helpers import SEQ_LENGTH, TEXT, dtype_policy, text_batch

from tfbench.config import BenchmarkConfig, ConfigError
from tfbench.models import MODELS, attention, bert_model, residual_norm
from tfbench.models.bert import BERT_BASE_SHAPE, BERT_LARGE_SHAPE, BertShape, masked_positions
from tfbench.models.bert_model import Bert
from tfbench.models.layers import (
    FusedBatchNorm,
    LayerNorm,
    dropout,
    embedding_lookup,
    gelu,
    merge_equal,
    relu_max_pool,
    softmax,
)
from tfbench.models.losses import classification_loss, masked_language_model_loss, normalize
from tfbench.models.resnet import RESNET50_SHAPE
from tfbench.models.resnet_model import ResNet

ORACLES = Path(__file__).parent / "oracles"
POLICIES = ["float32", "mixed_float16", "mixed_bfloat16"]

# tf.nn.gelu rounds the root of 2 to float32 even in float64; with that root exact BERT agrees to 1e-15.
GELU_TOLERANCE = 2e-8

# PyTorch's parameter name → our variable, and the part of its last axis that is this parameter.
Parameters = dict[str, tuple[keras.Variable, slice]]
WHOLE = slice(None)


def fill(name: str, shape: list[int]) -> np.ndarray:
    """The oracle's value of a parameter; see oracles/make.py."""
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    if len(shape) > 1:
        return values / np.sqrt(np.prod(shape[1:]))
    return 1 + 0.1 * values if name.endswith("weight") else 0.1 * values


def resnet_parameters(model: ResNet) -> Parameters:
    parameters: Parameters = {}
    for name, layer in model.parts.items():
        weight, *bias = layer.trainable_variables
        parameters |= {f"{name}.weight": (weight, WHOLE)} | {f"{name}.bias": (v, WHOLE) for v in bias}
    return parameters


def bert_parameters(model: Bert) -> Parameters:
    """transformers' names; its query, key and value are thirds of one product here."""
    layers = {"bert.embeddings.LayerNorm": model.embedding_norm}
    parameters = {
        "bert.embeddings.word_embeddings.weight": (model.word_embedding, WHOLE),
        "bert.embeddings.position_embeddings.weight": (model.position_embedding, WHOLE),
        "bert.embeddings.token_type_embeddings.weight": (model.type_embedding, WHOLE),
        "cls.predictions.bias": (model.output_bias, WHOLE),
    }
    for index, block in enumerate(model.blocks):
        prefix = f"bert.encoder.layer.{index}"
        hidden = block.query_key_value.kernel.shape[0]
        for third, name in enumerate(("query", "key", "value")):
            part = slice(third * hidden, (third + 1) * hidden)
            parameters[f"{prefix}.attention.self.{name}.weight"] = (block.query_key_value.kernel, part)
            parameters[f"{prefix}.attention.self.{name}.bias"] = (block.query_key_value.bias, part)
        layers |= {
            f"{prefix}.attention.output.dense": block.attention_output,
            f"{prefix}.attention.output.LayerNorm": block.attention_norm,
            f"{prefix}.intermediate.dense": block.intermediate,
            f"{prefix}.output.dense": block.output_projection,
            f"{prefix}.output.LayerNorm": block.output_norm,
        }
    layers |= {
        "cls.predictions.transform.dense": model.transform,
        "cls.predictions.transform.LayerNorm": model.transform_norm,
    }
    for name, layer in layers.items():
        weight, bias = layer.trainable_variables
        parameters |= {f"{name}.weight": (weight, WHOLE), f"{name}.bias": (bias, WHOLE)}
    return parameters


def to_our_layout(name: str, value: np.ndarray) -> np.ndarray:
    """PyTorch's convolutions are OIHW, its products transposed; embeddings are alike."""
    if "embeddings" in name or value.ndim < 2:
        return value
    return value.T if value.ndim == 2 else value.transpose(2, 3, 1, 0)


def take_oracle_weights(parameters: Parameters, shapes: dict[str, list[int]]) -> None:
    assert parameters.keys() == shapes.keys()
    for name, (variable, part) in parameters.items():
        value = variable.numpy()
        value[..., part] = to_our_layout(name, fill(name, shapes[name]))
        variable.assign(value)


def assert_loss_and_gradients(
    oracle: dict[str, Any], parameters: Parameters, loss_of: Callable[[], Any], rel: float
) -> None:
    """With the oracle's weights: number of parameters, loss and every gradient norm."""
    take_oracle_weights(parameters, oracle["shapes"])
    variables = list({id(variable): variable for variable, _ in parameters.values()}.values())
    assert sum(np.prod(variable.shape) for variable in variables) == oracle["parameters"]
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(loss_of().loss)
    assert float(loss) == pytest.approx(oracle["loss"], rel=rel)
    gradients = tape.gradient(loss, [variable.value for variable in variables])
    by_variable = {id(v): tf.convert_to_tensor(g).numpy() for v, g in zip(variables, gradients, strict=True)}
    norms = {n: np.linalg.norm(by_variable[id(v)][..., part]) for n, (v, part) in parameters.items()}
    assert norms == pytest.approx(oracle["gradient_norms"], rel=rel, abs=1e-14)  # a key's bias has none


def test_resnet50_is_torchvisions() -> None:
    oracle = json.loads((ORACLES / "resnet50.json").read_text())
    with dtype_policy("float64"):
        model = ResNet(RESNET50_SHAPE, 64)
    images = np.random.default_rng(1).standard_normal((4, 3, 64, 64)).transpose(0, 2, 3, 1)
    batch = {"image": tf.constant(images), "label": tf.constant(oracle["labels"])}
    assert_loss_and_gradients(
        oracle,
        resnet_parameters(model),
        lambda: classification_loss(model, batch, training=True, seed=None),
        rel=1e-9,
    )
    norm = model.parts["layer4.2.bn3"]
    assert np.linalg.norm(norm.moving_mean) == pytest.approx(oracle["running_mean_norm"], rel=1e-9)
    assert np.linalg.norm(norm.moving_variance) == pytest.approx(oracle["running_var_norm"], rel=1e-9)
    logits = model(batch["image"], training=True)
    np.testing.assert_allclose(logits[:, :16], oracle["logits"], atol=1e-9)


def test_bert_is_transformers() -> None:
    oracle = json.loads((ORACLES / "bert_tiny.json").read_text())
    sizes = oracle["config"]
    shape = BertShape(
        sizes["layers"], sizes["hidden_size"], sizes["heads"], sizes["vocab_size"], sizes["max_positions"]
    )
    assert shape.intermediate == sizes["intermediate_size"]
    with dtype_policy("float64"):
        model = Bert(shape, dropout_rate=0.0)
    ids = tf.constant(oracle["input_ids"])
    batch = {
        "input_ids": ids,
        "token_type_ids": tf.zeros_like(ids),
        "attention_mask": tf.constant(oracle["attention_mask"]),
        "masked_positions": tf.constant(oracle["masked_positions"]),
        "masked_ids": tf.constant(oracle["targets"]),
        "masked_weights": tf.ones([3, 4]),
    }
    assert_loss_and_gradients(
        oracle,
        bert_parameters(model),
        lambda: masked_language_model_loss(model, batch, True, None),
        rel=GELU_TOLERANCE,
    )
    logits = model(batch)
    np.testing.assert_allclose(logits[..., :16], oracle["logits"], atol=GELU_TOLERANCE)
    del batch["token_type_ids"]  # 0 where a batch has none
    np.testing.assert_array_equal(model(batch), logits)


# Products and their sizes.


def config_of(model: str, **size: int) -> BenchmarkConfig:
    return BenchmarkConfig(model=model, **size)


@pytest.mark.parametrize(
    ("model", "size", "gflop", "tolerance"),
    [
        ("resnet50", {"image_size": 224}, 24.5, 0.005),  # 4.09 GMAC forward
        ("bert_large", {"seq_length": 128}, 240.6, 0.001),
        ("bert_large", {"seq_length": 512}, 1020.0, 0.001),
    ],
)
def test_flops_per_sample_are_the_known_ones(
    model: str, size: dict[str, int], gflop: float, tolerance: float
) -> None:
    flops = MODELS[model].flops_per_sample(config_of(model, **size))
    assert flops / 1e9 == pytest.approx(gflop, rel=tolerance)


def einsum_flops(operation: tf.Operation) -> int:
    """2 × the product of the lengths of all indices."""
    terms = operation.get_attr("equation").decode().split("->")[0].split(",")
    lengths: dict[str, int] = {}
    for term, tensor in zip(terms, operation.inputs, strict=True):
        lengths |= zip(term, tensor.shape, strict=True)
    return 2 * int(np.prod(list(lengths.values())))


def product_flops(operation: tf.Operation) -> int:
    """FLOPs of an operation of a graph with known shapes; 0 for what is no product."""
    if operation.type == "Conv2D":
        kernel = operation.inputs[1].shape
        return 2 * operation.outputs[0].shape.num_elements() * int(np.prod(kernel[:3]))
    if operation.type == "MatMul":
        inner = operation.inputs[0].shape[0 if operation.get_attr("transpose_a") else 1]
        return 2 * operation.outputs[0].shape.num_elements() * inner
    if operation.type == "Einsum":
        return einsum_flops(operation)
    assert not re.search("Conv|MatMul", operation.type), operation.type
    return 0


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("resnet_tiny", {"image_size": 32}),
        ("resnet_tiny", {"image_size": 45}),
        ("bert_tiny", {"seq_length": 64}),
    ],
)
def test_flops_per_sample_are_three_times_the_forward_graphs(name: str, size: dict[str, int]) -> None:
    config = config_of(name, **size)
    model = MODELS[name].build(config)
    if name.startswith("bert"):
        untie(model)
    graph = tf.function(
        lambda: model(_sample(config), training=True, **_seed_of(name))
    ).get_concrete_function()
    flops = sum(product_flops(operation) for operation in graph.graph.get_operations())
    assert 3 * flops == MODELS[name].flops_per_sample(config)


def _sample(config: BenchmarkConfig) -> Any:
    if config.image_size:
        return tf.zeros([1, config.image_size, config.image_size, 3])
    tokens = tf.ones([1, config.seq_length], tf.int32)
    places = tf.range(masked_positions(config.seq_length))[None]
    return {"input_ids": tokens, "attention_mask": tokens, "masked_positions": places}


def _seed_of(name: str) -> dict[str, Any]:
    return {"seed": tf.constant([0, 0])} if name.startswith("bert") else {}


# By hand for hidden size h: embeddings (30,522 + 512 + 2) h, their norm 2 h; a block
# 4 (h² + h) + (4 h² + 4 h) + (4 h² + h) + 4 h; the head h² + h, 2 h and a bias for each word.
@pytest.mark.parametrize(
    ("shape", "parameters"), [(BERT_BASE_SHAPE, 109_514_298), (BERT_LARGE_SHAPE, 335_174_458)]
)
def test_bert_has_as_many_parameters_as_transformers(shape: BertShape, parameters: int) -> None:
    with keras.StatelessScope(initialize_variables=False):  # shapes without the memory
        model = Bert(shape)
    assert sum(np.prod(variable.shape) for variable in model.trainable_variables) == parameters


@pytest.mark.parametrize(("seq_length", "places"), [(128, 20), (384, 60), (512, 80), (8, 4)])
def test_masked_positions_of_known_lengths(seq_length: int, places: int) -> None:
    assert masked_positions(seq_length) == places


def test_masked_positions_are_the_fewest_fours_that_reach_the_share() -> None:
    for seq_length in range(8, 513):
        places = masked_positions(seq_length)
        assert places % 4 == 0, seq_length
        assert places <= seq_length
        assert 100 * (places - 4) < 15 * seq_length <= 100 * places, seq_length


def test_too_long_a_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match="--seq_length=1024: at most 512 for bert_base"):
        MODELS["bert_base"].build(config_of("bert_base", seq_length=1024))


# Number formats and padding.


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("name", "size"), [("resnet_tiny", {"image_size": 32}), ("bert_tiny", {"seq_length": 32})]
)
@pytest.mark.parametrize("training", [True, False])
def test_logits_are_float32(name: str, size: dict[str, int], policy: str, training: bool) -> None:
    config = config_of(name, **size)
    with dtype_policy(policy):
        model = MODELS[name].build(config)
    logits = model(_sample(config), training=training)
    assert logits.dtype == tf.float32
    assert all(variable.dtype == "float32" for variable in model.variables)
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_padding_is_finite_and_unseen(policy: str) -> None:
    config = config_of("text", seq_length=SEQ_LENGTH)
    with dtype_policy(policy):
        model = TEXT.build(config)
    for variable in model.trainable_variables:  # weights large enough for the attention to choose
        variable.assign(variable + 0.3 * np.random.default_rng(0).standard_normal(variable.shape))
    batch = text_batch(3)
    batch["attention_mask"][:] = 1
    batch["attention_mask"][0] = 0  # nothing but padding
    batch["attention_mask"][1, 10:] = 0
    other = batch | {"input_ids": batch["input_ids"].copy()}
    other["input_ids"][1, 10:] = 63 - other["input_ids"][1, 10:]
    other["input_ids"][2, 10:] = 63 - other["input_ids"][2, 10:]
    logits, others = model(batch).numpy(), model(other).numpy()  # at places 1, 4, 6 and 9
    assert np.isfinite(logits).all()
    np.testing.assert_array_equal(logits[1], others[1])
    assert (logits[2] != others[2]).any()  # the same places, were they not padding


def test_gradients_of_a_sequence_of_padding_are_finite_in_float16() -> None:
    with dtype_policy("mixed_float16"):
        model = TEXT.build(config_of("text", seq_length=SEQ_LENGTH))
    batch = text_batch(2)
    batch["attention_mask"][0] = 0
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(masked_language_model_loss(model, batch, training=True, seed=None).loss)
    for gradient in tape.gradient(loss, [variable.value for variable in model.trainable_variables]):
        assert np.isfinite(tf.convert_to_tensor(gradient)).all()


# Layers.


def batch_norm_of(x: np.ndarray, upstream: np.ndarray, gamma: np.ndarray, beta: np.ndarray) -> dict[str, Any]:
    """Batch normalisation and its gradients by the formulas of Ioffe and Szegedy (2015), float64."""
    count, axes = x[..., 0].size, (0, 1, 2)
    mean, variance = x.mean(axes), x.var(axes)
    root = np.sqrt(variance + 1e-5)
    normal = (x - mean) / root
    through_sums = upstream.mean(axes) + normal * (upstream * normal).mean(axes)
    return {
        "y": gamma * normal + beta,
        "x": gamma / root * (upstream - through_sums),
        "gamma": (upstream * normal).sum(axes),
        "beta": upstream.sum(axes),
        "moving_mean": 0.1 * mean,
        "moving_variance": 0.9 + 0.1 * variance * count / (count - 1),
    }


@pytest.mark.parametrize(
    ("policy", "jit_compile", "atol"),
    [
        ("float64", False, 1e-12),
        ("float32", False, 1e-5),
        ("float32", True, 1e-5),
        ("mixed_float16", False, 2e-2),
        ("mixed_float16", True, 2e-2),
    ],
)
def test_fused_batch_norm_is_the_formula(policy: str, jit_compile: bool, atol: float) -> None:
    rng = np.random.default_rng(0)
    with dtype_policy(policy):
        layer = FusedBatchNorm(3)
    x = rng.normal(1.0, 2.0, (4, 3, 2, 3)).astype(layer.compute_dtype)
    upstream = rng.standard_normal(x.shape).astype(layer.compute_dtype)
    layer.gamma.assign(gamma := np.array([0.5, 1.0, 2.0]))
    layer.beta.assign(beta := np.array([-1.0, 0.0, 3.0]))

    @tf.function(jit_compile=jit_compile)
    def train(x: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
        gradients = tape.gradient(y, [x, layer.gamma.value, layer.beta.value], output_gradients=upstream)
        return {"y": y} | dict(zip(("x", "gamma", "beta"), gradients, strict=True))

    seen = train(tf.constant(x)) | {
        "moving_mean": layer.moving_mean,
        "moving_variance": layer.moving_variance,
    }
    expected = batch_norm_of(x.astype("float64"), upstream.astype("float64"), gamma, beta)
    for name, value in expected.items():
        np.testing.assert_allclose(seen[name], value, atol=atol, rtol=atol, err_msg=name)
    assert seen["y"].dtype == layer.compute_dtype


@pytest.mark.parametrize(("policy", "atol"), [("float64", 1e-12), ("float32", 1e-5), ("mixed_float16", 2e-2)])
def test_batch_norm_in_inference_uses_the_moving_statistics(policy: str, atol: float) -> None:
    with dtype_policy(policy):
        layer = FusedBatchNorm(2)
    for variable, values in zip(
        layer.weights, ([2.0, 3.0], [1.0, -1.0], [0.5, -2.0], [4.0, 0.25]), strict=True
    ):
        variable.assign(values)
    x = tf.constant([[[[1.5, -1.0]], [[0.5, -3.0]]]], layer.compute_dtype)
    # (x - mean) / root of the variance: 0.5 and 2; then 0 and -2. Times gamma, plus beta.
    np.testing.assert_allclose(layer(x)[0, :, 0], [[2.0, 5.0], [1.0, -7.0]], atol=atol, rtol=1e-4)
    np.testing.assert_array_equal(layer.moving_mean, [0.5, -2.0])
    np.testing.assert_array_equal(layer.moving_variance, [4.0, 0.25])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "ids",
    [
        [[1, 3, 1], [5, 1, 0]],  # one row thrice, two never; no two tokens in a block
        [[1, 3, 1, 1], [5, 1, 0, 5]],  # one block
        np.random.default_rng(1).integers(0, 6, (3, 512)),
    ],
)
def test_embedding_lookup_has_gathers_gradient(ids: Any, compiled: bool) -> None:
    rng = np.random.default_rng(0)
    table, ids = tf.constant(rng.standard_normal((6, 4))), tf.constant(ids, tf.int32)
    upstream = rng.standard_normal((*ids.shape, 4))

    def looked_up(table: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(table)
            rows = embedding_lookup(table, ids)
        gradient = tape.gradient(rows, table, tf.constant(upstream))
        assert isinstance(gradient, tf.Tensor)  # dense, as the all-reduce wants it
        return rows, gradient

    rows, gradient = tf.function(looked_up, jit_compile=compiled)(table)
    np.testing.assert_array_equal(rows, table.numpy()[ids])
    truth = np.zeros((6, 4))
    np.add.at(truth, ids.numpy(), upstream)
    np.testing.assert_allclose(gradient, truth, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("xla", [False, True])
def test_equal_tokens_of_a_block_are_one_addition(xla: bool) -> None:
    ids = tf.constant([0] * 300 + [1, 2] * 106 + [0] * 512)
    merged, rows = tf.function(merge_equal, jit_compile=xla)(tf.ones([1024, 2]), ids)
    added = {(row, *merged[place].numpy()) for place, row in enumerate(rows.numpy()) if row >= 0}
    assert added == {(0, 300.0, 300.0), (1, 106.0, 106.0), (2, 106.0, 106.0), (0, 512.0, 512.0)}
    assert np.sum(rows >= 0) == 4


def test_dropout_zeroes_the_share_and_scales_the_rest() -> None:
    x = tf.random.stateless_normal([100_000], [1, 2])
    dropped = dropout(x, 0.1, tf.constant([3, 4]), place=0).numpy()
    zero = dropped == 0
    assert zero.mean() == pytest.approx(0.1, abs=0.004)  # four standard deviations
    np.testing.assert_allclose(dropped[~zero], x.numpy()[~zero] / 0.9, rtol=1e-6)


def test_dropout_masks_are_independent() -> None:
    """Of neighbours, rows, places and seeds: correlations of 2**16 draws each stay within five deviations."""
    seeds, places, size = ([0, 0], [0, 1], [1, 0], [1, 1]), (0, 1, 2), 2**16
    ones = tf.ones((256, 256))
    masks = [dropout(ones, 0.1, tf.constant(s), p).numpy().ravel() == 0 for s in seeds for p in places]
    between = np.corrcoef(masks)[np.triu_indices(len(masks), 1)]
    within = [
        np.corrcoef(mask[:-lag], mask[lag:])[0, 1] for mask in masks for lag in (1, 2, 16, 255, 256, 257)
    ]
    assert np.abs([*between, *within]).max() < 5 / size**0.5
    deviation = (0.1 * 0.9 / size) ** 0.5
    assert np.abs(np.mean(masks, axis=1) - 0.1).max() < 5 * deviation


def test_dropout_of_rate_0_is_the_identity() -> None:
    x = tf.constant([1.0, 2.0])
    np.testing.assert_array_equal(dropout(x, 0.0, None, place=0), x)


def test_dropout_masks_depend_on_seed_and_place_alone() -> None:
    def mask(seed: list[int], place: int) -> bytes:
        return dropout(tf.ones(64), 0.5, tf.constant(seed), place).numpy().tobytes()

    assert mask([3, 4], 0) == mask([3, 4], 0)
    assert len({mask([3, 4], 0), mask([3, 4], 1), mask([3, 5], 0), mask([4, 4], 0)}) == 4


def values_and_gradients(function: Callable[..., Any], *inputs: np.ndarray) -> list[np.ndarray]:
    """The output and the gradient by each input of a fixed weighted sum of it."""
    tensors = [tf.constant(value) for value in inputs]
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        output = function(*tensors)
        weights = np.random.default_rng(5).standard_normal(output.shape)
        total = tf.reduce_sum(output * tf.constant(weights, output.dtype))
    return [output.numpy(), *(tf.convert_to_tensor(g).numpy() for g in tape.gradient(total, tensors))]


def layer_norm(x: Any, gamma: Any, beta: Any) -> Any:
    layer = LayerNorm(x.shape[-1], 1e-3)
    layer.gamma, layer.beta = gamma, beta
    return layer(x)


def keras_formula(x: Any, gamma: Any, beta: Any) -> Any:
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return tf.nn.batch_normalization(x, mean, variance, beta, gamma, 1e-3)


@pytest.mark.parametrize(
    ("ours", "theirs", "shapes", "tolerance"),
    [
        (gelu, tf.nn.gelu, [(6, 50)], GELU_TOLERANCE),
        (lambda x: softmax(x, tf.zeros((1, 9))), tf.nn.softmax, [(4, 5, 9)], 1e-14),
        (layer_norm, keras_formula, [(3, 4, 8), (8,), (8,)], 1e-13),
    ],
    ids=["gelu", "softmax", "layer norm"],
)
def test_written_out_gradients_are_tensorflows(
    ours: Callable[..., Any], theirs: Callable[..., Any], shapes: list[tuple[int, ...]], tolerance: float
) -> None:
    generator = np.random.default_rng(3)
    inputs = [generator.standard_normal(shape) for shape in shapes]
    with dtype_policy("float64"):
        pairs = zip(values_and_gradients(ours, *inputs), values_and_gradients(theirs, *inputs), strict=True)
        for mine, other in pairs:
            np.testing.assert_allclose(mine, other, atol=tolerance)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "XLA"])
def test_gelu_of_half_precision_is_gelu_rounded(dtype: Any, compiled: bool) -> None:
    x = tf.cast(np.linspace(-9, 9, 4001), dtype)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.function(gelu, jit_compile=compiled)(x)
    slope, exact = tape.gradient(y, x), x.numpy().astype(float)
    bell = np.exp(-0.5 * exact**2) / np.sqrt(2 * np.pi)
    rounding = 2.0 ** (-10 if dtype == tf.float16 else -7)
    for got, want in ((y, exact * special.ndtr(exact)), (slope, special.ndtr(exact) + exact * bell)):
        np.testing.assert_allclose(got.numpy().astype(float), want, rtol=rounding, atol=1e-5)


def test_softmax_takes_a_bias_and_masks_with_it() -> None:
    scores, bias = tf.constant([[1.0, 2.0, 3.0]], tf.float16), tf.constant([[0.0, -1e9, 1.0]])
    weights = softmax(scores, bias)
    assert weights.dtype == tf.float16
    np.testing.assert_allclose(weights, [[1 / (1 + np.e**3), 0, np.e**3 / (1 + np.e**3)]], rtol=1e-3)


@pytest.mark.parametrize("shape", [(2, 8, 8, 3), (2, 9, 7, 3), (1, 16, 13, 2)], ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "XLA"])
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_relu_max_pool_is_relu_and_max_pool(shape: tuple[int, ...], compiled: bool, dtype: str) -> None:
    """Values rounded to tenths, so that many are equal: the gradient goes to the first of them."""
    x = np.random.default_rng(2).standard_normal(shape).round(1).astype(dtype)

    def theirs(x: Any) -> Any:
        padding = [[0, 0], [1, 1], [1, 1], [0, 0]]
        return tf.nn.max_pool2d(tf.pad(tf.nn.relu(x), padding, constant_values=x.dtype.min), 3, 2, "VALID")

    ours = tf.function(relu_max_pool, jit_compile=compiled)
    for mine, other in zip(values_and_gradients(ours, x), values_and_gradients(theirs, x), strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-14 if dtype == "float64" else 4e-3)


def untie(model: Bert) -> None:
    """Every block computes what it is by itself, where it is called."""
    for block in model.blocks:
        block.encode = block._encode


def test_every_dropout_of_bert_has_its_own_place(monkeypatch: pytest.MonkeyPatch) -> None:
    places = []

    def seen(x: Any, rate: float, seed: Any, place: Any) -> Any:
        places.append((int(place), rate))
        return x

    monkeypatch.setattr(bert_model, "dropout", seen)
    monkeypatch.setattr(attention, "dropout", seen)
    monkeypatch.setattr(residual_norm, "dropout", seen)
    model = Bert(BertShape(3, 32, 2, 64, SEQ_LENGTH), dropout_rate=0.25)
    untie(model)
    model(text_batch(1), training=True, seed=tf.constant([0, 0]))
    assert sorted(places) == [(place, 0.25) for place in range(1 + 3 * 3)]  # embedding; three in a block


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_that_are_traced_once_are_the_blocks(policy: str) -> None:
    """Logits and gradients, with dropout and every weight different; traced once for all three blocks."""
    with dtype_policy(policy):
        model = Bert(BertShape(3, 32, 2, 64, SEQ_LENGTH), dropout_rate=0.25)
    for number, variable in enumerate(model.trainable_variables):
        variable.assign(variable + 0.1 * tf.random.stateless_normal(variable.shape, [1, number]))
    batch = {name: tf.constant(value) for name, value in text_batch(4).items()}

    def logits_and_gradients() -> list[Any]:
        with tf.GradientTape() as tape:
            logits = model(batch, training=True, seed=tf.constant([3, 4]))
        sources = [variable.value for variable in model.trainable_variables]
        gradients = tape.gradient(logits, sources, tf.random.stateless_normal(logits.shape, [5, 6]))
        return [tf.convert_to_tensor(each) for each in (logits, *gradients)]

    together = tf.function(logits_and_gradients)()
    assert model.blocks[2].encode.experimental_get_tracing_count() == 1
    untie(model)
    apart = tf.function(logits_and_gradients)()
    for ours, other in zip(together, apart, strict=True):
        np.testing.assert_allclose(ours, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())


def test_dropout_acts_in_training_only() -> None:
    config = dataclasses.replace(config_of("text", seq_length=SEQ_LENGTH), dropout=0.5)
    model, batch = TEXT.build(config), text_batch(2)
    inference = model(batch, training=False)
    model.rate = 0.0
    for block in model.blocks:
        block.rate = 0.0
    np.testing.assert_array_equal(inference, model(batch, training=True))


# Losses.


def test_images_are_standardised() -> None:
    black_and_white = tf.constant([[[[0, 0, 0], [255, 255, 255]]]], tf.uint8)
    # torchvision's transforms.Normalize of 0 and 1.
    expected = [[-2.117904, -2.035714, -1.804444], [2.248908, 2.428571, 2.640000]]
    np.testing.assert_allclose(normalize(black_and_white, "float32")[0, 0], expected, atol=1e-6)
    standardised = tf.constant([[[[0.5, -1.0, 2.0]]]])
    np.testing.assert_array_equal(normalize(standardised, "float16"), standardised)


class Fixed:
    """A model that gives the same logits whatever it reads."""

    compute_dtype = "float32"

    def __init__(self, logits: np.ndarray):
        self.logits = tf.constant(logits, tf.float32)

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self.logits


def test_classification_loss_is_keras_smoothed_cross_entropy() -> None:
    logits = np.random.default_rng(0).normal(0, 3, (5, 7))
    label = tf.constant([0, 6, 3, int(logits[3].argmax()), int(logits[4].argmin())])
    batch = {"image": tf.zeros([5, 8, 8, 3], tf.uint8), "label": label}
    each = classification_loss(Fixed(logits), batch, training=True, seed=None)
    expected = keras.losses.categorical_crossentropy(
        tf.one_hot(label, 7), tf.constant(logits), from_logits=True, label_smoothing=0.1
    )
    np.testing.assert_allclose(each.loss, expected, rtol=1e-5)
    np.testing.assert_array_equal(each.correct, logits.argmax(-1) == label)
    np.testing.assert_array_equal(each.predictions, np.ones(5))
    assert each.correct[3] == 1
    assert each.correct[4] == 0


def test_masked_loss_averages_each_sequence_over_the_places_it_uses() -> None:
    logits = np.random.default_rng(0).normal(0, 3, (3, 4, 7))
    target = logits.argmax(-1).astype("int32")
    target[0, 1] = logits[0, 1].argmin()
    weight = np.array([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]], "float32")
    each = masked_language_model_loss(
        Fixed(logits), {"masked_ids": target, "masked_weights": weight}, training=True, seed=None
    )
    place = keras.losses.sparse_categorical_crossentropy(
        target, tf.constant(logits), from_logits=True
    ).numpy()
    # The last sequence uses no place: loss 0, not NaN.
    np.testing.assert_allclose(each.loss, [place[0, :3].mean(), place[1, 0], 0.0], rtol=1e-5)
    np.testing.assert_array_equal(each.correct, [2, 1, 0])
    np.testing.assert_array_equal(each.predictions, [3, 1, 0])
