"""Attention by the formula and fused, and the call of a Triton kernel: all that needs no GPU."""

import re
from typing import Any

import numpy as np
import pytest
import step_helpers  # noqa: F401  (before TensorFlow starts its devices)
import tensorflow as tf

from tfbench.config import BenchmarkConfig
from tfbench.kernels import Kernel
from tfbench.kernels import call as kernel_call
from tfbench.models import MODELS
from tfbench.models import attention as attention_module
from tfbench.models.attention import fused_attention, plain_attention
from tfbench.models.layers import dropout_keys

BATCH, LENGTH, HEADS, SIZE = 2, 8, 6, 4
SEED, PLACE = tf.constant([7, -9]), 5


def mask_of(keys: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Which weights are kept, from the three numbers that the kernels get: the hash in NumPy's uint32."""
    start, second, threshold = (np.uint32(key) for key in np.asarray(keys))
    with np.errstate(over="ignore"):
        bits = np.arange(np.prod(shape), dtype=np.uint32) * np.uint32(0x9E3779B9) + start
        bits = (bits ^ (bits >> np.uint32(16))) * np.uint32(0x7FEB352D) + second
        bits = (bits ^ (bits >> np.uint32(15))) * np.uint32(0x846CA68B)
    return ((bits ^ (bits >> np.uint32(16))) >= threshold).reshape(shape)


def factors(qkv: Any, bias: Any, keys: Any, rate: float) -> tuple[np.ndarray, ...]:
    """Query, key, value; softmax [B, H, S, S]; what dropout multiplies it with. In float64."""
    query, key, value = np.moveaxis(np.asarray(qkv, float), 2, 0)
    scores = np.einsum("bqhd,bkhd->bhqk", query, key) / SIZE**0.5 + np.asarray(bias, float)[:, None, None, :]
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    kept = mask_of(keys, weights.shape) / (1 - rate) if rate else np.ones_like(weights)
    return query, key, value, weights, kept


def forward(qkv: Any, bias: Any, keys: Any, rate: float) -> np.ndarray:
    """[B, S, H, D]."""
    _, _, value, weights, kept = factors(qkv, bias, keys, rate)
    return np.einsum("bhqk,bkhd->bqhd", weights * kept, value)


def backward(qkv: Any, bias: Any, keys: Any, rate: float, upstream: Any) -> np.ndarray:
    """The gradient by qkv, from the formula on paper."""
    query, key, value, weights, kept = factors(qkv, bias, keys, rate)
    upstream = np.asarray(upstream, float)
    d_weights = np.einsum("bqhd,bkhd->bhqk", upstream, value) * kept
    d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdims=True)) / SIZE**0.5
    d_query = np.einsum("bhqk,bkhd->bqhd", d_scores, key)
    d_key = np.einsum("bhqk,bqhd->bkhd", d_scores, query)
    d_value = np.einsum("bhqk,bqhd->bkhd", weights * kept, upstream)
    return np.stack([d_query, d_key, d_value], axis=2)


def inputs() -> tuple[Any, Any, Any]:
    """qkv, a bias that hides the second sequence's end, an upstream gradient; float64."""
    random = np.random.default_rng(3)
    qkv = tf.constant(random.standard_normal((BATCH, LENGTH, 3, HEADS, SIZE)))
    bias = np.zeros((BATCH, LENGTH), "float32")
    bias[1, 5:] = -1e9
    return qkv, tf.constant(bias), tf.constant(random.standard_normal((BATCH, LENGTH, HEADS * SIZE)))


def result_and_gradient(attention: Any, rate: float) -> tuple[np.ndarray, np.ndarray]:
    qkv, bias, upstream = inputs()
    with tf.GradientTape() as tape:
        tape.watch(qkv)
        result = attention(qkv, bias, rate, SEED if rate else None, PLACE)
    return result.numpy(), tape.gradient(result, qkv, upstream).numpy()


