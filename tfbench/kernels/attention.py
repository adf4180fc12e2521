"""Self-attention with dropout as Triton kernels: the sources of the texts in `ttir`.

Read by `tfbench.kernels.generate` and by tests alone: running needs the texts, not Triton.

A program computes a head of a sequence, or a block of its places; the grid tells H, and S where it varies.
Arguments are pointers to dense row-major tensors:

    qkv, d_qkv  half [B, S, 3, H, D]: queries, keys and values, and their gradient
    bias        float32 [B, S], added to the scores of a key
    keys        uint32 [3]: start and second of the mask's hash (`tfbench.models.layers.dropout`), and the
                threshold below which an element is dropped, rate · 2**32
    out, d_out  half [B, S, H, D]
    statistics  float32 [B, H, 2, S]: a row's largest score in units of log 2, 1 / its sum of exponentials
    d_query     float32 [B, H, S, D]: where the backward kernel sums up; nothing for anyone else

The weights exp2(score - largest) are rounded to half unnormalised; 1 / sum and 1 / (1 - rate) multiply the
float32 results: the plain path's sums, rounded less often.
"""

import triton
import triton.language as tl

# Of the arguments above; {half} is the data's dtype.
POINTERS = {
    "qkv": "*{half}",
    "bias": "*fp32",
    "keys": "*u32",
    "out": "*{half}",
    "statistics": "*fp32",
    "d_out": "*{half}",
    "d_qkv": "*{half}",
    "d_query": "*fp32",
}
# Names of the texts: the kernel and its constants.
TEXTS = {
    f"attention_{stem}{'_dropout' * drops}": (kernel, {**constants, "HEAD": 64, "DROPOUT": drops})
    for stem, kernel, constants in (
        ("forward_tile", "forward_tile", {"LENGTH": 128}),
        ("backward_tile", "backward_tile", {"LENGTH": 128, "STEP": 64}),
        ("forward_blocks", "forward_blocks", {"BLOCK": 64, "STEP": 64}),
        *(
            (f"backward_blocks_{length}", "backward_blocks", {"LENGTH": length, "BLOCK": 128, "STEP": 64})
            for length in (256, 384, 512)
        ),
    )
    for drops in (False, True)
}


@triton.jit
def _tile(pointer, rows, stride, HEAD: tl.constexpr):
    """Pointers to the rows of one head: [rows, HEAD]."""
    return pointer + rows[:, None] * stride + tl.arange(0, HEAD)[None, :]


@triton.jit
def _head(pointer, length, parts: tl.constexpr, heads, head, HEAD: tl.constexpr):
    """Pointer to a head of this program's sequence in [B, length, parts, heads, HEAD], part 0."""
    return pointer + (tl.program_id(1).to(tl.int64) * length * parts * heads + head) * HEAD


@triton.jit
def _row_bits(rows, length, heads, head, start):
    """The part of an element's number in the hash's first step that its row decides."""
    row = (tl.program_id(1) * heads + head) * length + rows
    return (row * length).to(tl.uint32) * 0x9E3779B9 + start


@triton.jit
def _column_bits(columns):
    """The part that its column decides."""
    return columns.to(tl.uint32) * 0x9E3779B9


@triton.jit
def _mixed(bits, second):
    """The hash of that name of `tfbench.models.layers`: dropout keeps what is not below the threshold."""
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D + second
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def kept(bits, second, threshold):
    """Which elements dropout keeps."""
    return _mixed(bits, second) >= threshold


# The next two are instructions of PTX, which Triton's interpreter does not run: its tests put Triton's own
# functions in their places.
@triton.jit
def exp2(x):
    """2**x, 0 below 2**-126.

    XLA compiles Triton's exp2 to the same instruction and three more, which keep subnormal results.
    """
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def _dropped(x, bits, threshold):
    """x, 0 where its hash is below the threshold.

    As tl.where the choice is made of halves behind the rounding, each by itself, and these packed again.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .pred kept; setp.hs.u32 kept, $2, $3; selp.f32 $0, $1, 0f00000000, kept; }",
        "=f,f,r,r", [x, bits, threshold], tl.float32, True, 1,
    )  # fmt: skip


@triton.jit
def _keep_scale(threshold, DROPOUT: tl.constexpr):
    """1 / (1 - rate)."""
    scale = 1.0
    if DROPOUT:
        scale = 1 / (1 - threshold.to(tl.float32) * 2.0**-32)
    return scale


@triton.jit
def _score_bias(bias, length, columns):
    """The keys' bias in units of log 2."""
    return tl.load(bias + tl.program_id(1) * length + columns) * 1.4426950408889634


