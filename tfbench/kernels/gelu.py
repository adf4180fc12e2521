"""A bias and the GELU behind it as Triton kernels: the sources of the texts in `ttir`.

Read by `tfbench.kernels.generate` and by tests alone: running needs the texts, not Triton.

A program takes ROWS rows of BLOCK columns, TILE rows at a time: grid (N / BLOCK, M / ROWS, 1). Arguments are
pointers to dense row-major tensors:

    h, y, d_y, d_h  half [M, N]: h is the product without its bias
    bias      float32 [N]
    partial   float32 [M / ROWS, N]: each program's sum for the bias' gradient

h + bias is rounded to half, as the formula in TensorFlow rounds it; all behind it is float32.
"""

import triton
import triton.language as tl

from tfbench.kernels import GELU_BLOCK, GELU_ROWS, GELU_SUM_ROWS
from tfbench.kernels.attention import exp2

# Of the arguments above; {half} is the data's dtype.
POINTERS = {
    **dict.fromkeys(("h", "y", "d_y", "d_h"), "*{half}"),
    **dict.fromkeys(("bias", "partial"), "*fp32"),
}
# Names of the texts: the kernel and its constants.
TEXTS = {
    "gelu_forward": ("gelu_forward", {"BLOCK": GELU_BLOCK, "TILE": 4, "ROWS": GELU_ROWS}),
    "gelu_backward": ("gelu_backward", {"BLOCK": GELU_BLOCK, "TILE": 4, "ROWS": GELU_SUM_ROWS}),
}


@triton.jit
def rsqrt(x):
    """1 / √x; as `exp2`, without the instructions for subnormal numbers."""
    return tl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def _bell_and_tail(x):
    """exp(-x² / 2), and how probable it is that a normal variable exceeds |x|: 1 - Φ(|x|).

    Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: within 1e-7, and one exponential
    serves both. The polynomial's coefficients are halved.
    """
    bell = exp2(x * x * -0.7213475204444817)  # -log2(e) / 2
    root = rsqrt(1 + 0.2316418881663604 * tl.abs(x))  # 0.3275911 / √2
    place = root * root
    sums = 0.5307027145 * place - 0.7265760135
    sums = sums * place + 0.7107068705
    sums = sums * place - 0.142248368
    sums = sums * place + 0.127414796
    return bell, sums * place * bell


@triton.jit
def gelu_forward(h, bias, y, BLOCK: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr):
    """GELU, x · Φ(x), of x = h + bias."""
    half = h.dtype.element_ty
    stride = tl.num_programs(0) * BLOCK
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    shift = tl.load(bias + columns).to(half)
    start = (tl.program_id(1) * ROWS).to(tl.int64) * stride  # beyond int32 in large batches
    for first in range(0, ROWS, TILE):
        place = (first + tl.arange(0, TILE)[:, None]) * stride + columns
        x = (tl.load(h + start + place) + shift).to(tl.float32)
        _, tail = _bell_and_tail(x)
        tl.store(y + start + place, (tl.maximum(x, 0.0) - tl.abs(x) * tail).to(half))


@triton.jit
def gelu_backward(h, bias, d_y, d_h, partial, BLOCK: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr):
    """The gradient of h, and the bias' in parts."""
    half = h.dtype.element_ty
    stride = tl.num_programs(0) * BLOCK
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    shift = tl.load(bias + columns).to(half)
    start = (tl.program_id(1) * ROWS).to(tl.int64) * stride
    sums = tl.zeros([TILE, BLOCK], tl.float32)
    for first in range(0, ROWS, TILE):
        place = (first + tl.arange(0, TILE)[:, None]) * stride + columns
        x = (tl.load(h + start + place) + shift).to(tl.float32)
        bell, tail = _bell_and_tail(x)
        slope = tl.where(x < 0, tail, 1 - tail) + x * bell * 0.3989422804014327  # 1 / √(2π)
        down = tl.load(d_y + start + place).to(tl.float32) * slope
        tl.store(d_h + start + place, down.to(half))
        sums += down
    tl.store(partial + tl.program_id(1) * stride + columns, tl.sum(sums, 0, keep_dims=True))
