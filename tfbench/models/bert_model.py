"""The Keras model of `tfbench.models.bert`; imported when a BERT is built."""

from typing import Any

import keras
import tensorflow as tf

from tfbench.models.attention import fused_attention, plain_attention
from tfbench.models.bert import BertShape
from tfbench.models.layers import LayerNorm, Linear, dropout, embedding_lookup, gelu
from tfbench.models.linear_gelu import fused_linear_gelu, plain_linear_gelu
from tfbench.models.residual_norm import fused_residual_norm, plain_residual_norm

LAYER_NORM_EPSILON = 1e-12  # the published models'
# Added to the score of a padded place, in float32: far below any score, and finite, so that a row
# without a single token gives a uniform softmax and not NaN.
MASKED_SCORE = -1e9
# Rows that the vocabulary is filled up to for the products with it, by zeros that nothing reads. Its 30,522
# are not a multiple of 8, which the fast kernels for half precision ask for: one product of BERT-large took
# 1.34 ms on an H200 instead of 0.5.
PRODUCT_MULTIPLE = 64


class Bert(keras.Model):
    """Batch dict (see ModelSpec; `token_type_ids` [B, S] optional, else 0) → float32 logits [B, K, vocab].

    The head runs at the masked places only; its output matrix is the word embedding. `fused`: see
    `tfbench.models.attention`, `tfbench.models.residual_norm` and `tfbench.models.linear_gelu`.
    """

    def __init__(self, shape: BertShape, dropout_rate: float = 0.1, fused: bool = False):
        super().__init__()
        self.rate = dropout_rate
        hidden = shape.hidden
        self.word_embedding = _table(self, "word_embedding", shape.vocab_size, hidden)
        self.position_embedding = _table(self, "position_embedding", shape.max_positions, hidden)
        self.type_embedding = _table(self, "type_embedding", 2, hidden)
        self.embedding_norm = LayerNorm(hidden, LAYER_NORM_EPSILON)
        self.blocks = [EncoderBlock(shape, dropout_rate, 1 + 3 * i, fused) for i in range(shape.layers)]
        for block in self.blocks[1:]:
            block.encode = self.blocks[0].encode
        self.transform = Linear(hidden, hidden)
        self.transform_norm = LayerNorm(hidden, LAYER_NORM_EPSILON)
        self.output_bias = self.add_weight(name="output_bias", shape=(shape.vocab_size,), initializer="zeros")
        self.built = True

    def call(self, batch: dict[str, Any], training: bool = False, seed: Any = None) -> Any:
        """See the class. `seed` int32 [2] decides the dropout masks; unused with rate 0 or not training."""
        rate = self.rate if training else 0.0
        x = dropout(self._embed(batch), rate, seed, place=0)
        score_bias = MASKED_SCORE * (1 - tf.cast(batch["attention_mask"], tf.float32))
        for block in self.blocks:
            x = block(x, score_bias=score_bias, training=training, seed=seed)
        return self._predict(tf.gather(x, batch["masked_positions"], batch_dims=1))

    def _embed(self, batch: dict[str, Any]) -> Any:
        """Sum of the three embeddings, normalised: [B, S, hidden]."""
        ids = batch["input_ids"]
        # From the float32 tables: their gradients are summed over tokens, which half precision does badly.
        words = embedding_lookup(tf.convert_to_tensor(self.word_embedding.value), ids)
        if "token_type_ids" in batch:
            types = tf.convert_to_tensor(self.type_embedding.value)
            kind = tf.cast(embedding_lookup(types, batch["token_type_ids"]), self.compute_dtype)
        else:
            kind = tf.convert_to_tensor(self.type_embedding)[0]
        positions = tf.convert_to_tensor(self.position_embedding)[: ids.shape[1]]
        return self.embedding_norm(tf.cast(words, self.compute_dtype) + positions + kind)

    def _predict(self, x: Any) -> Any:
        """[B, K, hidden] → float32 logits [B, K, vocab]."""
        x = self.transform_norm(gelu(self.transform(x)))
        table = tf.convert_to_tensor(self.word_embedding)
        words = table.shape[0]
        padded = tf.pad(table, [[0, -words % PRODUCT_MULTIPLE], [0, 0]])
        flat = tf.matmul(tf.reshape(x, [-1, x.shape[-1]]), padded, transpose_b=True)[:, :words]
        logits_dtype = tf.float64 if x.dtype == tf.float64 else tf.float32
        logits = tf.cast(flat, logits_dtype) + tf.cast(self.output_bias.value, logits_dtype)
        return tf.reshape(logits, [*x.shape[:-1], words])


class EncoderBlock(keras.layers.Layer):
    """Self-attention and the two-layer perceptron, each with dropout, residual and layer norm behind it.

    Attributes:
        encode: what a block of these sizes computes, as a function of its weights too. Blocks that share it
            are traced once, forward and backward; XLA sees each of them written out.
    """

    def __init__(self, shape: BertShape, dropout_rate: float, first_place: int, fused: bool):
        super().__init__(autocast=False)  # Keras would cast score_bias too: MASKED_SCORE is -inf in float16
        self.heads, self.rate, self.first_place = shape.heads, dropout_rate, first_place
        self.attention = fused_attention if fused else plain_attention
        self.residual_norm = fused_residual_norm if fused else plain_residual_norm
        self.linear_gelu = fused_linear_gelu if fused else plain_linear_gelu
        hidden = shape.hidden
        self.query_key_value = Linear(hidden, 3 * hidden)  # one product instead of three
        self.attention_output = Linear(hidden, hidden)
        self.attention_norm = LayerNorm(hidden, LAYER_NORM_EPSILON)
        self.intermediate = Linear(hidden, shape.intermediate)
        self.output_projection = Linear(shape.intermediate, hidden)
        self.output_norm = LayerNorm(hidden, LAYER_NORM_EPSILON)
        self.encode = tf.function(self._encode, autograph=False)
        self.built = True

    def call(self, x: Any, score_bias: Any, training: bool = False, seed: Any = None) -> Any:
        """[B, S, hidden] → [B, S, hidden]; `score_bias` is float32 [B, S]."""
        weights = [tf.convert_to_tensor(variable) for variable in self.trainable_variables]
        rate = self.rate if training else 0.0
        return self.encode(weights, x, score_bias, rate, seed, tf.constant(self.first_place))

    def _encode(self, weights: list[Any], x: Any, score_bias: Any, rate: float, seed: Any, place: Any) -> Any:
        """As `call`, with the weights of any block and the place of its first dropout, int32 scalar."""
        with keras.StatelessScope(list(zip(self.trainable_variables, weights, strict=True))):
            heads = self._attend(x, score_bias, rate, seed, place)
            x = self.residual_norm(
                x, heads, self.attention_output, self.attention_norm, rate, seed, place + 1
            )
            inner = self.linear_gelu(x, self.intermediate)
            return self.residual_norm(
                x, inner, self.output_projection, self.output_norm, rate, seed, place + 2
            )

    def _attend(self, x: Any, score_bias: Any, rate: float, seed: Any, place: Any) -> Any:
        """Every head's mean of the values, weighted by how its queries fit the keys: [B, S, hidden]."""
        length, hidden = x.shape[1:]
        qkv = tf.reshape(self.query_key_value(x), [-1, length, 3, self.heads, hidden // self.heads])
        return self.attention(qkv, score_bias, rate, seed, place)


def _table(model: keras.Model, name: str, rows: int, columns: int) -> Any:
    """An embedding matrix."""
    return model.add_weight(
        name=name, shape=(rows, columns), initializer=keras.initializers.TruncatedNormal(stddev=0.02)
    )
