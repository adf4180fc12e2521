"""Sums over 2, 4, … of the GPUs: bandwidth against the size of the message, outside XLA's program and inside.

Imports TensorFlow when something is measured.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfbench.hardware import topology
from tfbench.microbench import timed
from tfbench.microbench.case import Case, Machine, NotPossibleError, Result, median

SIZES = (2**12, 2**16, 2**20, 2**24, 2**27, 2**30)  # bytes
SIZES_QUICK = (2**20, 2**27)
SIZES_ON_CPU = (2**12, 2**18)
SECONDS = 0.2
# A call's beginning and end, and between two sums of one message 0.2 ms of TensorFlow's host, leave the links
# idle. So a call sums several messages at a time, as many as fit into so many bytes, and each of them so many
# times. On two H200s, 1 GiB: 309 GB/s with 2 messages and 4 sums of each, 316 with 4 and 4, 328 with 4 and
# 16, as PyTorch's sums, which are queued on the GPU.
_MOST_IN_FLIGHT, _LEAST_IN_FLIGHT, _IN_FLIGHT_BYTES = 8, 4, 2**32
_MOST_SUMS_IN_A_ROW = 16
_SUMS_ON_CPU = 4  # TensorFlow joins a row of a CPU's sums to one of 2ⁿ operands
_UNIT = 2.0**-14  # of the messages' numbers: float16's smallest with all of its 11 digits
_KEYS_APART = 1000  # far more groups than a strategy makes
_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}
_DTYPES = {"fp32": ("float32", 4), "fp16": ("float16", 2)}


def bus_factor(replicas: int) -> float:
    """Bus bandwidth ÷ algorithm bandwidth of an all-reduce, 2(n − 1)/n.

    Each of n parts of the message has to leave n − 1 replicas, and its sum to reach n − 1
    (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md).

    Raises:
        ValueError: there is nothing to sum over.
    """
    if replicas < 2:
        raise ValueError(f"{replicas} replica: an all-reduce needs two")
    return 2 * (replicas - 1) / replicas


def link_peak_gb_per_s(machine: Machine) -> float | None:
    """What the NVLinks of the worst pair carry in one direction by the data sheet, in 10⁹ bytes/s.

    Returns:
        None over PCIe, which the GPUs share, and for a card whose links are not known.
    """
    links = re.fullmatch(r"NV(\d+)", machine.topology or "")
    spec = machine.spec
    if links is None or spec is None or spec.nvlink_gbs_bidir is None or spec.nvlinks is None:
        return None
    return int(links[1]) * spec.nvlink_gbs_bidir / 2 / spec.nvlinks


def counts(devices: int) -> list[int]:
    """Numbers of devices to sum over: 2, 4, 8, … of them, and all."""
    return sorted({2**power for power in range(1, devices.bit_length()) if 2**power < devices} | {devices})


def cases(machine: Machine) -> Iterator[Case]:
    """Every size in both formats, by both ways, over each number of devices; quick: over all only."""
    sizes = SIZES if machine.on_gpu else SIZES_ON_CPU
    sizes = SIZES_QUICK if machine.on_gpu and machine.quick else sizes
    every = len(machine.devices)
    for count in [every] if machine.quick else counts(every):
        part = machine if count == every else _first(machine, count)
        for engine in ("library", "xla"):
            for precision in _DTYPES:
                for size in sizes:
                    yield _case(part, size, precision, engine)


def _first(machine: Machine, count: int) -> Machine:
    """The first devices of a machine as one of their own: they may be linked better than all are."""
    gpus = machine.gpus[:count]
    link = topology.topology(gpus) if gpus else None
    return dataclasses.replace(machine, devices=machine.devices[:count], gpus=gpus, topology=link)


def _case(machine: Machine, size: int, precision: str, engine: str) -> Case:
    def run() -> Result:
        if len(machine.devices) < 2:
            raise NotPossibleError("one device has nothing to sum with")
        if engine == "xla" and not machine.on_gpu:
            raise NotPossibleError("collectives inside XLA's program need GPUs")
        return measure(machine, size, precision, engine)

    return Case(
        benchmark="all_reduce",
        name=f"{_size_name(size)}",
        precision=precision,
        engine=engine,
        facts={"num_gpus": len(machine.gpus), "topology": machine.topology},
        measure=run,
    )


def _size_name(size: int) -> str:
    name, unit = next((name, unit) for name, unit in _UNITS.items() if size >= unit)
    return f"{size // unit} {name}"


def in_flight(size: int) -> int:
    """Messages of a size that are summed at a time."""
    return min(_MOST_IN_FLIGHT, max(_LEAST_IN_FLIGHT, _IN_FLIGHT_BYTES // size))


def sums_in_a_row(replicas: int) -> int:
    """How often a message is summed in a call, each time what the last sum gave: exact in float16.

    Replica r gives r + 1 units, so a sum is of n(n + 1)/2 and each further one n times as large.
    """
    first, odd = replicas * (replicas + 1) // 2, replicas // (replicas & -replicas)
    count = 1
    while (
        count < _MOST_SUMS_IN_A_ROW
        and first * replicas**count * _UNIT < 2**16  # float16 ends there
        and first * replicas * odd ** (count - 1) < 2**11  # of any part of the sum; twos cost no digit
    ):
        count += 1
    return count


def size_of(case: str) -> int:
    """Bytes of the message of a case, such as 65536 for "64 KiB".

    Raises:
        ValueError: it is no name of a size.
    """
    digits, _, unit = case.partition(" ")
    if not digits.isdecimal() or unit not in _UNITS:
        raise ValueError(f"{case!r} is no size of a message, such as 64 KiB")
    return int(digits) * _UNITS[unit]


def measure(machine: Machine, size: int, precision: str, engine: str) -> Result:
    """Bus bandwidth of one size.

    Args:
        machine: two devices or more.
        size: bytes of the message.
        precision: fp32 or fp16.
        engine: "library" (an operation of its own) or "xla" (inside the compiled program).
    """
    import tensorflow as tf

    dtype, width = _DTYPES[precision]
    strategy = _strategy(machine.devices)
    replicas = strategy.num_replicas_in_sync
    sums = sums_in_a_row(replicas) if machine.on_gpu else min(_SUMS_ON_CPU, sums_in_a_row(replicas))
    messages = [
        strategy.experimental_distribute_values_from_function(
            lambda context: _message(machine.devices, context.replica_id_in_sync_group, size // width, dtype)
        )
        for _ in range(in_flight(size))
    ]
    call = tf.function(
        lambda values: strategy.run(_reduction(sums, engine == "xla"), args=(values,)), autograph=False
    )
    results = [result for one in call(messages) for result in strategy.experimental_local_results(one)]
    wrong = _wrong(results, size // width, dtype, replicas, sums)
    del results  # as large as the messages
    windows = timed.time_calls(lambda: call(messages), machine.seconds(SECONDS))
    algorithm = timed.rates(windows, len(messages) * sums * size / 1e9)
    link = machine.topology or ("unknown link" if machine.on_gpu else "one memory")
    return Result(
        rates=tuple(bus_factor(replicas) * rate for rate in algorithm),
        unit="GB/s",
        windows=windows,
        peak=link_peak_gb_per_s(machine),
        relative_error=wrong,
        bound=0.0,
        note=f"bus bandwidth; algorithm {median(algorithm):.4g} GB/s, {len(messages)} messages under way, "
        f"{replicas} devices over {link}",
    )


@functools.cache  # a second one over the same devices would share the first one's collective keys
def _strategy(devices: tuple[str, ...]) -> Any:
    """As training's, but the message is not packed: with one tensor that would be a copy and no use."""
    import tensorflow as tf

    class Strategy(tf.distribute.MirroredStrategy):  # type: ignore[misc]
        """Numbers its groups apart: TensorFlow refuses a number that it knows for a group of another size."""

        _collective_key_base = _KEYS_APART * len(devices)  # there is no public way

    on_cpu = devices[0].startswith("CPU")
    operations = tf.distribute.ReductionToOneDevice() if on_cpu else tf.distribute.NcclAllReduce(num_packs=0)
    return Strategy(list(devices), cross_device_ops=operations)


