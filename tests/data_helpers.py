"""Small models' specs and runs for the tests of the data. TensorFlow-free."""

import dataclasses
from typing import Any

from tfbench.config import BenchmarkConfig
from tfbench.data import DATASETS, Shard
from tfbench.models.spec import Defaults, ModelSpec

_DEFAULTS = Defaults(
    per_replica_batch_size=1, image_size=8, seq_length=8, steps=1, warmup_steps=1, windows=1, steps_per_loop=1
)


def _never(*_: Any) -> Any:
    raise AssertionError("the data must not call the model")


IMAGE_MODEL = ModelSpec(
    name="image_model",
    kind="image",
    num_classes=12,
    build=_never,
    loss=_never,
    flops_per_sample=_never,
    on_gpu=_DEFAULTS,
    on_cpu=_DEFAULTS,
    activation_mib_per_sample=1.0,
    optimizer="sgd",
    learning_rate=0.1,
    weight_decay=0.0,
)
TEXT_MODEL = dataclasses.replace(
    IMAGE_MODEL, name="text_model", kind="text", num_classes=None, vocab_size=3000, max_seq_length=512
)


def config_of(data: str, **choices: Any) -> BenchmarkConfig:
    """A run of batch size 1 on 16-pixel images or 32-token sequences."""
    sizes = {"seq_length": 32} if data.startswith(("pydoc", "text", "tokens")) else {"image_size": 16}
    return BenchmarkConfig(model="any", data=data, **{**sizes, **choices})


def check(config: BenchmarkConfig, spec: ModelSpec = IMAGE_MODEL) -> None:
    DATASETS[config.data.partition(":")[0]].check(config, spec)


def make(config: BenchmarkConfig, spec: ModelSpec = IMAGE_MODEL, shard: Shard = Shard(0, 1)) -> Any:  # noqa: B008
    return DATASETS[config.data.partition(":")[0]].make(config, spec, shard)


def epoch(config: BenchmarkConfig, num_samples: int, count: int, spec: ModelSpec = IMAGE_MODEL) -> list[Any]:
    """The first `num_samples` batches of 1, drawn from `count` shards in turn."""
    streams = [iter(make(config, spec, Shard(index, count)).as_numpy_iterator()) for index in range(count)]
    return [next(streams[sample % count]) for sample in range(num_samples)]
