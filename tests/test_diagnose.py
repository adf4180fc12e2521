"""Real runs of a toy on logical CPU devices, each held back on purpose: the verdict names the reason."""

import copy
import dataclasses
import functools
import io
import time
import types

import pytest
import step_helpers
import tensorflow as tf
from rich.console import Console

from tfbench import diagnose
from tfbench import step as step_module
from tfbench.config import BenchmarkConfig
from tfbench.data import Input
from tfbench.display import Display
from tfbench.measure import verdict
from tfbench.measure.timing import Window, WindowTimer
from tfbench.step import HostLoop
from tfbench.training import Training

DELAY_S = 0.1  # of a step or a call: many times the toy's own step
STEPS = 6


def sleeping(value: tf.Tensor) -> tf.Tensor:
    """`value`, DELAY_S later."""

    def sleep(array):
        time.sleep(DELAY_S)
        return array

    late = tf.numpy_function(sleep, [value], value.dtype)
    return tf.ensure_shape(late, value.shape)


def trained(num_replicas=1, slow_input=False, resident=False, steps_per_loop=2):
    """The toy as a run hands it to the diagnosis."""
    toy = step_helpers.start(
        step_helpers.TOY,
        [step_helpers.toy_batch(8)],
        num_replicas,
        steps=STEPS,
        steps_per_loop=steps_per_loop,
    )
    each = 8 // num_replicas
    dataset = tf.data.Dataset.from_tensors(step_helpers.toy_batch(each)).repeat()
    if slow_input:
        dataset = dataset.map(lambda batch: batch | {"image": sleeping(batch["image"])})
    iterator = iter(toy.strategy.distribute_datasets_from_function(lambda _: dataset))
    batch = next(iterator)
    source = Input(next=(lambda: batch) if resident else (lambda: next(iterator)), resident=resident)
    loop = HostLoop(toy.strategy, toy.step, source.next, steps_per_loop)
    return toy.config, Training(toy.strategy, toy.step, source, loop)


def diagnosed(config, training, monkeypatch):
    monkeypatch.setattr(diagnose, "ROUNDS", 3)
    parts = diagnose.measure_parts(config, training, Display(Console(file=io.StringIO())))
    return parts, verdict.findings(parts, verdict.Sensors(), config.steps_per_loop)[0].verdict


def test_slow_input_is_named(monkeypatch):
    parts, named = diagnosed(*trained(slow_input=True), monkeypatch)
    assert named == "input bound"
    assert parts.share(parts.input_wait) > 0.5
    assert 0.3 * 8 / DELAY_S < parts.input_samples_per_sec < 1.3 * 8 / DELAY_S
    assert parts.samples_per_sec == pytest.approx(1000 * 8 / parts.step.ms, rel=0.1)


def test_wait_for_input_without_what_first_calls_take(monkeypatch):
    """A window of three steps is a row of two and one by itself: both are called before it."""
    run_row, known = HostLoop._started, set()

    def slow_first(self, num_steps):
        if (id(self), num_steps) not in known:
            time.sleep(1.0)
        known.add((id(self), num_steps))
        return run_row(self, num_steps)

    monkeypatch.setattr(HostLoop, "_started", slow_first)
    config, training = trained()
    config = dataclasses.replace(config, steps=3, windows=1)
    as_is = types.SimpleNamespace(windows=[Window(0, steps=3, samples=24, start_s=0.0, end_s=3 * DELAY_S)])
    assert diagnose.measure_input_wait(config, training, as_is) > 0.5


def test_python_between_calls_is_named(monkeypatch):
    call = HostLoop.__call__

    def slow_call(self, num_steps):
        time.sleep(DELAY_S)
        return call(self, num_steps)

    monkeypatch.setattr(HostLoop, "__call__", slow_call)
    parts, named = diagnosed(*trained(resident=True), monkeypatch)
    assert named == "host bound"
    a_step_ms = 1000 * DELAY_S / 2  # a call of two steps
    assert 0.3 * a_step_ms < parts.host_gap.ms < 3 * a_step_ms