def _message(devices: tuple[str, ...], replica: int, elements: int, dtype: str) -> Any:
    """Replica r gives (r + 1) × v units, on its own device: sums of these small integers are exact."""
    import tensorflow as tf

    with tf.device(devices[replica]):
        return _pattern(elements, dtype) * tf.cast((replica + 1) * _UNIT, dtype)


def _pattern(elements: int, dtype: str) -> Any:
    """v: -1, 0 and 1 in turn, made on the device in scope."""
    import tensorflow as tf

    return tf.tile(tf.constant([-1, 0, 1], dtype), [-(-elements // 3)])[:elements]


def _reduction(sums: int, xla: bool) -> Callable[[Any], Any]:
    """A replica's part: of a list of messages the sums of sums; no message waits for another."""
    import tensorflow as tf

    def reduce_one(values: Any) -> Any:
        values = tf.identity(values)  # NCCL's operation asks where its operand is, and an argument is nowhere
        for _ in range(sums):
            values = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, values)
        return values

    def reduce(messages: list[Any]) -> list[Any]:
        return [reduce_one(values) for values in messages]

    # A program of its own for each replica, made where it runs: one around `run` cannot hold two devices.
    return (
        (lambda messages: tf.function(reduce, jit_compile=True, autograph=False)(messages)) if xla else reduce
    )


def _wrong(results: Sequence[Any], elements: int, dtype: str, replicas: int, sums: int) -> float:
    """Share of the sums that differ from v units × n(n + 1)/2 × n for each further sum."""
    import tensorflow as tf

    total = replicas * (replicas + 1) / 2 * replicas ** (sums - 1) * _UNIT
    differ = 0
    for result in results:
        with tf.device(result.device):
            expected = _pattern(elements, dtype) * tf.cast(total, dtype)
            differ += not bool(tf.reduce_all(result == expected))
    return differ / len(results)
