"""tf.data service: workers, on this host or others, compute the training input. TensorFlow-free to import.

What runs in a worker is TensorFlow's graph alone, without Python: it can neither name
broken records nor count visits over all workers.
"""

import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tfbench.config import BenchmarkConfig, ConfigError
from tfbench.data.spec import DatasetSpec, Shard

if TYPE_CHECKING:
    import tensorflow as tf

ANSWER_TIMEOUT_S = 5.0  # of a dispatcher; one in the same building takes milliseconds
WATCH_S = 10.0  # between two looks whether the service is still there
MAX_FAILURES = 3  # in a row, until it is taken for lost
_ADDRESS = re.compile(r"grpc://[^\s/,]+:\d+")
_START = "python -m tfbench.data_service starts one"
# tensorflow/core/data/service/dispatcher.proto: an empty request; one WorkerInfo a worker, its address first.
_GET_WORKERS = "/tensorflow.data.DispatcherService/GetWorkers"


def require_data_service(config: BenchmarkConfig, dataset_spec: DatasetSpec) -> None:
    """Refuses a --data_service that cannot compute this run's input.

    Raises:
        ConfigError: it is none, it does not answer within seconds, or another flag rules it out.
    """
    address = config.data_service
    if address is None:
        return
    if not dataset_spec.image_files:
        raise ConfigError(
            "data_service", address, f"goes with images read from files, not with --data={config.data}"
        )
    without = {
        "deterministic": ("false", "its workers deliver in no fixed order"),
        "cache": ("none", "its workers keep no images"),
        "on_bad_record": ("fail", "its workers cannot say which records they leave out"),
    }
    for flag, (needed, why) in without.items():
        if (value := f"{getattr(config, flag)}".lower()) != needed:
            raise ConfigError(flag, value, f"{needed} with --data_service={address}: {why}")
    require_answer(address)


def require_answer(address: str) -> None:
    """Asks a service whether it would give batches, which TensorFlow itself would wait for, for ever.

    Raises:
        ConfigError: it does not answer within seconds, has no workers, or one cannot be reached from here.
    """
    addresses = workers("data_service", address)
    if not addresses:
        raise ConfigError("data_service", address, f"has no workers (yet); {_START} with some")
    for worker in addresses:
        host, _, port = worker.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), ANSWER_TIMEOUT_S).close()
        except OSError as error:
            raise ConfigError(
                "data_service",
                address,
                f"its worker {worker} cannot be reached from here ({error}); python -m tfbench.data_service "
                "--host=NAME says under which name it can",
            ) from error


def workers(flag: str, address: str) -> list[str]:
    """Asks a dispatcher for the addresses, HOST:PORT, of its workers.

    Args:
        flag: that has the dispatcher's.
        address: grpc://HOST:PORT.

    Raises:
        ConfigError: another form of address, or no dispatcher answers there.
    """
    import grpc

    if not _ADDRESS.fullmatch(address):
        raise ConfigError(flag, address, f"expected grpc://HOST:PORT of one dispatcher; {_START}")
    with grpc.insecure_channel(address.removeprefix("grpc://")) as channel:
        try:
            answer = channel.unary_unary(_GET_WORKERS)(b"", timeout=ANSWER_TIMEOUT_S)
        except grpc.RpcError as error:
            why = f"{error.code().name}: {error.details()}"
            raise ConfigError(
                flag, address, f"no dispatcher of a tf.data service answers there ({why}); {_START}"
            ) from error
    return [_fields(info)[0].decode() for info in _fields(answer)]


def _fields(message: bytes) -> list[Any]:
    """The fields of a message whose class TensorFlow's wheel does not have."""
    from google.protobuf import empty_pb2, unknown_fields

    return [field.data for field in unknown_fields.UnknownFieldSet(empty_pb2.Empty.FromString(message))]


