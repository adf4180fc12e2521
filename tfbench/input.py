"""`python -m tfbench.input`: the input pipeline alone, without a model, and how many GPUs it can feed.

With --compare: what each part of it brings.
"""

import dataclasses
import signal
import sys
from types import FrameType
from typing import Any

from absl import app, flags

import tfbench.flags
from tfbench.config import BenchmarkConfig, ConfigError
from tfbench.data import DATASETS
from tfbench.data import parse as parse_data
from tfbench.defaults import complete
from tfbench.display import Display
from tfbench.hardware.gpus import Machine, this_machine
from tfbench.inputbench import compare
from tfbench.inputbench.row import InputSchemaError
from tfbench.inputbench.run import run
from tfbench.models import MODELS

flags.adopt_module_key_flags(tfbench.flags)
flags.DEFINE_float(
    "seconds", 5.0, "Measured for the whole input, and again for each of its stages.", lower_bound=0.1
)
flags.DEFINE_float(
    "gpu_rate", None, "Samples/s that one GPU trains. Default: the newest good row of the model with "
    "--data=synthetic in the results folder.", lower_bound=1e-3,
)  # fmt: skip
flags.DEFINE_bool(
    "compare", False, "Instead: the input with one thing changed at a time, in turns, --seconds each."
)
flags.DEFINE_integer("rounds", 5, "Of --compare: how often every variant has its turn.", lower_bound=1)
flags.DEFINE_multi_string(
    "compare_data", [], "Of --compare: a further value of --data to put beside it; may be repeated."
)

WINDOWS = 10
EXIT_CODES = {"ok": 0, "interrupted": 130}  # 128 + SIGINT, as shells have it
EXIT_FAILED = 1
EXIT_REFUSED = 2


def measure_input(argv: list[str]) -> int:
    """Measure the input that the flags name; returns the exit code."""
    display = Display()
    if len(argv) > 1:
        return _refused(display, f"{argv[1]!r} is not a flag: flags start with --")
    signal.signal(signal.SIGTERM, _interrupt)  # what has been measured by then is kept
    try:
        machine = this_machine()
        config, sentences = complete(_choices(), machine)
        for sentence in sentences:
            display.say(sentence)
        status = _measured(config, machine, display)
    except (ConfigError, flags.Error) as error:
        return _refused(display, tfbench.flags.refusal(error))
    except (InputSchemaError, OSError) as error:
        return _refused(display, f"{error}")
    except KeyboardInterrupt:
        display.error("stopped before anything was measured")
        return EXIT_CODES["interrupted"]
    return EXIT_CODES.get(status, EXIT_FAILED)


def _measured(config: BenchmarkConfig, machine: Machine, display: Display) -> str:
    """The status of what the flags ask for.

    Raises:
        ConfigError: --compare_data that cannot be, or --data that has no place in a comparison.
    """
    values = flags.FLAGS
    if not values.compare:
        if values.compare_data:
            raise ConfigError("compare_data", values.compare_data[0], "goes with --compare only")
        return run(config, values.seconds, values.gpu_rate, machine, display).status
    for data in values.compare_data:
        try:
            parse_data(data)[0].check(dataclasses.replace(config, data=data), MODELS[config.model])
        except ConfigError as error:
            raise ConfigError("compare_data", data, f"{error}") from error
    return compare.run(config, values.seconds, values.rounds, values.compare_data, machine, display)


def _choices() -> dict[str, Any]:
    """BenchmarkConfig's fields; those of the length of a run are this command's.

    Raises:
        ConfigError: one that does not apply.
    """
    choices = tfbench.flags.choices_from_flags()
    if choices["data"] == "synthetic":
        real = ", ".join(name for name in DATASETS if name != "synthetic")
        raise ConfigError("data", "synthetic", f"reads nothing that could be measured: one of {real}")
    if choices["input"] != "tfdata":
        raise ConfigError("input", choices["input"], "only tfdata, the host's part, is measured alone")
    if choices["steps"] is not None:
        raise ConfigError("steps", choices["steps"], "the input is measured for --seconds, not for steps")
    windows = WINDOWS if choices["windows"] is None else choices["windows"]
    warmup_steps = 1 if choices["warmup_steps"] is None else choices["warmup_steps"]
    return choices | {"windows": windows, "steps": windows, "warmup_steps": warmup_steps}


def _interrupt(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends a measurement as Ctrl-C does."""
    raise KeyboardInterrupt


def parse(argv: list[str]) -> list[str]:
    """As absl's parser, but a flag that it refuses ends like one that is refused later."""
    try:
        return list(flags.FLAGS(argv))
    except flags.Error as error:
        sys.exit(_refused(Display(), tfbench.flags.refusal(error)))


def _refused(display: Display, why: str) -> int:
    display.error(f"{why}\nSee python -m tfbench.input --help")
    return EXIT_REFUSED


def main() -> None:
    """Console entry point."""
    app.run(measure_input, flags_parser=parse)


if __name__ == "__main__":
    main()
