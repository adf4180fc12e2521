"""The English text that ships with CPython: real text without a download.

The help topics of `pydoc` are cut in WordPiece tokens. Each topic starts a sequence of its own, and its last
sequence is padded. Places to predict are drawn anew on every visit.
"""

import importlib.util
from typing import TYPE_CHECKING

from tfbench.config import BenchmarkConfig
from tfbench.data import wordpiece
from tfbench.data.spec import DatasetSpec, Shard, data_error, require_kind, require_packages
from tfbench.models.spec import ModelSpec

if TYPE_CHECKING:
    import tensorflow as tf

MAX_VOCAB_SIZE = 8192  # tokens; the text supports no more
# What every vocabulary holds: the special tokens, the 68 visible characters of lower-case ASCII at the start
# of a word, and the 36 letters and digits within one.
MIN_VOCAB_SIZE = len(wordpiece.SPECIAL_TOKENS) + 68 + 36


def documents() -> list[str]:
    """Returns the help topics in the order of their names, as ASCII."""
    from pydoc_data.topics import topics

    return [topics[name].encode("ascii", errors="ignore").decode() for name in sorted(topics)]


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
    from tfbench.data import masking

    assert spec.vocab_size is not None
    assert config.seq_length is not None
    texts = documents()
    tokenizer = wordpiece.train_tokenizer(texts, min(spec.vocab_size, MAX_VOCAB_SIZE))
    vocabulary = wordpiece.vocabulary_of(tokenizer)
    rows = wordpiece.sequences(wordpiece.encode(texts, tokenizer), vocabulary, config.seq_length)
    return masking.batches_of_rows(rows, vocabulary, config, shard)


PYDOC = DatasetSpec(
    name="pydoc",
    kinds=frozenset({"text"}),
    takes_argument=False,
    help="the help topics of CPython, WordPiece tokens, masked anew on every visit",
    check=_check,
    make=_make,
)
