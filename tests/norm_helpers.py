"""Bias, dropout, residual sum and layer norm by the formula in NumPy; the kernels in Triton's interpreter.

As a script, with TRITON_INTERPRET=1: runs the kernels on `kernel_inputs` of each case and writes a file.
"""

import sys
from typing import Any

import numpy as np

from tfbench import kernels

KEYS, EPSILON = (0xDEADBEEF, 0x87654321), 1e-3
CASES = [(128, 0.0), (128, 0.1), (768, 0.1)]  # features, dropout rate; 1024 is as 128
ROWS = {128: 2 * kernels.NORM_SUM_ROWS, 768: kernels.NORM_SUM_ROWS}  # the interpreter is slow


def mask_of(keys: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Which elements are kept, from the three numbers that the kernels get: the hash in Python's integers."""
    start, second, threshold = (int(key) for key in np.asarray(keys))

    def kept(number: int) -> bool:
        bits = (number * 0x9E3779B9 + start) % 2**32
        bits = ((bits ^ bits >> 16) * 0x7FEB352D + second) % 2**32
        bits = (bits ^ bits >> 15) * 0x846CA68B % 2**32
        return bits ^ bits >> 16 >= threshold

    return np.array([kept(number) for number in range(int(np.prod(shape)))]).reshape(shape)


def normal_of(total: np.ndarray, epsilon: float) -> tuple[np.ndarray, np.ndarray]:
    centred = total - total.mean(-1, keepdims=True)
    inverse = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
    return centred * inverse, inverse


def forward(x: Any, y: Any, bias: Any, gamma: Any, beta: Any, kept: Any, epsilon: float) -> list[np.ndarray]:
    """Total and out; `kept` is what dropout multiplies with."""
    total = np.asarray(x, float) + (np.asarray(y, float) + np.asarray(bias, float)) * kept
    return [total, normal_of(total, epsilon)[0] * np.asarray(gamma, float) + np.asarray(beta, float)]


def backward(total: Any, upstream: Any, gamma: Any, kept: Any, epsilon: float) -> list[np.ndarray]:
    """Gradients of total and y, and [rows, 3, features]: each row's part of gamma's, beta's and the bias'."""
    normal, inverse = normal_of(np.asarray(total, float), epsilon)
    upstream = np.asarray(upstream, float)
    d_normal = upstream * np.asarray(gamma, float)
    # The derivative of (t - mean) / sqrt(variance + epsilon) as a matrix for each row.
    features = normal.shape[-1]
    jacobian = np.eye(features) - 1 / features - normal[..., :, None] * normal[..., None, :] / features
    d_total = (jacobian @ d_normal[..., None])[..., 0] * inverse
    parts = np.stack([upstream * normal, upstream, d_total * kept], axis=-2).reshape(-1, 3, features)
    return [d_total, d_total * kept, parts]


def formula(
    x: Any, y: Any, d_out: Any, bias: Any, gamma: Any, beta: Any, kept: Any, total: Any
) -> dict[str, np.ndarray]:
    """What the kernels write; the norm and the gradients are those of a given total."""
    out = normal_of(np.asarray(total, float), EPSILON)[0] * gamma + beta
    d_total, d_y, partial = backward(total, d_out, gamma, kept, EPSILON)
    wanted = forward(x, y, bias, gamma, beta, kept, EPSILON)[0]
    return {"total": wanted, "out": out, "d_total": d_total, "d_y": d_y, "partial": partial}


def keys_of(rate: float) -> np.ndarray:
    """What the kernels get."""
    return np.array([*(KEYS if rate else (0, 0)), int(rate * 2**32)], np.uint32)


def kernel_inputs(features: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(features)
    halves = {
        name: random.standard_normal((ROWS[features], features)).astype("float16")
        for name in ("x", "y", "d_out")
    }
    return halves | {
        name: random.standard_normal(features).astype("float32") for name in ("bias", "gamma", "beta")
    }


def interpret(features: int, rate: float) -> dict[str, np.ndarray]:
    """What the kernels write."""
    import torch

    from tfbench.kernels import norm

    named = {name: torch.from_numpy(array) for name, array in kernel_inputs(features).items()}
    named |= {"keys": torch.from_numpy(keys_of(rate)), "epsilon": torch.tensor([EPSILON])}
    written = {name: torch.zeros_like(named["x"]) for name in ("total", "out", "d_total", "d_y")}
    written["partial"] = torch.zeros(ROWS[features] // kernels.NORM_SUM_ROWS, 3, features)
    named |= written
    for kernel in kernels.norm_kernels("float16", features):
        function = getattr(norm, kernel.name)
        pointers = [named[name] for name in function.arg_names if name in named]
        _, constants = norm.TEXTS[f"{kernel.name}_{features}"]
        function[ROWS[features] // kernel.block,](*pointers, **constants)
    return {name: tensor.numpy() for name, tensor in written.items()}


if __name__ == "__main__":
    np.savez(
        sys.argv[1],
        **{f"{case}-{name}": array for case in CASES for name, array in interpret(*case).items()},
    )