def dealt(
    columns: Sequence[list[Any]], config: BenchmarkConfig, shard: Shard, *, at_once: int
) -> "tf.data.Dataset":
    """One epoch of the rows of a table, for the workers to share.

    Their order is drawn once: a worker that shuffled them would first ask for all that there are.

    Args:
        columns: of equal length.
        config: gives the seed.
        shard: of the rows.
        at_once: rows that a worker is dealt when it asks.
    """
    import numpy as np
    import tensorflow as tf

    order = np.random.default_rng(config.seed).permutation(len(columns[0]))[shard.index :: shard.count]
    kept = [tf.constant([column[row] for row in order]) for column in columns]

    def rows(first: tf.Tensor) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(tuple(column[first : first + at_once] for column in kept))

    return tf.data.Dataset.range(0, len(order), at_once).flat_map(rows)


def any_visit() -> "tf.Tensor":
    """A number for a visit where no one counts them: int64, drawn anew by every worker each time.

    The raw operation, because with others `tf.random.set_seed` would let all workers draw alike.
    """
    import tensorflow as tf

    return tf.raw_ops.RandomUniformInt(
        shape=tf.constant([], tf.int32),
        minval=tf.constant(0, tf.int64),
        maxval=tf.constant(2**40, tf.int64),  # leaves room for `visit * shard.count`
        seed=0,
        seed2=0,
    )


def computed(dataset: "tf.data.Dataset", config: BenchmarkConfig, shard: Shard) -> "tf.data.Dataset":
    """The batches as the workers of --data_service compute them; without the flag, the data set itself.

    Args:
        dataset: endless batches.
        config: gives the address.
        shard: its log is told the number of workers.

    Raises:
        ConfigError: the dispatcher does not answer any more.
    """
    if config.data_service is None:
        return dataset
    import tensorflow as tf

    num_workers = len(workers("data_service", config.data_service))
    shard.log.notes.append(f"data service: {config.data_service} has {num_workers} worker(s)")
    service = tf.data.experimental.service
    distribute = service.distribute(
        service.ShardingPolicy.DYNAMIC,
        config.data_service,
        compression=None,  # photographs hardly shrink, and the training host would have to unpack them
    )
    return _watched(dataset.apply(distribute), config.data_service, shard).prefetch(tf.data.AUTOTUNE)


def _watched(batches: "tf.data.Dataset", address: str, shard: Shard) -> "tf.data.Dataset":
    """The batches, or an error soon after the service has gone, where TensorFlow alone waits for ever.

    Its iterators end when they are deleted. They would hang at the end of a `take`, which tells nobody.
    """
    import tensorflow as tf

    from tfbench.data import tolerant

    with tf.device("CPU:0"):
        bad_news = tf.queue.FIFOQueue(1, tf.string)
    threading.Thread(target=_watch, args=(address, bad_news.enqueue), daemon=True).start()

    def refuse(why: bytes) -> None:
        shard.log.refuse(why.decode())

    def wait_for_bad_news(_: tf.Tensor) -> Any:
        # A queue, because waiting for one ends with the pipeline; waiting in Python would not.
        with tf.control_dependencies([tf.numpy_function(refuse, [bad_news.dequeue()], [])]):
            return tf.nest.map_structure(tolerant.zeros, batches.element_spec)

    news = tf.data.Dataset.range(1).map(wait_for_bad_news)
    # Both at once, and whichever has something to say is heard.
    return tf.data.Dataset.range(2).interleave(
        lambda which: batches.repeat(1 - which).concatenate(news.repeat(which)),
        cycle_length=2,
        num_parallel_calls=2,
        deterministic=False,
    )


def _watch(address: str, tell: Callable[[str], None]) -> None:
    """Looks from time to time whether a service is there; returns after telling that it is not."""
    failures = 0
    while failures < MAX_FAILURES:  # it may be busy once
        time.sleep(WATCH_S)
        try:
            require_answer(address)
            failures = 0
        except ConfigError as error:
            failures, why = failures + 1, f"{error}"
    tell(why)