@triton.jit
def _statistics(statistics, rows, length):
    """Pointers to the largest scores of some rows of this program's head; 1 / sum is length on."""
    return statistics + (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * 2 * length + rows


@triton.jit
def forward_tile(
    qkv, bias, keys, out, statistics, LENGTH: tl.constexpr, HEAD: tl.constexpr, DROPOUT: tl.constexpr
):
    """A head's whole sequence at once: grid (H, B, 1)."""
    half = qkv.dtype.element_ty
    heads, head = tl.num_programs(0), tl.program_id(0)
    stride = 3 * heads * HEAD
    places = tl.arange(0, LENGTH)
    source = _tile(_head(qkv, LENGTH, 3, heads, head, HEAD), places, stride, HEAD)
    query, key = tl.load(source), tl.load(source + heads * HEAD)
    value = tl.load(source + 2 * heads * HEAD)
    start, second, threshold = tl.load(keys), tl.load(keys + 1), tl.load(keys + 2)

    score = tl.dot(query, tl.trans(key)) * (1.4426950408889634 * HEAD**-0.5)
    score += _score_bias(bias, LENGTH, places)[None, :]
    largest = tl.max(score, 1)
    weight = exp2(score - largest[:, None])
    total = tl.sum(weight, 1)
    if DROPOUT:
        # The sum is never 0. Asked for here, the hash waits for it: computed beside the exponentials it needs
        # so many registers that one program fits a multiprocessor where now two do.
        row_bits = tl.where(total > 0, _row_bits(places, LENGTH, heads, head, start), 0)
        bits = _mixed(row_bits[:, None] + _column_bits(places)[None, :], second)
        weight = _dropped(weight, bits, threshold)
    result = tl.dot(weight.to(half), value) * (_keep_scale(threshold, DROPOUT) / total)[:, None]
    target = _tile(_head(out, LENGTH, 1, heads, head, HEAD), places, heads * HEAD, HEAD)
    tl.store(target, result.to(half))
    row_statistics = _statistics(statistics, places, LENGTH)
    tl.store(row_statistics, largest)
    tl.store(row_statistics + LENGTH, 1 / total)


@triton.jit
def forward_blocks(
    qkv,
    bias,
    keys,
    out,
    statistics,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    HEAD: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """BLOCK queries a program, STEP keys at a time: grid (H, B, S / BLOCK)."""
    half = qkv.dtype.element_ty
    heads, head, length = tl.num_programs(0), tl.program_id(0), tl.num_programs(2) * BLOCK
    rows = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    stride = 3 * heads * HEAD
    source = _head(qkv, length, 3, heads, head, HEAD)
    query = tl.load(_tile(source, rows, stride, HEAD))
    start, second, threshold = tl.load(keys), tl.load(keys + 1), tl.load(keys + 2)
    row_bits = _row_bits(rows, length, heads, head, start)

    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    result = tl.zeros([BLOCK, HEAD], tl.float32)
    for first in range(0, length, STEP):
        columns = first + tl.arange(0, STEP)
        key = tl.load(_tile(source + heads * HEAD, columns, stride, HEAD))
        score = tl.dot(query, tl.trans(key)) * (1.4426950408889634 * HEAD**-0.5)
        score += _score_bias(bias, length, columns)[None, :]
        new_largest = tl.maximum(largest, tl.max(score, 1))
        shrink = exp2(largest - new_largest)
        weight = exp2(score - new_largest[:, None])
        total = total * shrink + tl.sum(weight, 1)
        if DROPOUT:
            bits = _mixed(row_bits[:, None] + _column_bits(columns)[None, :], second)
            weight = _dropped(weight, bits, threshold)
        value = tl.load(_tile(source + 2 * heads * HEAD, columns, stride, HEAD))
        result = tl.dot(weight.to(half), value, result * shrink[:, None])
        largest = new_largest

    result *= (_keep_scale(threshold, DROPOUT) / total)[:, None]
    tl.store(_tile(_head(out, length, 1, heads, head, HEAD), rows, heads * HEAD, HEAD), result.to(half))
    row_statistics = _statistics(statistics, rows, length)
    tl.store(row_statistics, largest)
    tl.store(row_statistics + length, 1 / total)


@triton.jit
def _rows(qkv, out, statistics, d_out, rows, LENGTH: tl.constexpr, HEAD: tl.constexpr):
    """Of some rows: queries, upstream gradient, both statistics, and the products of gradient and `out`."""
    heads, head = tl.num_programs(0), tl.program_id(0)
    query = tl.load(_tile(_head(qkv, LENGTH, 3, heads, head, HEAD), rows, 3 * heads * HEAD, HEAD))
    upstream = tl.load(_tile(_head(d_out, LENGTH, 1, heads, head, HEAD), rows, heads * HEAD, HEAD))
    result = tl.load(_tile(_head(out, LENGTH, 1, heads, head, HEAD), rows, heads * HEAD, HEAD))
    row_statistics = _statistics(statistics, rows, LENGTH)
    largest, inverse = tl.load(row_statistics), tl.load(row_statistics + LENGTH)
    along = tl.sum(upstream.to(tl.float32) * result.to(tl.float32), 1)
    return query, upstream, largest, inverse, along


@triton.jit
def _backward(
    qkv, bias, keys, out, statistics, d_out, d_qkv, d_query,
    LENGTH: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, HEAD: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """The gradients of a head: BLOCK keys and values after the other, for each STEP queries at a time.

    One pass over the scores gives all three. They are transposed, [keys, queries], so that the left sides of
    two of the products stay in registers. A query's gradient is summed over the blocks of keys in memory that
    the second-level cache holds; no other program adds to it, so that it is the same in every run. What a
    thread wrote there may be read by another one, a whole round over the queries and its barriers later.
    """
    half = qkv.dtype.element_ty
    heads, head = tl.num_programs(0), tl.program_id(0)
    stride = 3 * heads * HEAD
    source, target = _head(qkv, LENGTH, 3, heads, head, HEAD), _head(d_qkv, LENGTH, 3, heads, head, HEAD)
    start, second, threshold = tl.load(keys), tl.load(keys + 1), tl.load(keys + 2)
    keep_scale = _keep_scale(threshold, DROPOUT)
    scale = keep_scale * HEAD**-0.5
    for block in range(0, LENGTH, BLOCK):
        columns = block + tl.arange(0, BLOCK)
        key = tl.load(_tile(source + heads * HEAD, columns, stride, HEAD))
        value = tl.load(_tile(source + 2 * heads * HEAD, columns, stride, HEAD))
        score_bias, column_bits = _score_bias(bias, LENGTH, columns), _column_bits(columns)
        d_key = tl.zeros([BLOCK, HEAD], tl.float32)
        d_value = tl.zeros([BLOCK, HEAD], tl.float32)
        for first in range(0, LENGTH, STEP):
            rows = first + tl.arange(0, STEP)
            query, upstream, largest, inverse, along = _rows(qkv, out, statistics, d_out, rows, LENGTH, HEAD)
            delta = along * (1 / keep_scale)
            score = tl.dot(key, tl.trans(query)) * (1.4426950408889634 * HEAD**-0.5) + score_bias[:, None]
            weight = exp2(score - largest[None, :]) * inverse[None, :]
            d_weight = tl.dot(value, tl.trans(upstream))
            kept_weight = weight
            if DROPOUT:
                row_bits = _row_bits(rows, LENGTH, heads, head, start)
                bits = _mixed(column_bits[:, None] + row_bits[None, :], second)
                kept_weight = _dropped(weight, bits, threshold)
            d_value = tl.dot(kept_weight.to(half), upstream, d_value)
            d_score = (kept_weight * d_weight - weight * delta[None, :]).to(half)
            d_key = tl.dot(d_score, query, d_key)
            d_rows = tl.dot(tl.trans(d_score), key) * scale
            wanted = _tile(target, rows, stride, HEAD)
            if BLOCK < LENGTH:
                sums = d_query + (tl.program_id(1).to(tl.int64) * heads + head) * LENGTH * HEAD
                sums = _tile(sums, rows, HEAD, HEAD)
                d_rows += tl.load(sums, mask=(block > 0) & (rows >= 0)[:, None], other=0.0)
                last = (block + BLOCK == LENGTH) & (rows >= 0)[:, None]
                tl.store(sums, d_rows, mask=(block + BLOCK < LENGTH) & (rows >= 0)[:, None])
                tl.store(wanted, d_rows.to(half), mask=last)
            else:
                tl.store(wanted, d_rows.to(half))
        tl.store(_tile(target + heads * HEAD, columns, stride, HEAD), (d_key * scale).to(half))
        tl.store(_tile(target + 2 * heads * HEAD, columns, stride, HEAD), (d_value * keep_scale).to(half))


@triton.jit
def backward_tile(
    qkv, bias, keys, out, statistics, d_out, d_qkv,
    LENGTH: tl.constexpr, STEP: tl.constexpr, HEAD: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """The gradient of `forward_tile`: grid (H, B, 1)."""
    _backward(qkv, bias, keys, out, statistics, d_out, d_qkv, d_qkv, LENGTH, LENGTH, STEP, HEAD, DROPOUT)


@triton.jit
def backward_blocks(
    qkv, bias, keys, out, statistics, d_out, d_qkv, d_query,
    LENGTH: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, HEAD: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """The gradient of `forward_blocks`: grid (H, B, 1)."""
    _backward(qkv, bias, keys, out, statistics, d_out, d_qkv, d_query, LENGTH, BLOCK, STEP, HEAD, DROPOUT)
