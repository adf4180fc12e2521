"""Self-attention over several heads: by the formula, or in one fused kernel each way."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfbench.kernels import Kernel, attention_kernels
from tfbench.models.layers import dropout, dropout_keys, softmax


def plain_attention(qkv: Any, bias: Any, rate: float, seed: Any, place: Any) -> Any:
    """Scaled dot-product attention with dropout on the weights; the softmax is float32 under every policy.

    Args:
        qkv: [B, S, 3, H, D], static: queries, keys and values of each head.
        bias: float32 [B, S], added to every score of a key; has no gradient.
        rate: of the dropout.
        seed: of its mask, as `layers.dropout` has it.
        place: likewise.

    Returns:
        [B, S, H * D].
    """
    query, key, value = tf.unstack(qkv, axis=2)
    scores = tf.einsum("bqhd,bkhd->bhqk", query * query.shape[-1] ** -0.5, key)
    weights = dropout(softmax(scores, bias[:, None, None, :]), rate, seed, place)
    return _joined(tf.einsum("bhqk,bkhd->bqhd", weights, value))


def fused_attention(qkv: Any, bias: Any, rate: float, seed: Any, place: Any) -> Any:
    """As `plain_attention`, with the same dropout mask, and neither scores nor weights in memory.

    The products' sums and the scores stay float32 where the formula rounds them to the half precision. Runs
    where `tfbench.kernels.obstacle` finds none, and inside `tf.function(jit_compile=True)` only.
    """
    _, length, _, heads, size = qkv.shape
    forward, backward = attention_kernels(qkv.dtype.name, length, size, bool(rate))
    keys = dropout_keys(rate, seed, place)

    @tf.custom_gradient
    def attend(qkv: Any) -> Any:
        batch = qkv.shape[0]
        out = tf.TensorSpec((batch, length, heads, size), qkv.dtype)
        # A row's largest score and 1 / its sum of exponentials.
        kept = tf.TensorSpec((batch, heads, 2, length), tf.float32)
        result, statistics = _launch(forward, [qkv, bias, keys], [out, kept])

        def gradient(upstream: Any) -> Any:
            d_qkv = tf.TensorSpec(qkv.shape, qkv.dtype)
            sums = [tf.TensorSpec((batch, heads, length, size), tf.float32)] * backward.sums_in_memory
            operands = [qkv, bias, keys, result, statistics, upstream]
            return _launch(backward, operands, [d_qkv, *sums])[0]

        return result, gradient

    return _joined(attend(qkv))


def _launch(kernel: Kernel, operands: Sequence[Any], outputs: Sequence[tf.TensorSpec]) -> list[Any]:
    """Runs a kernel over the sequences and heads of its first operand, qkv."""
    from tfbench.kernels.call import triton_call

    batch, length, _, heads, _ = operands[0].shape
    grid = (heads, batch, length // kernel.block)
    return triton_call(kernel.name, kernel.ir, operands, outputs, grid, kernel.num_warps, kernel.num_stages)


def _joined(heads: Any) -> Any:
    """[B, S, H, D] → [B, S, H * D]."""
    return tf.reshape(heads, [-1, heads.shape[1], heads.shape[2] * heads.shape[3]])
