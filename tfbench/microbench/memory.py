"""Bandwidth of the device's memory and of its link to the host, and what starting work costs.

Imports TensorFlow when something is measured.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from tfbench import devices
from tfbench.hardware.cards import CardFacts
from tfbench.measure.timing import Window, WindowTimer
from tfbench.microbench import timed
from tfbench.microbench.case import Case, Machine, NotPossibleError, Result
from tfbench.pinned import in_pinned_memory

ELEMENTS = 2**28  # float32, 1 GiB: far beyond any cache
ELEMENTS_ON_CPU = 2**22
HOST_ELEMENTS = 2**26  # 256 MiB
SECONDS = 0.5
SYNCHRONISED_CALLS = 50  # in a window
_FACTOR = 3.0  # of the triad a = b + 3 c

# GB/s of one lane and direction by generation: GT/s × coding ÷ 8 (PCI-SIG: 8b/10b up to 2.0, 128b/130b up to
# 5.0, 242/256 of a flit in 6.0).
_PCIE_LANE_GB_PER_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}


def pcie_limit_gb_per_s(card: CardFacts | None) -> float | None:
    """What card and slot could carry in one direction; None where the driver does not say."""
    if card is None or card.pcie_generation_max is None or card.pcie_width_max is None:
        return None
    lane = _PCIE_LANE_GB_PER_S.get(card.pcie_generation_max)
    return None if lane is None else lane * card.pcie_width_max


def moved_bytes(operation: str, elements: int) -> int:
    """Bytes of float32 that an operation must read and write: a copy 1 + 1 vectors, a triad 2 + 1."""
    vectors = {"copy": 2, "triad": 3, "host_to_device": 1, "device_to_host": 1}[operation]
    return 4 * vectors * elements


def cases(machine: Machine) -> Iterator[Case]:
    """Device memory, the link to the host, and latencies."""
    for operation, engine in (("copy", "library"), ("copy", "xla"), ("triad", "xla")):
        yield _case(operation, partial(_on_device, machine, operation, engine), engine)
    yield _case("host_to_device pageable", partial(_to_device, machine, _numpy_vector))
    yield _case("host_to_device as TensorFlow holds it", partial(_to_device, machine, _returned_vector))
    yield _case("host_to_device pinned", partial(_to_device, machine, _pinned_vector))
    yield _case("device_to_host", partial(_to_host, machine))
    yield _case("empty launch, waited for", partial(_latency, machine, waits=True))
    yield _case("host loop iteration", partial(_latency, machine, waits=False))


def _case(name: str, measure: Callable[[], Result], engine: str = "library") -> Case:
    return Case(benchmark="memory", name=name, engine=engine, precision="fp32", measure=measure)


def _on_device(machine: Machine, operation: str, engine: str) -> Result:
    """A vector negated (read once, written once: a plain copy would be left out) or the triad b + 3 c.

    Raises:
        NotPossibleError: the sum or sign is wrong.
    """
    import tensorflow as tf

    elements = ELEMENTS if machine.on_gpu else ELEMENTS_ON_CPU
    with tf.device(machine.devices[0]):
        left = tf.random.stateless_normal((elements,), (1, 2))
        if operation == "copy":
            operands: tuple[Any, ...] = (left,)
            function: Callable[..., Any] = tf.negative
        else:
            operands = (left, tf.random.stateless_normal((elements,), (3, 4)))
            function = _triad
        call = tf.function(function, jit_compile=engine == "xla", autograph=False)
        error = _sampled_error(operation, operands, call(*operands))
        windows = timed.time_calls(lambda: call(*operands), machine.seconds(SECONDS))
    peak = machine.spec.mem_bw_gbs if machine.spec else None
    note = "the vector negated: a read and a write" if operation == "copy" else "a = b + 3 c, one kernel"
    return Result(
        rates=timed.rates(windows, moved_bytes(operation, elements) / 1e9),
        unit="GB/s",
        windows=windows,
        peak=peak,
        relative_error=error,
        bound=4 * 2.0**-24,  # a product, a sum and their largest ratio to the root mean square
        note=note,
    )


def _triad(left: Any, right: Any) -> Any:
    return left + _FACTOR * right


def _sampled_error(operation: str, operands: tuple[Any, ...], output: Any) -> float:
    """Largest error at every 1024th element against float64 ÷ what the truth's own size allows."""
    values = [operand[::1024].numpy().astype(np.float64) for operand in operands]
    truth = -values[0] if operation == "copy" else values[0] + _FACTOR * values[1]
    size = np.abs(values[0]) + (0 if operation == "copy" else _FACTOR * np.abs(values[1]))
    return float(np.max(np.abs(output[::1024].numpy() - truth) / size))