def expected(rate: float) -> tuple[np.ndarray, np.ndarray]:
    qkv, bias, upstream = inputs()
    keys = dropout_keys(rate, SEED, PLACE)
    split = upstream.numpy().reshape(BATCH, LENGTH, HEADS, SIZE)
    result = forward(qkv, bias, keys, rate).reshape(BATCH, LENGTH, HEADS * SIZE)
    return result, backward(qkv, bias, keys, rate, split)


@pytest.mark.parametrize("rate", [0.0, 0.25])
def test_plain_attention_is_the_formula(rate: float) -> None:
    for ours, other in zip(result_and_gradient(plain_attention, rate), expected(rate), strict=True):
        np.testing.assert_allclose(ours, other, atol=1e-12)


def test_dropout_keys_are_the_masks_of_dropout() -> None:
    mask = mask_of(dropout_keys(0.25, SEED, PLACE), (4, 100))
    dropped = attention_module.dropout(tf.ones((4, 100)), 0.25, SEED, PLACE).numpy()
    np.testing.assert_array_equal(mask, dropped > 0)
    assert 0 < mask.mean() < 1


@pytest.mark.parametrize("rate", [0.0, 0.25])
@pytest.mark.parametrize("sums", [False, True], ids=["one tile", "blocks"])
def test_fused_attention_gives_kernels_what_they_ask_for(
    monkeypatch: pytest.MonkeyPatch, rate: float, sums: bool
) -> None:
    """With the formula in NumPy for the kernels: operands, their order, shapes, grid, the gradient's way."""
    block = LENGTH // 2 if sums else LENGTH
    pair = (Kernel("forward", "", block, 4, 2), Kernel("backward", "", LENGTH, 8, 1, sums))
    asked = []

    def kernels(*facts: Any) -> tuple[Kernel, Kernel]:
        asked.append(facts)
        return pair

    def launch(
        name: str, ir: str, operands: Any, outputs: Any, grid: Any, num_warps: int, num_stages: int
    ) -> list[Any]:
        assert grid == ((HEADS, BATCH, LENGTH // block) if name == "forward" else (HEADS, BATCH, 1))
        assert (num_warps, num_stages) == ((4, 2) if name == "forward" else (8, 1))
        qkv, bias, keys, *rest = operands
        assert keys.dtype == tf.uint32
        if name == "backward":
            result, statistics, upstream = rest
            np.testing.assert_allclose(result, forward(qkv, bias, keys, rate))
            assert (statistics.numpy() == 5).all()
            values = [backward(qkv, bias, keys, rate, upstream), np.zeros((BATCH, HEADS, LENGTH, SIZE))][
                : 1 + sums
            ]
        else:
            marker = np.full((BATCH, HEADS, 2, LENGTH), 5.0)
            values = [forward(qkv, bias, keys, rate), marker]
        for value, output in zip(values, outputs, strict=True):
            assert output.shape == value.shape
        return [tf.cast(value, output.dtype) for value, output in zip(values, outputs, strict=True)]

    monkeypatch.setattr(attention_module, "attention_kernels", kernels)
    monkeypatch.setattr(kernel_call, "triton_call", launch)
    for ours, other in zip(result_and_gradient(fused_attention, rate), expected(rate), strict=True):
        np.testing.assert_allclose(ours, other, atol=1e-12)
    assert asked == [("float64", LENGTH, SIZE, bool(rate))]


@pytest.mark.parametrize(
    ("kernels", "way"), [("fused", fused_attention), ("plain", plain_attention), (None, plain_attention)]
)
def test_bert_takes_the_kernels_of_its_configuration(kernels: str | None, way: Any) -> None:
    model = MODELS["bert_tiny"].build(BenchmarkConfig(model="bert_tiny", seq_length=64, kernels=kernels))
    assert [block.attention for block in model.blocks] == [way] * len(model.blocks)


# The call of a kernel.

IR = 'module {\n  tt.func public @k(%x: !tt.ptr<f16>) // "quoted\\", 1 µs\n}'


def call_on_the_cpu(monkeypatch: pytest.MonkeyPatch, outputs: list[Any]) -> None:
    """Compiles a call for the platform that is here."""
    original = kernel_call.xla.call_module

    def for_the_cpu(args: Any, **attributes: Any) -> Any:
        return original(args, **attributes | {"platforms": ["CPU"]})

    monkeypatch.setattr(kernel_call.xla, "call_module", for_the_cpu)
    x, count = tf.zeros((2, 3), tf.float16), tf.constant(4)
    tf.function(
        lambda x, count: kernel_call.triton_call("k", IR, [x, count], outputs, (3, 2, 1), 4, 2),
        jit_compile=True,
    )(x, count)


@pytest.mark.parametrize(
    "outputs",
    [[tf.TensorSpec((), tf.uint32)], [tf.TensorSpec((5,)), tf.TensorSpec((2, 1, 3), tf.bfloat16)]],
    ids=["one", "two"],
)
def test_xla_takes_the_call_and_misses_only_its_gpu(monkeypatch: pytest.MonkeyPatch, outputs: list) -> None:
    """Parsing, types, layouts and the dictionary are checked before the target is looked for."""
    with pytest.raises(
        tf.errors.NotFoundError, match=r"No FFI handler registered for __gpu\$xla\.gpu\.triton"
    ):
        call_on_the_cpu(monkeypatch, outputs)


def test_a_call_that_xla_cannot_read_fails_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    text = kernel_call.stablehlo
    monkeypatch.setattr(
        kernel_call, "stablehlo", lambda *args: text(*args).replace("tensor<i32>", "tensor<i3>")
    )
    with pytest.raises((tf.errors.InvalidArgumentError, tf.errors.InternalError)) as refused:
        call_on_the_cpu(monkeypatch, [tf.TensorSpec((5,))])
    assert "FFI" not in str(refused.value)


def test_the_cpu_is_refused_by_name() -> None:
    call = tf.function(
        lambda x: kernel_call.triton_call("k", IR, [x], [tf.TensorSpec((1,))], (1, 1, 1), 4, 1),
        jit_compile=True,
    )
    with pytest.raises(tf.errors.NotFoundError, match=r"platform CPU is not among .*\[CUDA\]"):
        call(tf.zeros(3))


def test_module_carries_the_kernel_and_its_launch() -> None:
    operands = [tf.zeros((2, 3), tf.float16), tf.constant(4)]
    config = {"num_warps": 8, "num_stages": 3, "grid_x": 5, "grid_y": 6, "grid_z": 7}
    text = kernel_call.stablehlo("k", IR, operands, [tf.TensorSpec((4, 1), tf.bfloat16)], config)
    (quoted,) = re.findall(r'ir = "([^"]*)"', text)
    unquoted = re.sub(rb"\\([0-9A-F]{2})", lambda found: bytes.fromhex(found[1].decode()), quoted.encode())
    assert unquoted.decode() == IR
    for part in (
        'name = "k"', "num_warps = 8 : i32", "num_stages = 3 : i32", "grid_x = 5 : i32", "grid_y = 6 : i32",
        "grid_z = 7 : i32", "(tensor<2x3xf16>, tensor<i32>) -> (tensor<4x1xbf16>)",
        "operand_layouts = [dense<[1, 0]> : tensor<2xindex>, dense<> : tensor<0xindex>]",
    ):  # fmt: skip
        assert part in text


@pytest.mark.parametrize(
    ("operand", "words"),
    [
        (tf.TensorSpec((None, 3)), r"kernel k: \(None, 3\) of float32; a static shape"),
        (tf.TensorSpec((3,), tf.complex64), r"kernel k: \(3,\) of complex64; .*float16, bfloat16"),
    ],
)
def test_what_a_kernel_cannot_take_is_named(operand: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kernel_call.stablehlo("k", IR, [operand], [], {})
