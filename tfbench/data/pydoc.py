"""The English text that ships with CPython: real text without a download.

The help topics of `pydoc` are cut in WordPiece tokens. Each topic starts a sequence of its own, and its last
sequence is padded. Places to predict are drawn anew on every visit.
"""

import importlib.util
from typing import TYPE_CHECKING

from tfbench.config import BenchmarkConfig
from tfbench.data.spec import DatasetSpec, Shard, data_error, require_kind, require_packages
from tfbench.models.spec import Batch, ModelSpec

if TYPE_CHECKING:
    import numpy as np
    import tensorflow as tf
    import tokenizers

# Ids 0 to 4, in BERT's order.
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD_ID, UNK_ID, CLS_ID, SEP_ID, MASK_ID = range(len(SPECIAL_TOKENS))

MAX_VOCAB_SIZE = 8192  # tokens; the text supports no more
# What every vocabulary holds: the special tokens, the 68 visible characters of lower-case ASCII at the start
# of a word, and the 36 letters and digits within one.
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + 68 + 36

# Devlin et al. 2018 (arXiv:1810.04805, section 3.1): what stands at a place to predict.
SHARE_MASK = 0.8
SHARE_RANDOM = 0.1  # the rest keeps its token


def documents() -> list[str]:
    """Returns the help topics in the order of their names, as ASCII."""
    from pydoc_data.topics import topics

    return [topics[name].encode("ascii", errors="ignore").decode() for name in sorted(topics)]


def train_tokenizer(texts: list[str], vocab_size: int) -> "tokenizers.Tokenizer":
    """Trains a lower-case WordPiece vocabulary, in under a second; equal texts give equal vocabularies.

    Args:
        texts: ASCII documents.
        vocab_size: upper bound, at least MIN_VOCAB_SIZE; texts may support fewer tokens.
    """
    from tokenizers import models, trainers

    tokenizer = _tokenizer(models.WordPiece(unk_token="[UNK]"))
    # The trainer numbers the pieces "##x" in the order of a hash map and breaks ties by number, so that every
    # training would end differently. Special tokens come first, in the order given.
    pieces = [f"##{character}" for character in _characters_within_words(tokenizer, texts)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=[*SPECIAL_TOKENS, *pieces], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    # A tokenizer of its own, for which the pieces are not special.
    return _tokenizer(models.WordPiece(tokenizer.get_vocab(), unk_token="[UNK]"))


def _tokenizer(model: "tokenizers.models.WordPiece") -> "tokenizers.Tokenizer":
    import tokenizers

    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _characters_within_words(tokenizer: "tokenizers.Tokenizer", texts: list[str]) -> list[str]:
    """Returns, sorted, the characters that follow another one in a word."""
    words = {
        word
        for text in texts
        for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(text))
    }
    return sorted({character for word in words for character in word[1:]})


def sequences(texts: list[str], tokenizer: "tokenizers.Tokenizer", seq_length: int) -> "np.ndarray":
    """Cuts documents to sequences, each [CLS], up to seq_length − 2 tokens, [SEP], padding.

    Returns:
        int32 [N, seq_length]; every document starts a sequence, so only its last one is padded.
    """
    import numpy as np

    room = seq_length - 2
    chunks = [
        ids[start : start + room]
        for ids in (encoding.ids for encoding in tokenizer.encode_batch(texts))
        for start in range(0, len(ids), room)
    ]
    rows = np.full([len(chunks), seq_length], PAD_ID, np.int32)
    for row, chunk in zip(rows, chunks, strict=True):
        row[: len(chunk) + 2] = [CLS_ID, *chunk, SEP_ID]
    return rows


def mask(ids: "tf.Tensor", seed: "tf.Tensor", places: int, vocab_size: int) -> Batch:
    """Draws the places of a sequence to predict and hides their tokens.

    A sequence without padding has all `places` to predict, a padded one its proportional share, rounded up.

    Args:
        ids: int32 [S], S static: a row of `sequences`.
        seed: integers [2]; equal seeds draw equally.
        places: K, at most S − 2.
        vocab_size: random tokens are drawn from those below it that are not special.

    Returns:
        One sample of the text batch that `ModelSpec` describes. Used places are in increasing order; unused
        ones, at the end, have position 0, id 0 and weight 0.
    """
    import tensorflow as tf

    order_seed, choice_seed, token_seed = tf.unstack(tf.random.split(seed, 3))
    length = ids.shape[0]
    is_word = ids >= len(SPECIAL_TOKENS)
    num_words = tf.math.count_nonzero(is_word, dtype=tf.int32)
    used = tf.range(places) < -(-places * num_words // (length - 2))

    order = tf.random.stateless_uniform([length], order_seed)
    drawn = tf.math.top_k(tf.where(is_word, order, -1.0), places).indices
    positions = tf.where(used, tf.sort(tf.where(used, drawn, length)), 0)
    original = tf.gather(ids, positions)

    choice = tf.random.stateless_uniform([places], choice_seed)
    random_ids = tf.random.stateless_uniform([places], token_seed, len(SPECIAL_TOKENS), vocab_size, tf.int32)
    shown = tf.where(choice < SHARE_MASK + SHARE_RANDOM, random_ids, original)
    shown = tf.where(choice < SHARE_MASK, MASK_ID, shown)
    # Unused places write back what position 0 holds.
    shown = tf.where(used, shown, original)
    return {
        "input_ids": tf.tensor_scatter_nd_update(ids, positions[:, None], shown),
        "attention_mask": tf.cast(ids != PAD_ID, tf.int32),
        "masked_positions": positions,
        "masked_ids": tf.where(used, original, PAD_ID),
        "masked_weights": tf.cast(used, tf.float32),
    }


def _check(config: BenchmarkConfig, spec: ModelSpec) -> None:
    require_kind(config, spec, "text")
    require_packages(config, "tokenizers")
    if importlib.util.find_spec("pydoc_data") is None:
        raise data_error(config, "needs pydoc_data of Python's standard library: install all of the library")
    if spec.vocab_size is None or spec.vocab_size < MIN_VOCAB_SIZE:
        raise data_error(
            config,
            f"needs a vocabulary of at least {MIN_VOCAB_SIZE} tokens, {spec.name} has {spec.vocab_size}",
        )


def _make(config: BenchmarkConfig, spec: ModelSpec, shard: Shard) -> "tf.data.Dataset":
    """The sequences stay in memory; each visit masks them anew."""
    import tensorflow as tf

    from tfbench.data import pipeline
    from tfbench.models.bert import masked_positions

    assert spec.vocab_size is not None
    assert config.seq_length is not None
    texts = documents()
    tokenizer = train_tokenizer(texts, min(spec.vocab_size, MAX_VOCAB_SIZE))
    rows = tf.constant(sequences(texts, tokenizer, config.seq_length))
    places, vocab_size = masked_positions(config.seq_length), tokenizer.get_vocab_size()

    def sample(visit: tf.Tensor, index: tf.Tensor) -> Batch:
        seed = tf.stack([tf.constant(config.seed, tf.int64), visit])
        return mask(rows[index], seed, places, vocab_size)

    samples = pipeline.visits(rows.shape[0], config.seed, shard).map(
        sample, num_parallel_calls=tf.data.AUTOTUNE
    )
    return pipeline.batches(samples, config, reproducible=True)


PYDOC = DatasetSpec(
    name="pydoc",
    kinds=frozenset({"text"}),
    takes_argument=False,
    help="the help topics of CPython, WordPiece tokens, masked anew on every visit",
    check=_check,
    make=_make,
)
