"""Bias, dropout, residual sum and layer norm as Triton kernels: the sources of the texts in `ttir`.

Read by `tfbench.kernels.generate` and by tests alone: running needs the texts, not Triton.

A program takes ROWS rows, TILE at a time: grid (M / ROWS, 1, 1). Arguments are pointers to dense row-major
tensors:

    x, y, total, out, d_out, d_total, d_y  half [M, FEATURES]
    bias, gamma, beta  float32 [FEATURES]
    keys      uint32 [3]: start and second of the mask's hash (`tfbench.models.layers.dropout`), and the
              threshold below which an element is dropped, rate · 2**32
    epsilon   float32 [1], added to the variance
    partial   float32 [M / ROWS, 3, FEATURES]: each program's sums for gamma's, beta's and the bias' gradient

Everything is rounded to half where the formula in TensorFlow rounds; the norm is float32. BLOCK is the power
of two that FEATURES fits in.
"""

import triton
import triton.language as tl

from tfbench.kernels import NORM_FEATURES, NORM_ROWS, NORM_SUM_ROWS
from tfbench.kernels.attention import _kept

# Of the arguments above; {half} is the data's dtype.
POINTERS = {
    **dict.fromkeys(("x", "y", "total", "out", "d_out", "d_total", "d_y"), "*{half}"),
    **dict.fromkeys(("bias", "gamma", "beta", "epsilon", "partial"), "*fp32"),
    "keys": "*u32",
}
# Names of the texts: the kernel and its constants.
TEXTS = {
    f"{kernel}_{features}": (
        kernel,
        {"FEATURES": features, "BLOCK": triton.next_power_of_2(features), **constants},
    )
    for kernel, constants in (
        ("norm_forward", {"TILE": 1, "ROWS": NORM_ROWS}),
        ("norm_backward", {"TILE": 1, "ROWS": NORM_SUM_ROWS, "STAGES": 1}),
    )
    for features in NORM_FEATURES
}


@triton.jit
def _mask(keys, rows, columns, FEATURES: tl.constexpr):
    """Which elements of the rows dropout keeps: [TILE, BLOCK]."""
    row_bits = (rows * FEATURES).to(tl.uint32) * 0x9E3779B9 + tl.load(keys)
    bits = row_bits + columns.to(tl.uint32) * 0x9E3779B9
    return _kept(bits, tl.load(keys + 1), tl.load(keys + 2))


@triton.jit
def _keep_scale(keys, like):
    """1 / (1 - rate), rounded as dropout rounds it."""
    return (1 / (1 - tl.load(keys + 2).to(tl.float32) * 2.0**-32)).to(like).to(tl.float32)


@triton.jit
def _normal(total, epsilon, inside, FEATURES: tl.constexpr):
    """Rows shifted and scaled to mean 0 and variance 1, and the scales: float32 [TILE, BLOCK], [TILE, 1]."""
    mean = tl.sum(total, 1, keep_dims=True) * (1 / FEATURES)
    centred = tl.where(inside, total - mean, 0.0)
    variance = tl.sum(centred * centred, 1, keep_dims=True) * (1 / FEATURES)
    inverse = 1 / tl.sqrt(variance + tl.load(epsilon))
    return centred * inverse, inverse


@triton.jit
def norm_forward(
    x, y, bias, gamma, beta, keys, epsilon, total, out,
    FEATURES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Total is x + dropout(y + bias), out the layer norm of total, times gamma plus beta."""
    half = x.dtype.element_ty
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < FEATURES
    shift = tl.load(bias + columns, inside, 0.0).to(half).to(tl.float32)
    scale, offset = tl.load(gamma + columns, inside, 0.0), tl.load(beta + columns, inside, 0.0)
    keep_scale = _keep_scale(keys, half)
    for first in range(0, ROWS, TILE):
        rows = tl.program_id(0) * ROWS + first + tl.arange(0, TILE)[:, None]
        place = rows.to(tl.int64) * FEATURES + columns
        branch = (tl.load(y + place, inside, 0.0).to(tl.float32) + shift).to(half).to(tl.float32)
        branch = tl.where(_mask(keys, rows, columns, FEATURES), branch * keep_scale, 0.0).to(half)
        sums = (tl.load(x + place, inside, 0.0).to(tl.float32) + branch.to(tl.float32)).to(half)
        tl.store(total + place, sums, inside)
        normal, _ = _normal(sums.to(tl.float32), epsilon, inside, FEATURES)
        tl.store(out + place, (normal * scale + offset).to(half), inside)


@triton.jit
def norm_backward(
    total, d_out, gamma, keys, epsilon, d_total, d_y, partial,
    FEATURES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient of x, which is that of total, of y, and the parameters' in parts."""
    half = total.dtype.element_ty
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < FEATURES
    scale = tl.load(gamma + columns, inside, 0.0)
    keep_scale = _keep_scale(keys, half)
    d_gamma = tl.zeros([1, BLOCK], tl.float32)
    d_beta = tl.zeros([1, BLOCK], tl.float32)
    d_bias = tl.zeros([1, BLOCK], tl.float32)
    for first in tl.range(0, ROWS, TILE, num_stages=STAGES):
        rows = tl.program_id(0) * ROWS + first + tl.arange(0, TILE)[:, None]
        place = rows.to(tl.int64) * FEATURES + columns
        sums = tl.load(total + place, inside, 0.0).to(tl.float32)
        upstream = tl.load(d_out + place, inside, 0.0).to(tl.float32)
        normal, inverse = _normal(sums, epsilon, inside, FEATURES)
        scaled = upstream * scale
        mean = tl.sum(scaled, 1, keep_dims=True) * (1 / FEATURES)
        along = tl.sum(scaled * normal, 1, keep_dims=True) * (1 / FEATURES)
        down = (inverse * (scaled - mean - normal * along)).to(half)
        tl.store(d_total + place, down, inside)
        mask = _mask(keys, rows, columns, FEATURES)
        passed = tl.where(mask, down.to(tl.float32) * keep_scale, 0.0).to(half)
        tl.store(d_y + place, passed, inside)
        d_gamma += tl.sum(upstream * normal, 0, keep_dims=True)
        d_beta += tl.sum(upstream, 0, keep_dims=True)
        d_bias += tl.sum(passed.to(tl.float32), 0, keep_dims=True)
    target = partial + tl.program_id(0) * 3 * FEATURES + columns
    tl.store(target, d_gamma, inside)
    tl.store(target + FEATURES, d_beta, inside)
    tl.store(target + 2 * FEATURES, d_bias, inside)