def _host_elements(machine: Machine) -> int:
    if not machine.on_gpu:
        raise NotPossibleError("the CPU is the host: nothing crosses a link")
    return HOST_ELEMENTS


def _numpy_vector(elements: int, device: str) -> Any:
    """A tensor in ordinary host memory."""
    import tensorflow as tf

    del device
    with tf.device("CPU:0"):
        return tf.constant(np.random.default_rng(1).standard_normal(elements, np.float32))


def _pinned_vector(elements: int, device: str) -> Any:
    """A tensor in pinned memory, as a training's batches are."""
    import tensorflow as tf

    vector = tf.data.Dataset.from_tensors({"vector": _numpy_vector(elements, device)})
    return next(iter(in_pinned_memory(vector, lambda batch: batch, 1)))["vector"]


def _returned_vector(elements: int, device: str) -> Any:
    """A tensor in the host memory that TensorFlow chooses for what comes from a device."""
    import tensorflow as tf

    with tf.device(device):
        there = tf.random.stateless_normal((elements,), (5, 6))
    with tf.device("CPU:0"):
        return tf.identity(there)


def _crossing(vector: Any, here: str, there: str) -> Any:
    """The vector on the device `there`, copied anew with every call.

    TensorFlow keeps a copy with the handle of an eager tensor that crossed once, so a second crossing of the
    same handle would copy nothing. The identity on its own device gives a new handle of the same memory.
    """
    import tensorflow as tf

    with tf.device(here):
        handle = tf.identity(vector)
    with tf.device(there):
        return tf.identity(handle)


def _to_device(machine: Machine, source: Callable[[int, str], Any]) -> Result:

    elements = _host_elements(machine)
    vector = source(elements, machine.devices[0])

    def copy() -> Any:
        return _crossing(vector, "CPU:0", machine.devices[0])

    wrong = not bool((copy().numpy() == vector.numpy()).all())
    return _link_result(machine, "host_to_device", elements, copy, wrong)


def _to_host(machine: Machine) -> Result:
    import tensorflow as tf

    elements = _host_elements(machine)
    with tf.device(machine.devices[0]):
        vector = tf.random.stateless_normal((elements,), (7, 8))

    def copy() -> Any:
        return _crossing(vector, machine.devices[0], "CPU:0")

    with tf.device(machine.devices[0]):
        wrong = not bool(tf.reduce_all(tf.identity(copy()) == vector))
    return _link_result(machine, "device_to_host", elements, copy, wrong)


def _link_result(
    machine: Machine, direction: str, elements: int, copy: Callable[[], Any], wrong: bool
) -> Result:
    windows = timed.time_calls(copy, machine.seconds(SECONDS))
    return Result(
        rates=timed.rates(windows, moved_bytes(direction, elements) / 1e9),
        unit="GB/s",
        windows=windows,
        peak=pcie_limit_gb_per_s(machine.card),
        relative_error=1.0 if wrong else 0.0,
        bound=0.0,
        note=f"{4 * elements >> 20} MiB; the peak is that of PCIe",
    )


def _latency(machine: Machine, waits: bool) -> Result:
    """Microseconds of a call of a compiled function that adds 1 to one number.

    Args:
        machine: on whose first device it runs.
        waits: for the device after each call; otherwise calls follow each other as in a training loop.
    """
    import tensorflow as tf

    with tf.device(machine.devices[0]):
        number = tf.zeros(())
        call = tf.function(lambda value: value + 1.0, autograph=False)
        if waits:
            windows = _waited(lambda: call(number))
        else:
            windows = timed.time_calls(lambda: call(number), machine.seconds(SECONDS) / 2)
    return Result(
        rates=tuple(1e6 * window.seconds / window.steps for window in windows), unit="us", windows=windows
    )


def _waited(call: Callable[[], Any]) -> tuple[Window, ...]:
    """Windows of calls, each followed by a wait for the device."""
    call()
    timer = WindowTimer(devices.synchronize, time.monotonic)
    for _ in range(timed.WINDOWS):
        with timer.window() as counted:
            for _ in range(SYNCHRONISED_CALLS):
                call()
                devices.synchronize()
            counted.add(SYNCHRONISED_CALLS, SYNCHRONISED_CALLS)
    return tuple(timer.windows)
