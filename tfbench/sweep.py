"""`python -m tfbench.sweep`: run every combination of some flags' values, each in a fresh process.

--find_max_batch searches the largest batch of each instead, --scaling runs each on 1, 2, 4, … replicas.
"""

import sys
from typing import Any

from absl import app, flags

import tfbench.flags
from tfbench.config import SCALING_MODES, ConfigError
from tfbench.display import Display
from tfbench.hardware.gpus import Machine, this_machine
from tfbench.sweeping import batch_search, loop, matrix, placement, plan, scaling
from tfbench.sweeping.child import Limits
from tfbench.sweeping.plan import RETRIES

flags.adopt_module_key_flags(tfbench.flags)
flags.DEFINE_string(
    "sweep", None, 'Flags and their values, such as "precision=tf32,mixed_float16 gpus=1,2"; they win over '
    "the same flags set on their own. The last flag changes fastest."
)  # fmt: skip
flags.DEFINE_string("sweep_file", None, "The same as a YAML file that maps each flag to a list of values.")
flags.DEFINE_string(
    "parallel", "1", "Runs side by side, cores divided among them: auto (a run on each GPU) or a number. "
    "Runs on several GPUs are alone.",
)  # fmt: skip
flags.DEFINE_bool(
    "find_max_batch", False, "Search the largest per-replica batch that trains: doubled from "
    "--per_replica_batch_size, then halved in between to a multiple of 8.",
)  # fmt: skip
flags.DEFINE_integer("max_batch", None, "Largest batch that --find_max_batch tries.", lower_bound=1)
flags.DEFINE_enum(
    "scaling", None, SCALING_MODES, "Run on 1, 2, 4, … up to --gpus, or on a list such as --gpus=1,2,8 (with "
    "--gpus=0 up to --cpu_replicas), with runs on one in between. weak: the same batch per replica; strong: "
    "the same global batch.",
)  # fmt: skip
flags.DEFINE_integer("repeats", 1, "Runs of every point: all points once, then all again.", lower_bound=1)
flags.DEFINE_enum(
    "retry", "failed", list(RETRIES),
    "What to run again of a sweep that was started before. failed: all that did not end ok; oom: only what "
    "ran out of memory; none: nothing that has a row. Interrupted runs are always run again.",
)  # fmt: skip
flags.DEFINE_float("point_timeout_s", 0.0, "Longest that a run may take; 0: no limit.", lower_bound=0)
flags.DEFINE_float(
    "hang_timeout_s", 900.0, "Longest that a run may be silent: compiling and each window must take less; "
    "0: no limit.", lower_bound=0,
)  # fmt: skip

EXIT_REFUSED = 2
_ONE_MATRIX = 'give one of --sweep="flag=value,value" and --sweep_file=FILE.yaml'


def sweep(argv: list[str]) -> int:
    """Run what the flags say; returns the exit code."""
    display = Display()
    if len(argv) > 1:
        return _refused(display, f"{argv[1]!r} is not a flag: flags start with --")
    values = flags.FLAGS
    try:
        asked = _matrix(values)
        _refuse_together(values, asked)
        parallel = placement.parse_parallel(values.parallel)
        limits = Limits(values.point_timeout_s, values.hang_timeout_s)
        machine = this_machine()
        if values.scaling:
            return _scaling(values, asked, machine, limits, display)
        points, sentences = matrix.complete_points(tfbench.flags.choices_from_flags(), asked, machine)
        _say(display, sentences)
        tries = plan.rounds(points, values.repeats)
        work = loop.Sweep(points, tries, machine, values.retry, limits, parallel)
        if values.find_max_batch:
            return _find_max_batch(values, work, display)
        return loop.sweep(work, display)
    except matrix.ImpossiblePointsError as error:
        return _refused(display, f"nothing was run\n{error}")
    except (ConfigError, flags.Error) as error:
        return _refused(display, tfbench.flags.refusal(error))