def test_slow_all_reduce_is_named(monkeypatch):
    all_reduce = step_module._all_reduce

    def slow_all_reduce(gradients):
        return [sleeping(gradients[0]), *all_reduce(gradients)[1:]]

    monkeypatch.setattr(step_module, "_all_reduce", slow_all_reduce)
    parts, named = diagnosed(*trained(num_replicas=2, resident=True), monkeypatch)
    assert named == "communication bound"
    assert parts.share(parts.exposed_communication) > 0.5


def test_parts_add_up_to_the_step(monkeypatch):
    parts, _ = diagnosed(*trained(num_replicas=2, slow_input=True), monkeypatch)
    waits = (parts.input_wait, parts.exposed_communication, parts.host_gap)
    assert parts.compute.ms + sum(part.ms for part in waits) == pytest.approx(parts.step.ms)
    assert all(part.low_ms <= part.ms <= part.high_ms for part in waits)


def test_a_run_without_input_and_partners_has_no_such_parts(monkeypatch):
    parts, _ = diagnosed(*trained(resident=True, steps_per_loop=1), monkeypatch)
    assert parts.input_wait is None
    assert parts.exposed_communication is None
    assert parts.input_samples_per_sec is None


def test_nothing_is_compiled_for_the_diagnosis(monkeypatch):
    config, training = trained(num_replicas=2, resident=True)
    training.loop(1)
    programs = dict(training.step._compiled)
    traced = {name: program.experimental_get_tracing_count() for name, program in programs.items()}
    diagnosed(config, training, monkeypatch)
    assert training.step._compiled == programs
    assert {n: p.experimental_get_tracing_count() for n, p in programs.items()} == traced


@pytest.mark.parametrize(
    ("place", "can_be_left_out"), [("outside", True), ("update", True), ("inside", False)]
)
def test_one_program_has_no_all_reduce_to_leave_out(place, can_be_left_out):
    config, training = trained(num_replicas=2, resident=True)
    other = copy.copy(config)
    object.__setattr__(other, "collectives", place)  # which its own check grants to GPUs only
    assert ("without all-reduce" in diagnose._variants(other, training)) is can_be_left_out


@pytest.mark.parametrize(
    ("steps", "steps_per_loop", "gap_ms"),
    [
        (20, 10, 0.2),  # two rows of ten
        (20, 16, 0.5),  # a row of 16 and four single steps
        (4, 1, 2.0),
        (4, 10, 2.0),  # no row of ten fits: single steps
        (10, 50, 2.0),  # rows would be of 20
        (100, 100, 0.1),  # five rows of 20
        (1, 10, None),  # every loop starts that step by itself
    ],
)
def test_host_gap_counts_the_rows_that_ran(monkeypatch, steps, steps_per_loop, gap_ms):
    """A card that takes 10 ms a step, a host that takes 2 ms to start a row."""
    config, training = trained(resident=True, steps_per_loop=steps_per_loop)
    config = dataclasses.replace(config, steps=steps, windows=1)
    now_s = 0.0

    def start_row(num_steps):
        nonlocal now_s
        now_s += 0.002 + 0.010 * num_steps

    variants = diagnose._variants(config, training)
    for loop in variants.values():
        loop._row, loop._start = start_row, lambda: None
        loop._untraced = set()
    monkeypatch.setattr(diagnose, "WindowTimer", functools.partial(WindowTimer, clock=lambda: now_s))
    parts = diagnose._parts(config, diagnose._measure(config, variants, 2))
    if gap_ms is None:
        assert parts.host_gap is None
    else:
        assert parts.host_gap.ms == pytest.approx(gap_ms)
        assert parts.compute.ms == pytest.approx(10)


def test_host_gap_is_not_a_wait_for_input():
    """30 ms as it is, 12 without input, of which 2 are the host's at one step a row and 0.5 at four."""
    config = BenchmarkConfig(model="resnet50", steps=4)
    times_ms = {"as it is": 30.0, "input alone": 15.0, "without input": 12.0, diagnose.OTHER_LOOP: 10.5}
    windows = {
        name: [Window(index, 4, 4, 0.0, 4 * ms / 1000) for index in range(2)] for name, ms in times_ms.items()
    }
    parts = diagnose._parts(config, windows)
    assert (parts.input_wait.ms, parts.host_gap.ms) == pytest.approx((18, 2))
    assert parts.compute.ms == pytest.approx(10)
