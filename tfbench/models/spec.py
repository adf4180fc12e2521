"""What the harness needs to know of a model. TensorFlow-free."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from tfbench.config import BenchmarkConfig

Batch = dict[str, Any]  # name → tensor, samples along the first axis


@dataclasses.dataclass(frozen=True, kw_only=True)
class Defaults:
    """Sizes of a run where the user names none, on one kind of device."""

    per_replica_batch_size: int  # samples
    image_size: int | None = None  # pixels
    seq_length: int | None = None  # tokens
    steps: int
    warmup_steps: int
    windows: int
    steps_per_loop: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One trainable model.

    Batches are dicts. An image model reads `image` uint8 [B, image_size, image_size, 3] and `label`
    int32 [B] in [0, num_classes). A text model reads `input_ids` int32 [B, S] in [0, vocab_size),
    `attention_mask` int32 [B, S] (1 token, 0 padding), and for K = masked_positions(S) places:
    `masked_positions` int32 [B, K], `masked_ids` int32 [B, K], `masked_weights` float32 [B, K]
    (0 where a place is unused).
    """

    name: str
    kind: Literal["image", "text"]
    num_classes: int | None = None  # image models
    vocab_size: int | None = None  # text models
    max_seq_length: int | None = None  # text models: rows of the position embedding
    head_size: int | None = None  # text models: width of a head of the attention
    build: Callable[[BenchmarkConfig], Any]  # → keras.Model, called in the strategy's scope
    loss: Callable[..., Any]  # (model, batch, training, seed) → losses.PerExample
    flops_per_sample: Callable[[BenchmarkConfig], int]  # forward + backward, 1 MAC = 2 FLOPs
    on_gpu: Defaults
    on_cpu: Defaults
    # Peak memory that grows with the batch, in half precision, at on_gpu's image_size or seq_length; of it
    # what grows with the square of seq_length where every pair of tokens has its score in memory.
    activation_mib_per_sample: float
    attention_mib_per_sample: float = 0.0
    optimizer: str
    learning_rate: float
    weight_decay: float
    dropout: float = 0.0
    references: tuple[str, ...] = ()  # workloads of hardware/references.csv that are this model
