"""Token records as training data; `tfbench.data.tokens` makes and reads them."""

from pathlib import Path
from typing import TYPE_CHECKING

from tfbench.config import BenchmarkConfig
from tfbench.data.spec import (
    DatasetSpec,
    Shard,
    UnreadableError,
    argument_of,
    data_error,
    require_kind,
    require_packages,
)
from tfbench.models.spec import ModelSpec

if TYPE_CHECKING:
    import numpy as np
    import tensorflow as tf

    from tfbench.data.tokens import TokenReader


def _open(config: BenchmarkConfig) -> "TokenReader":
    """Raises: ConfigError: the records cannot be used."""
    from tfbench.data.tokens import TokenReader, TokensError

    try:
        return TokenReader(Path(argument_of(config)).expanduser().absolute())
    except TokensError as error:
        raise data_error(config, f"{error}") from error


def _check(config: BenchmarkConfig, spec: ModelSpec) -> None:
    require_kind(config, spec, "text")
    require_packages(config, "tokenizers")
    reader = _open(config)
    made = reader.manifest.settings["seq_length"]
    if config.seq_length != made:
        raise data_error(
            config, f"has sequences of {made} tokens, --seq_length={config.seq_length}: --seq_length={made}"
        )
    size = reader.manifest.vocabulary.size
    if spec.vocab_size is None or size > spec.vocab_size:
        raise data_error(
            config,
            f"has a vocabulary of {size} tokens, {spec.name} knows only {spec.vocab_size}: "
            "make the records with a smaller --vocab",
        )
    if not len(reader):
        raise data_error(config, "has no sequence")


def _make(config: BenchmarkConfig, spec: ModelSpec, shard: Shard) -> "tf.data.Dataset":
    """Records are read where they lie; each visit masks them anew."""
    import tensorflow as tf

    from tfbench.data import masking
    from tfbench.data.tokens import TokensError

    reader = _open(config)
    vocabulary, settings = reader.manifest.vocabulary, reader.manifest.settings
    shard.log.notes.append(
        f"tokens: {vocabulary.size:,} tokens in the vocabulary, {reader.manifest.lengths}, "
        f"{'packed' if settings['pack'] else 'not packed'}"
    )

    def read(indices: "np.ndarray") -> "np.ndarray":
        try:
            return reader.read(indices)
        except TokensError as error:
            raise UnreadableError(f"{error}") from error

    return masking.batches(
        len(reader),
        lambda indices: tf.numpy_function(read, [indices], tf.int32, stateful=False),
        vocabulary,
        config,
        shard,
    )


TOKENS = DatasetSpec(
    name="tokens",
    kinds=frozenset({"text"}),
    takes_argument=True,
    help="a folder of token records made by tfbench.make_data --kind=tokens, masked anew on every visit",
    check=_check,
    make=_make,
)
