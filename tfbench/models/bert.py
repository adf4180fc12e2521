"""BERT: the original encoder with the masked-language-model head; its products are its FLOPs."""

import dataclasses
from typing import Any

from tfbench.config import BenchmarkConfig, ConfigError
from tfbench.models.spec import Defaults, ModelSpec

VOCAB_SIZE = 30_522  # WordPiece vocabulary of the published uncased models
MAX_POSITIONS = 512
MASKED_SHARE = 0.15


@dataclasses.dataclass(frozen=True)
class BertShape:
    """Sizes of an encoder; the inner layer of a block is four times `hidden`."""

    layers: int
    hidden: int
    heads: int
    vocab_size: int = VOCAB_SIZE
    max_positions: int = MAX_POSITIONS

    @property
    def intermediate(self) -> int:
        """Width of the inner layer of a block."""
        return 4 * self.hidden


def masked_positions(seq_length: int) -> int:
    """Places whose token is predicted: 15 % of the sequence, rounded up to a multiple of 4.

    20 at 128 and 80 at 512, the original pre-training's figures.
    """
    return -int(-MASKED_SHARE * seq_length // 4) * 4


def flops_per_sample(shape: BertShape, seq_length: int) -> int:
    """Forward and backward pass of one sequence: three times the forward's products, 2 FLOPs a MAC."""
    s, h = seq_length, shape.hidden
    projections = s * h * 3 * h + s * h * h  # query, key, value; output
    attention = 2 * s * s * h  # scores and their weighted sum, all heads together
    inner = 2 * s * h * shape.intermediate
    head = masked_positions(s) * (h * h + h * shape.vocab_size)
    return 3 * 2 * (shape.layers * (projections + attention + inner) + head)


def _build(shape: BertShape, config: BenchmarkConfig) -> Any:
    from tfbench.models.bert_model import Bert

    assert config.seq_length is not None
    if config.seq_length > shape.max_positions:
        raise ConfigError(
            "seq_length", config.seq_length, f"at most {shape.max_positions} for {config.model}"
        )
    return Bert(shape, config.dropout, fused=config.kernels == "fused")


def _loss(model: Any, batch: dict[str, Any], training: bool, seed: Any) -> Any:
    from tfbench.models.losses import masked_language_model_loss

    return masked_language_model_loss(model, batch, training, seed)


def _spec(name: str, shape: BertShape, **choices: Any) -> ModelSpec:
    return ModelSpec(
        name=name,
        kind="text",
        vocab_size=shape.vocab_size,
        max_seq_length=shape.max_positions,
        head_size=shape.hidden // shape.heads,
        build=lambda config: _build(shape, config),
        loss=_loss,
        flops_per_sample=lambda config: flops_per_sample(shape, config.seq_length or 0),
        optimizer="adamw",
        weight_decay=0.01,
        dropout=0.1,
        **choices,
    )


BERT_LARGE_SHAPE = BertShape(layers=24, hidden=1024, heads=16)
BERT_BASE_SHAPE = BertShape(layers=12, hidden=768, heads=12)
BERT_TINY_SHAPE = BertShape(layers=2, hidden=128, heads=2, vocab_size=4096)


def _on_gpu(per_replica_batch_size: int) -> Defaults:
    return Defaults(
        per_replica_batch_size=per_replica_batch_size,
        seq_length=128,
        steps=200,
        warmup_steps=20,
        windows=10,
        steps_per_loop=10,
    )


def _on_cpu(per_replica_batch_size: int, seq_length: int, steps: int) -> Defaults:
    return Defaults(
        per_replica_batch_size=per_replica_batch_size,
        seq_length=seq_length,
        steps=steps,
        warmup_steps=2,
        windows=5,
        steps_per_loop=1,
    )


# Of plain attention four tensors of a score (half precision) for each pair of tokens, head and layer: what
# fused kernels save of bert_large's memory on an H200, from the peaks at 64 and 256 sequences.
BERT_LARGE = _spec(
    "bert_large",
    BERT_LARGE_SHAPE,
    on_gpu=_on_gpu(256),
    on_cpu=_on_cpu(2, 64, 10),
    activation_mib_per_sample=190.0,
    attention_mib_per_sample=48.0,
    learning_rate=1e-4,
    references=("bert_large_ph1_seq128", "bert_large_ph2_seq512", "bert_large_seq512_padded"),
)

BERT_BASE = _spec(
    "bert_base",
    BERT_BASE_SHAPE,
    on_gpu=_on_gpu(128),
    on_cpu=_on_cpu(4, 64, 15),
    activation_mib_per_sample=75.0,
    attention_mib_per_sample=18.0,
    learning_rate=1e-4,
    references=("bert_base_mlm_seq512",),
)

BERT_TINY = _spec(
    "bert_tiny",
    BERT_TINY_SHAPE,
    on_gpu=_on_gpu(128),
    on_cpu=_on_cpu(16, 64, 150),
    activation_mib_per_sample=1.0,
    attention_mib_per_sample=0.5,
    learning_rate=1e-3,
)
