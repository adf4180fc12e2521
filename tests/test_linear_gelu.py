"""A perceptron's first half by the formula and fused, and what the kernels are given."""

import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import step_helpers  # before TensorFlow starts its devices
import tensorflow as tf
from scipy import special

from tfbench.kernels import GELU_BLOCK, Kernel
from tfbench.kernels import call as kernel_call
from tfbench.models import linear_gelu
from tfbench.models.layers import Linear
from tfbench.models.linear_gelu import fused_linear_gelu, plain_linear_gelu

SHAPE, FEATURES = (2, 6, 5), 2 * GELU_BLOCK
ROWS = SHAPE[0] * SHAPE[1]


def forward(product: Any, bias: Any) -> np.ndarray:
    x = np.asarray(product, float) + np.asarray(bias, float)
    return x * special.ndtr(x)


def backward(product: Any, bias: Any, upstream: Any) -> np.ndarray:
    x = np.asarray(product, float) + np.asarray(bias, float)
    density = np.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)
    return np.asarray(upstream, float) * (special.ndtr(x) + x * density)


class Parts:
    """A product, its input, and an upstream gradient for the result, in float64."""

    def __init__(self) -> None:
        random = np.random.default_rng(3)
        self.linear = Linear(SHAPE[-1], FEATURES, 1.0)
        self.linear.bias.assign(random.standard_normal(FEATURES))
        self.x = tf.constant(random.standard_normal(SHAPE))
        self.upstream = tf.constant(random.standard_normal((*SHAPE[:-1], FEATURES)))

    def run(self, function: Any) -> list[np.ndarray]:
        """The result and the gradients by x, kernel and bias."""
        sources = [self.x, self.linear.kernel.value, self.linear.bias.value]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            out = function(self.x, self.linear)
        return [np.asarray(value) for value in (out, *tape.gradient(out, sources, self.upstream))]

    def expected(self) -> list[np.ndarray]:
        x, kernel, bias = (np.asarray(v) for v in (self.x, self.linear.kernel.value, self.linear.bias.value))
        d_h = backward(x @ kernel, bias, self.upstream)
        return [forward(x @ kernel, bias), d_h @ kernel.T, np.einsum("bsi,bsn->in", x, d_h), d_h.sum((0, 1))]


@pytest.fixture
def parts() -> Iterator[Parts]:
    with step_helpers.dtype_policy("float64"):
        yield Parts()


def test_plain_is_the_formula(parts: Parts) -> None:
    for ours, truth in zip(parts.run(plain_linear_gelu), parts.expected(), strict=True):
        np.testing.assert_allclose(ours, truth, rtol=0, atol=1e-6)  # TensorFlow rounds constants to float32


def test_fused_gives_kernels_what_they_ask_for(monkeypatch: pytest.MonkeyPatch, parts: Parts) -> None:
    """With the formula in NumPy for the kernels: operands, their order, shapes, grid, the gradient's way."""
    pair = (Kernel("forward", "", 3, 4, 2), Kernel("backward", "", 4, 8, 1))

    def launch(
        name: str, ir: str, operands: Any, outputs: Any, grid: Any, num_warps: int, num_stages: int
    ) -> list[Any]:
        if name == "forward":
            assert (grid, num_warps, num_stages) == ((2, 4, 1), 4, 2)
            results = [forward(*operands)]
        else:
            assert (grid, num_warps, num_stages) == ((2, 3, 1), 8, 1)
            d_h = backward(*operands)
            results = [d_h, d_h.reshape(3, 4, FEATURES).sum(1)]
        assert [output.shape for output in outputs] == [result.shape for result in results]
        assert [output.dtype for output in outputs] == [tf.float64, tf.float32][: len(outputs)]
        return [tf.constant(result) for result in results]

    monkeypatch.setattr(linear_gelu, "gelu_kernels", lambda dtype, features: pair)
    monkeypatch.setattr(kernel_call, "triton_call", launch)
    for ours, truth in zip(parts.run(fused_linear_gelu), parts.expected(), strict=True):
        np.testing.assert_allclose(ours, truth, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_pointers_of_the_texts_are_the_tensors(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    mlir_dtypes = {"f16": tf.float16, "bf16": tf.bfloat16, "f32": tf.float32}
    launched = []

    def launch(name: str, ir: str, operands: Any, outputs: Any, *_: Any) -> list[Any]:
        (arguments,) = re.findall(rf"@{name}\((.*?)\) attributes", ir)
        types = [mlir_dtypes[kind] for kind in re.findall(r"!tt.ptr<(\w+)>", arguments)]
        assert types == [tensor.dtype for tensor in (*operands, *outputs)], name
        launched.append(name)
        return [tf.zeros(output.shape, output.dtype) for output in outputs]

    monkeypatch.setattr(kernel_call, "triton_call", launch)
    with step_helpers.dtype_policy(f"mixed_{dtype}"):
        linear = Linear(8, FEATURES)
        with tf.GradientTape() as tape:
            y = fused_linear_gelu(tf.ones((2, 64, 8), tf.as_dtype(dtype)), linear)
        (d_bias,) = tape.gradient(y, [linear.bias.value])
    assert launched == ["gelu_forward", "gelu_backward"]
    assert (y.dtype, d_bias.dtype) == (tf.as_dtype(dtype), tf.float32)