def _matrix(values: flags.FlagValues) -> matrix.Matrix:
    """What is swept; may be empty where --find_max_batch or --scaling has its own points.

    Raises:
        ConfigError: nothing is swept, or in two ways.
    """
    if values.sweep is not None and values.sweep_file is not None:
        raise ConfigError("sweep", values.sweep, _ONE_MATRIX)
    if values.sweep_file is not None:
        return matrix.parse_file(values.sweep_file)
    if values.sweep is not None:
        return matrix.parse_text(values.sweep)
    if values.find_max_batch or values.scaling:
        return {}
    raise ConfigError("sweep", "", _ONE_MATRIX)


def _refuse_together(values: flags.FlagValues, asked: matrix.Matrix) -> None:
    """Flags that do not go together.

    Raises:
        ConfigError: names one of them.
    """
    own_points = "find_max_batch" if values.find_max_batch else "scaling"
    if values.find_max_batch and values.scaling:
        raise ConfigError("scaling", values.scaling, "goes without --find_max_batch")
    if values.max_batch is not None and not values.find_max_batch:
        raise ConfigError("max_batch", values.max_batch, "goes with --find_max_batch only")
    if not (values.find_max_batch or values.scaling):
        return
    if values.parallel != "1":
        raise ConfigError("parallel", values.parallel, f"runs of --{own_points} come one after the other")
    taken = {"find_max_batch": {"per_replica_batch_size"}, "scaling": {"gpus", "cpu_replicas"}}[own_points]
    for key in taken & set(asked):
        raise ConfigError("sweep", key, f"--{own_points} chooses the values of {key} itself")
    for flag in ("repeats", "retry") if values.find_max_batch else ():
        if flags.FLAGS[flag].value != flags.FLAGS[flag].default:
            raise ConfigError(flag, flags.FLAGS[flag].value, "goes without --find_max_batch")


def _find_max_batch(values: flags.FlagValues, work: loop.Sweep, display: Display) -> int:
    """The exit code.

    Raises:
        ConfigError: no end of the search on a CPU, or one before its start; or of `batch_search.search`.
    """
    for point in work.points:
        start = point.config.per_replica_batch_size
        if not point.config.gpus and values.max_batch is None:
            raise ConfigError(
                "max_batch", "", "is needed with --gpus=0: a host swaps before it runs out of memory"
            )
        if values.max_batch is not None and values.max_batch < start:
            raise ConfigError("max_batch", values.max_batch, f"at least --per_replica_batch_size={start}")
    return batch_search.search(work, values.max_batch, display)


def _scaling(
    values: flags.FlagValues, asked: matrix.Matrix, machine: Machine, limits: Limits, display: Display
) -> int:
    """The exit code.

    Raises:
        ConfigError: no two numbers of replicas; or of `loop.sweep`.
        ImpossiblePointsError: points that cannot be run.
    """
    base: dict[str, Any] = tfbench.flags.choices_from_flags()
    if not flags.FLAGS["diagnose"].present:
        base["diagnose"] = None
    studies, sentences = scaling.studies(base, asked, values.scaling, machine)
    _say(display, sentences)
    points = [point for study in studies for point in study.points]
    tries = [each for study in studies for each in plan.around_baseline(study.points, values.repeats)]
    work = loop.Sweep(points, tries, machine, values.retry, limits)
    code = loop.sweep(work, display)
    rows = work.rows()
    for study in studies:
        scaling.show(study, rows, values.scaling, display)
    return code


def _say(display: Display, sentences: list[str]) -> None:
    for sentence in sentences:
        display.say(sentence)


def parse(argv: list[str]) -> list[str]:
    """As absl's parser, but a flag that it refuses ends like one that is refused later."""
    try:
        return list(flags.FLAGS(argv))
    except flags.Error as error:
        sys.exit(_refused(Display(), tfbench.flags.refusal(error)))


def _refused(display: Display, why: str) -> int:
    display.error(why)
    return EXIT_REFUSED


def main() -> None:
    """Console entry point."""
    app.run(sweep, flags_parser=parse)


if __name__ == "__main__":
    main()
