"""`python -m tfbench.train`: train one configuration, measure it, write its row."""

import gc
import signal
import sys
from types import FrameType

from absl import app, flags

import tfbench.flags
from tfbench.config import ConfigError
from tfbench.defaults import complete
from tfbench.display import Display
from tfbench.repeats import repeat

flags.adopt_module_key_flags(tfbench.flags)
flags.DEFINE_integer("repeats", 1, "Fresh processes to run this in, one after the other.", lower_bound=1)

EXIT_CODES = {"ok": 0, "interrupted": 130}  # 128 + SIGINT, as shells have it
EXIT_REFUSED = 2
EXIT_FAILED = 1


def train(argv: list[str]) -> int:
    """Run what the flags say; returns the exit code."""
    display = Display()
    if len(argv) > 1:
        display.error(f"{argv[1]!r} is not a flag: flags start with --")
        return EXIT_REFUSED
    signal.signal(signal.SIGTERM, _interrupt)  # a scheduler's end of time leaves a row too
    try:
        from tfbench.hardware.gpus import this_machine

        config, sentences = complete(tfbench.flags.choices_from_flags(), this_machine())
        for sentence in sentences:
            display.say(sentence)
        if flags.FLAGS.repeats > 1:
            return repeat(config, flags.FLAGS.repeats, display)
        from tfbench.runner import run

        record = run(config, display)
        # What the run has built refers to itself, so only the collector ends it; TensorFlow waits for ever
        # for an input iterator that is still alive when the interpreter ends.
        gc.collect()
    except ConfigError as error:
        display.error(tfbench.flags.usage_error(error))
        return EXIT_REFUSED
    except KeyboardInterrupt:
        display.error("stopped before the run began")
        return EXIT_CODES["interrupted"]
    return EXIT_CODES.get(record.status or "", EXIT_FAILED)


def parse(argv: list[str]) -> list[str]:
    """As absl's parser, but a flag that it refuses ends like one that `complete` refuses."""
    try:
        return list(flags.FLAGS(argv))
    except flags.Error as error:
        Display().error(tfbench.flags.usage_error(error))
        sys.exit(EXIT_REFUSED)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends a run as Ctrl-C does."""
    raise KeyboardInterrupt


def main() -> None:
    """Console entry point."""
    app.run(train, flags_parser=parse)


if __name__ == "__main__":
    sys.exit(main())
