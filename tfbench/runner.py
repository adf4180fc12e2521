"""One run from its configuration to its row: `run` is the whole program on one screen."""

import contextlib
import time
from collections.abc import Callable, Iterator

from tfbench import devices, outcome, precision, stages, summary
from tfbench.config import BenchmarkConfig, ConfigError
from tfbench.curves import Curves
from tfbench.display import Display
from tfbench.journal import Journal, Observed
from tfbench.measure.telemetry import Sampler
from tfbench.records import RunRecord
from tfbench.training import Training


def run(
    config: BenchmarkConfig,
    display: Display | None = None,
    afterwards: Callable[[Training, Observed], None] | None = None,
) -> RunRecord:
    """Train, measure, and write the row.

    Args:
        config: complete and checked; one process runs one.
        display: where to show the way of the run; default: standard output.
        afterwards: a further look at what was trained, after everything that is in the row.

    Returns:
        The row as written. Whatever ended the run is its `status`.

    Raises:
        ConfigError: the results folder cannot be used, or could not be at the end, when the disk was full:
            the result has been shown then, with its row as CSV. Nothing else is raised.
    """
    display = display or Display()
    journal, observed, record = Journal(config), Observed(), RunRecord(status="failed")
    with _recorded(record, journal, observed, display):
        visible = stages.look_around(config, journal, observed, display)
        devices.set_environment(config)
        cache = stages.open_compile_cache(config, observed)
        with devices.native_messages_to(journal.folder / "train.log"):
            names = devices.open_devices(config)
            devices.check_devices(names, config.xla)
        display.say(stages.announcement(config, names, visible))

        build_start_s = time.monotonic()
        precision.apply(config.precision)
        strategy = devices.build_strategy(names)
        training = stages.build(config, strategy, observed)
        stages.announce_input(training, display)
        explained = training.source.log.explained()
        with Sampler(visible) as sampler, display.steps(config.total_steps) as progress, explained:
            observed.telemetry, observed.sensor_problems = sampler.samples, sampler.problems
            with devices.native_messages_to(journal.folder / "train.log"):
                stages.warm_up(config, training, observed, progress, build_start_s)
            observed.facts["cache_state"] = cache.keep() if cache else None
            with Curves(config, journal.folder) as curves:
                stages.measure(config, training, observed, progress, curves)
        stages.look_at_state(training, observed)
        stages.measure_ceiling(config, visible, observed, display)
        stages.look_at_input(training, observed, display)
        stages.look_closer(config, training, observed, display)
        stages.profile(config, training, observed, journal.folder, display)
        if afterwards is not None:
            afterwards(training, observed)
        record.status = "no_update" if observed.iterations == observed.iterations_before else "ok"
    stages.show(record, observed, journal, display)
    if journal.unwritten:
        raise ConfigError("results_dir", config.results_dir, f"not written: {'; '.join(journal.unwritten)}")
    return record


@contextlib.contextmanager
def _recorded(record: RunRecord, journal: Journal, observed: Observed, display: Display) -> Iterator[None]:
    """Whatever ends the block becomes the row, which is then written."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        record.status, record.note = outcome.classify(error)
        outcome.log_traceback(error)
        display.error(record.note)
    stages.look_at_host(observed)
    journal.identify(record)
    try:
        summary.fill(record, journal.config, observed, journal.earlier_rows)
    finally:  # a figure that cannot be worked out is a defect, but costs its cell and not the row
        journal.close(record, observed)
