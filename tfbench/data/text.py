"""BERT's pre-training input from plain text files: tokenised when the run starts, kept in memory.

For more text than fits there, or to start at once, make token records of it (`tfbench.data.tokens`).
"""

import time
from typing import TYPE_CHECKING

from tfbench.config import BenchmarkConfig, ConfigError
from tfbench.data import wordpiece
from tfbench.data.spec import DatasetSpec, Shard, argument_of, data_error, require_kind, require_packages
from tfbench.models.spec import ModelSpec

if TYPE_CHECKING:
    import tensorflow as tf
    import tokenizers

NAME = "text"
# Special tokens, and every character at the start of a word and within one.
MIN_VOCAB_SIZE = len(wordpiece.SPECIAL_TOKENS) + 2 * wordpiece.MAX_CHARACTERS


def require_text_files(config: BenchmarkConfig) -> None:
    """Refuses choices about tokenising text where none is tokenised.

    Raises:
        ConfigError: one was made.
    """
    if config.data.partition(":")[0] == NAME:
        return
    if config.vocab is not None:
        raise ConfigError("vocab", config.vocab, f"goes with --data=text:GLOB, not with --data={config.data}")
    if config.pack:
        raise ConfigError("pack", "true", f"goes with --data=text:GLOB, not with --data={config.data}")


def _check(config: BenchmarkConfig, spec: ModelSpec) -> None:
    require_kind(config, spec, "text")
    require_packages(config, "tokenizers")
    _files(config)
    assert spec.vocab_size is not None
    if config.vocab is None and spec.vocab_size < MIN_VOCAB_SIZE:
        raise data_error(
            config,
            f"trains a vocabulary of at least {MIN_VOCAB_SIZE} tokens, {spec.name} has {spec.vocab_size}: "
            "give a smaller one with --vocab",
        )
    if config.vocab is not None:
        size = wordpiece.vocabulary_of(_read_tokenizer(config)).size
        if size > spec.vocab_size:
            raise ConfigError(
                "vocab", config.vocab, f"has {size} tokens, {spec.name} knows only {spec.vocab_size}"
            )


def _files(config: BenchmarkConfig) -> list[str]:
    from tfbench.data import corpus

    try:
        return corpus.files_of([argument_of(config)])
    except ValueError as error:
        raise data_error(config, f"{error}") from error


def _read_tokenizer(config: BenchmarkConfig) -> "tokenizers.Tokenizer":
    assert config.vocab is not None
    try:
        return wordpiece.read_tokenizer(config.vocab)
    except (OSError, ValueError) as error:
        raise ConfigError("vocab", config.vocab, f"{error}") from error


def _make(config: BenchmarkConfig, spec: ModelSpec, shard: Shard) -> "tf.data.Dataset":
    """The sequences stay in memory; each visit masks them anew."""
    import numpy as np

    from tfbench.data import corpus, masking

    assert spec.vocab_size is not None
    assert config.seq_length is not None
    start_s = time.monotonic()
    try:
        documents = corpus.Corpus(_files(config))
        if config.vocab is None:
            tokenizer = wordpiece.train_tokenizer(corpus.training_texts(documents), spec.vocab_size)
        else:
            tokenizer = _read_tokenizer(config)
        vocabulary = wordpiece.vocabulary_of(tokenizer)
        encoded = wordpiece.encode(documents, tokenizer)
        rows = wordpiece.sequences(encoded, vocabulary, config.seq_length, pack=config.pack)
    except ValueError as error:
        raise data_error(config, f"{error}") from error
    if not len(rows):
        raise data_error(config, f"{len(documents)} document(s) without a single token")
    if np.isin(rows, vocabulary.special_ids).all():  # none of which is ever masked and predicted
        nothing = f"of {len(documents)} document(s) no token"
        if config.vocab is not None:
            raise ConfigError("vocab", config.vocab, f"has {nothing} of --data={config.data}")
        raise data_error(config, f"{nothing} is in the vocabulary")
    shard.log.notes.append(
        f"text: {len(documents):,} documents, {vocabulary.size:,} tokens in the vocabulary, "
        f"{wordpiece.lengths_of(rows, vocabulary)}, {'packed' if config.pack else 'not packed'}; "
        f"tokenised in {time.monotonic() - start_s:.1f} s"
    )
    return masking.batches_of_rows(rows, vocabulary, config, shard)


TEXT = DatasetSpec(
    name=NAME,
    kinds=frozenset({"text"}),
    takes_argument=True,
    help="UTF-8 text files, documents between blank lines, WordPiece tokens, masked anew on every visit",
    check=_check,
    make=_make,
)
