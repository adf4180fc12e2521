"""`python -m tfbench.sweep`: run every combination of some flags' values, each in a fresh process."""

import sys

from absl import app, flags

import tfbench.flags
from tfbench.config import ConfigError
from tfbench.display import Display
from tfbench.hardware.gpus import this_machine
from tfbench.sweeping import loop, matrix
from tfbench.sweeping.child import Limits
from tfbench.sweeping.plan import RETRIES

flags.adopt_module_key_flags(tfbench.flags)
flags.DEFINE_string(
    "sweep", None, 'Flags and their values, such as "precision=tf32,mixed_float16 gpus=1,2"; they win over '
    "the same flags set on their own. The last flag changes fastest."
)  # fmt: skip
flags.DEFINE_string("sweep_file", None, "The same as a YAML file that maps each flag to a list of values.")
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


def sweep(argv: list[str]) -> int:
    """Run what the flags say; returns the exit code."""
    display = Display()
    if len(argv) > 1:
        return _refused(display, f"{argv[1]!r} is not a flag: flags start with --")
    values = flags.FLAGS
    try:
        if (values.sweep is None) == (values.sweep_file is None):
            return _refused(display, 'give one of --sweep="flag=value,value" and --sweep_file=FILE.yaml')
        asked = (
            matrix.parse_file(values.sweep_file) if values.sweep is None else matrix.parse_text(values.sweep)
        )
        points, sentences = matrix.complete_points(tfbench.flags.choices_from_flags(), asked, this_machine())
        for sentence in sentences:
            display.say(sentence)
        limits = Limits(values.point_timeout_s, values.hang_timeout_s)
        return loop.sweep(loop.Sweep(points, values.repeats, values.retry, limits), display)
    except matrix.ImpossiblePointsError as error:
        return _refused(display, f"nothing was run\n{error}")
    except (ConfigError, flags.Error) as error:
        return _refused(display, _one_line(error))


def parse(argv: list[str]) -> list[str]:
    """As absl's parser, but a flag that it refuses ends like one that is refused later."""
    try:
        return list(flags.FLAGS(argv))
    except flags.Error as error:
        sys.exit(_refused(Display(), _one_line(error)))


def _one_line(error: ConfigError | flags.Error) -> str:
    """The refusal itself, without the pointer to the other command's help."""
    return tfbench.flags.usage_error(error).splitlines()[0]


def _refused(display: Display, why: str) -> int:
    display.error(why)
    return EXIT_REFUSED


def main() -> None:
    """Console entry point."""
    app.run(sweep, flags_parser=parse)


if __name__ == "__main__":
    main()
