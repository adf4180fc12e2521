"""Bias, dropout, residual sum and layer norm as Triton kernels: the sources of the texts in `ttir`.

Read by `tfbench.kernels.generate` and by tests alone: running needs the texts, not Triton.

Arguments are pointers to dense row-major tensors of M rows:

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

from tfbench.kernels import NORM_FEATURES, NORM_SUM_ROWS
from tfbench.kernels.attention import kept

# Of the arguments above; {half} is the data's dtype.
POINTERS = {
    **dict.fromkeys(("x", "y", "total", "out", "d_out", "d_total", "d_y"), "*{half}"),
    **dict.fromkeys(("bias", "gamma", "beta", "epsilon", "partial"), "*fp32"),
    "keys": "*u32",
}
# Names of the texts: the kernel and its constants. STAGES: rows that are read ahead, the fastest on an H200.
TEXTS = {
    f"{kernel}_{features}": (
        kernel,
        {"FEATURES": features, "BLOCK": triton.next_power_of_2(features), **constants},
    )
    for kernel, constants in (
        ("norm_forward", {}),
        ("norm_backward", {"ROWS": NORM_SUM_ROWS, "STAGES": 3}),
    )
    for features in NORM_FEATURES
}


@triton.jit
def _mask(keys, row, columns, FEATURES: tl.constexpr):
    """Which elements of the row dropout keeps."""
    row_bits = (row * FEATURES).to(tl.uint32) * 0x9E3779B9 + tl.load(keys)
    bits = row_bits + columns.to(tl.uint32) * 0x9E3779B9
    return kept(bits, tl.load(keys + 1), tl.load(keys + 2))


@triton.jit
def _keep_scale(keys, like):
    """1 / (1 - rate), rounded as dropout rounds it."""
    return (1 / (1 - tl.load(keys + 2).to(tl.float32) * 2.0**-32)).to(like).to(tl.float32)


@triton.jit
def _add_pairs(a, b, other_a, other_b):
    """Sums of two tensors in one reduction: threads meet once for both."""
    return a + other_a, b + other_b


@triton.jit
def norm_forward(
    x, y, bias, gamma, beta, keys, epsilon, total, out,
    FEATURES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Total is x + dropout(y + bias), out its layer norm times gamma plus beta: grid (M, 1, 1)."""
    half = x.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    inside = columns < FEATURES
    row = tl.program_id(0)
    place = row.to(tl.int64) * FEATURES + columns
    shift = tl.load(bias + columns, inside, 0.0).to(half).to(tl.float32)
    branch = (tl.load(y + place, inside, 0.0).to(tl.float32) + shift).to(half).to(tl.float32)
    branch = tl.where(_mask(keys, row, columns, FEATURES), branch * _keep_scale(keys, half), 0.0).to(half)
    rounded = (tl.load(x + place, inside, 0.0).to(tl.float32) + branch.to(tl.float32)).to(half)
    tl.store(total + place, rounded, inside)
    sums = rounded.to(tl.float32)
    centred = tl.where(inside, sums - tl.sum(sums, 0) * (1 / FEATURES), 0.0)
    inverse = 1 / tl.sqrt(tl.sum(centred * centred, 0) * (1 / FEATURES) + tl.load(epsilon))
    scale, offset = tl.load(gamma + columns, inside, 0.0), tl.load(beta + columns, inside, 0.0)
    tl.store(out + place, (centred * inverse * scale + offset).to(half), inside)


@triton.jit
def norm_backward(
    total, d_out, gamma, keys, epsilon, d_total, d_y, partial,
    FEATURES: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of total, which is that of x, of y, and parts of the parameters': grid (M / ROWS, 1, 1)."""
    half = total.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    inside = columns < FEATURES
    scale = tl.load(gamma + columns, inside, 0.0)
    keep_scale = _keep_scale(keys, half)
    d_gamma = tl.zeros([BLOCK], tl.float32)
    d_beta = tl.zeros([BLOCK], tl.float32)
    d_bias = tl.zeros([BLOCK], tl.float32)
    for index in tl.range(0, ROWS, num_stages=STAGES):
        row = tl.program_id(0) * ROWS + index
        place = row.to(tl.int64) * FEATURES + columns
        sums = tl.load(total + place, inside, 0.0).to(tl.float32)
        upstream = tl.load(d_out + place, inside, 0.0).to(tl.float32)
        scaled = upstream * scale
        mean, d_mean = tl.reduce((sums, scaled), 0, _add_pairs)
        centred = tl.where(inside, sums - mean * (1 / FEATURES), 0.0)
        variance, along = tl.reduce((centred * centred, scaled * centred), 0, _add_pairs)
        inverse = 1 / tl.sqrt(variance * (1 / FEATURES) + tl.load(epsilon))
        normal = centred * inverse
        along *= inverse * (1 / FEATURES)
        down = (inverse * (scaled - d_mean * (1 / FEATURES) - normal * along)).to(half)
        tl.store(d_total + place, down, inside)
        mask = _mask(keys, row, columns, FEATURES)
        passed = tl.where(mask, down.to(tl.float32) * keep_scale, 0.0).to(half)
        tl.store(d_y + place, passed, inside)
        d_gamma += upstream * normal
        d_beta += upstream
        d_bias += passed.to(tl.float32)
    target = partial + tl.program_id(0) * 3 * FEATURES + columns
    tl.store(target, d_gamma, inside)
    tl.store(target + FEATURES, d_beta, inside)
    tl.store(target + 2 * FEATURES, d_bias, inside)
