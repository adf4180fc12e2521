"""From a data set to the batches of every replica."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tfbench import malloc
from tfbench.config import BenchmarkConfig
from tfbench.data import dali, service
from tfbench.data.spec import InputLog, Shard
from tfbench.models.spec import Batch, ModelSpec
from tfbench.models.transit import departing
from tfbench.pinned import in_pinned_memory

if TYPE_CHECKING:
    import tensorflow as tf

# Batches that wait in each replica's memory, so that one is copied there while another is used.
BATCHES_ON_DEVICE = 2


@dataclasses.dataclass(frozen=True)
class Input:
    """Where the step takes its batches from."""

    # → batch of each replica for strategy.run, also inside a tf.function; integers as `transit.departing`
    # makes them, but for DALI's labels
    next: Callable[[], Any]
    resident: bool  # the same batch every time, on the device before the first step
    log: InputLog = dataclasses.field(default_factory=InputLog)  # what the pipelines have to say


def open_input(config: BenchmarkConfig, spec: ModelSpec, strategy: "tf.distribute.Strategy") -> Input:
    """Opens --data for the replicas of a strategy.

    Real data is read by one pipeline per process, whose replicas draw their batches in turn: the global
    batch is the concatenation of the replicas' batches, whatever their number. With --data_service the
    pipeline only fetches batches; which of them comes first is not decided.

    Args:
        config: the run; `config.data` has passed its data set's `check`.
        spec: the model that reads the batches.
        strategy: decides the replicas and their devices.
    """
    from tfbench.data import parse  # at call time: the registry imports this module

    dataset_spec, _ = parse(config.data)
    if dataset_spec.name == "synthetic":
        batch = _resident_batch(config, spec, strategy)
        return Input(next=lambda: batch, resident=True)

    log = InputLog(config.on_bad_record)
    if config.input == "dali":
        return Input(next=dali.open_dali(config, strategy, log), resident=False, log=log)

    def dataset_fn(context: "tf.distribute.InputContext") -> "tf.data.Dataset":
        shard = Shard(context.input_pipeline_id, context.num_input_pipelines, log)
        return for_devices(service.computed(dataset_spec.make(config, spec, shard), config, shard), config)

    iterator = in_turn(strategy, dataset_fn)
    return Input(next=lambda: next(iterator), resident=False, log=log)


def for_devices(batches: "tf.data.Dataset", config: BenchmarkConfig) -> "tf.data.Dataset":
    """Batches of a host as they leave for its replicas: see `departing`, and for GPUs `in_pinned_memory`."""
    return in_pinned_memory(batches, departing, config.gpus) if config.gpus else batches.map(departing)


def in_turn(
    strategy: "tf.distribute.Strategy",
    dataset_fn: Callable[["tf.distribute.InputContext"], "tf.data.Dataset"],
) -> Any:
    """Iterator over the replicas' batches, which are copied to each replica's memory ahead of their use.

    Args:
        strategy: of the replicas, which draw their batches in turn.
        dataset_fn: → endless batches of one replica.
    """
    import tensorflow as tf

    options = tf.distribute.InputOptions(experimental_per_replica_buffer_size=BATCHES_ON_DEVICE)
    iterator = iter(strategy.distribute_datasets_from_function(dataset_fn, options))
    # Again: a generator data set feeds the devices, and where the first one is made TensorFlow 2.21 sets
    # malloc's threshold, above which a block is the kernel's, to 128 KB. Every image then waited for pages.
    malloc.keep_freed_memory()
    return iterator


def _resident_batch(config: BenchmarkConfig, spec: ModelSpec, strategy: "tf.distribute.Strategy") -> Batch:
    """One random batch per replica, different ones, each on its replica's device."""
    import tensorflow as tf

    from tfbench.data.synthetic import synthetic_batch

    devices = strategy.extended.worker_devices  # of this process only, while replica ids count all processes

    def value_fn(context: "tf.distribute.experimental.ValueContext") -> Batch:
        replica = context.replica_id_in_sync_group
        with tf.device(devices[replica % len(devices)]):
            return departing(synthetic_batch(config, spec, seed=config.seed + replica))

    batch: Batch = strategy.experimental_distribute_values_from_function(value_fn)
    return batch
