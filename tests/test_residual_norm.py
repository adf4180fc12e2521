"""The end of a transformer's branch by the formula and fused, and what the kernels compute."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import step_helpers  # before TensorFlow starts its devices
import tensorflow as tf
from norm_helpers import backward, forward, mask_of

from tfbench.kernels import Kernel
from tfbench.kernels import call as kernel_call
from tfbench.models import residual_norm
from tfbench.models.bert import BertShape
from tfbench.models.bert_model import EncoderBlock
from tfbench.models.layers import LayerNorm, Linear
from tfbench.models.residual_norm import fused_residual_norm, plain_residual_norm

SHAPE, INNER, EPSILON = (2, 6, 10), 5, 1e-3
SEED, PLACE = tf.constant([7, -9]), 5


def multipliers(rate: float, keys: Any, shape: tuple[int, ...]) -> Any:
    return mask_of(keys, shape) / (1 - rate) if rate else np.ones(shape)


class Parts:
    """A projection, a norm, and float64 inputs and upstream gradient for them."""

    def __init__(self) -> None:
        random = np.random.default_rng(3)
        self.linear = Linear(INNER, SHAPE[-1], 1.0)
        self.norm = LayerNorm(SHAPE[-1], EPSILON)
        self.parameters = [self.linear.bias, self.norm.gamma, self.norm.beta]
        for parameter in self.parameters:
            parameter.assign(random.standard_normal(SHAPE[-1]))
        self.x, self.upstream = (tf.constant(random.standard_normal(SHAPE)) for _ in range(2))
        self.inner = tf.constant(random.standard_normal((*SHAPE[:-1], INNER)))

    def run(self, function: Any, rate: float) -> list[np.ndarray]:
        """The result and the gradients by x, inner, kernel, bias, gamma, beta."""
        sources = [self.x, self.inner, *(p.value for p in (self.linear.kernel, *self.parameters))]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            out = function(self.x, self.inner, self.linear, self.norm, rate, SEED if rate else None, PLACE)
        return [np.asarray(value) for value in (out, *tape.gradient(out, sources, self.upstream))]

    def expected(self, rate: float) -> list[np.ndarray]:
        kept = multipliers(rate, residual_norm.dropout_keys(rate, SEED, PLACE), SHAPE)
        x, inner, kernel = (np.asarray(value) for value in (self.x, self.inner, self.linear.kernel.value))
        bias, gamma, beta = (np.asarray(parameter.value) for parameter in self.parameters)
        total, out = forward(x, inner @ kernel, bias, gamma, beta, kept, EPSILON)
        d_total, d_y, parts = backward(total, self.upstream, gamma, kept, EPSILON)
        d_gamma, d_beta, d_bias = parts.sum(0)
        d_kernel = np.einsum("bsi,bsh->ih", inner, d_y)
        return [out, d_total, d_y @ kernel.T, d_kernel, d_bias, d_gamma, d_beta]


@pytest.fixture
def parts() -> Iterator[Parts]:
    with step_helpers.dtype_policy("float64"):
        yield Parts()


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_plain_is_the_formula(parts: Parts, rate: float) -> None:
    for ours, other in zip(parts.run(plain_residual_norm, rate), parts.expected(rate), strict=True):
        np.testing.assert_allclose(ours, other, atol=1e-12)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_fused_gives_kernels_what_they_ask_for(
    monkeypatch: pytest.MonkeyPatch, parts: Parts, rate: float
) -> None:
    """With the formula in NumPy for the kernels: operands, their order, shapes, grid, the gradient's way."""
    pair = (Kernel("forward", "", 3, 4, 2), Kernel("backward", "", 4, 8, 1))

    def launch(
        name: str, ir: str, operands: Any, outputs: Any, grid: Any, num_warps: int, num_stages: int
    ) -> list[Any]:
        *values, keys, epsilon = operands
        assert (keys.dtype, epsilon.dtype, epsilon.shape) == (tf.uint32, tf.float32, (1,))
        kept = multipliers(rate, keys, SHAPE)
        if name == "forward":
            assert (grid, num_warps, num_stages) == ((4, 1, 1), 4, 2)
            results = forward(*values, kept, EPSILON)
        else:
            assert (grid, num_warps, num_stages) == ((3, 1, 1), 8, 1)
            *results, each_row = backward(*values, kept, EPSILON)
            results.append(each_row.reshape(3, 4, 3, SHAPE[-1]).sum(1))
        for value, output in zip(results, outputs, strict=True):
            assert output.shape == value.shape
        assert [output.dtype for output in outputs] == [tf.float64, tf.float64, tf.float32][: len(outputs)]
        return [tf.constant(value) for value in results]

    monkeypatch.setattr(residual_norm, "norm_kernels", lambda dtype, features: pair)
    monkeypatch.setattr(kernel_call, "triton_call", launch)
    for ours, other in zip(parts.run(fused_residual_norm, rate), parts.expected(rate), strict=True):
        np.testing.assert_allclose(ours, other, atol=1e-12)


MLIR_DTYPES = {"f16": tf.float16, "bf16": tf.bfloat16, "f32": tf.float32, "i32": tf.uint32}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_pointers_of_the_texts_are_the_tensors_of_a_block(
    monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """A block of BERT in training: number and dtypes of what each of its kernels reads and writes."""
    shape = BertShape(1, 128, 2, 512, 128)
    launched = []

    def launch(name: str, ir: str, operands: Any, outputs: Any, *_: Any) -> list[Any]:
        (arguments,) = re.findall(rf"@{name}\((.*?)\) attributes", ir)
        types = [MLIR_DTYPES[kind] for kind in re.findall(r"!tt.ptr<(\w+)>", arguments)]
        assert types == [tensor.dtype for tensor in (*operands, *outputs)], name
        launched.append(name)
        return [tf.zeros(output.shape, output.dtype) for output in outputs]

    monkeypatch.setattr(kernel_call, "triton_call", launch)
    with step_helpers.dtype_policy(f"mixed_{dtype}"):
        block = EncoderBlock(shape, 0.1, 1, fused=True)
        x = tf.ones((2, 128, shape.hidden), tf.as_dtype(dtype))
        with tf.GradientTape() as tape:
            out = block(x, score_bias=tf.zeros((2, 128)), training=True, seed=SEED)
        gradients = tape.gradient(out, block.trainable_weights)
    assert launched.count("norm_forward") == launched.count("norm_backward") == 2
    assert [gradient.dtype for gradient in gradients] == [tf.float32] * len(block.trainable_weights)


@pytest.mark.parametrize(("shape", "rows"), [((2, 6, 10), "12"), ((None, 6, 10), "None")])
def test_rows_that_programs_cannot_share_are_refused(shape: tuple[int | None, ...], rows: str) -> None:
    with pytest.raises(ValueError, match=f"kernel forward: {rows} rows; a multiple of 5 is accepted"):
        residual_norm.programs_for(Kernel("forward", "", 5, 4, 1), tf.TensorSpec(shape))
