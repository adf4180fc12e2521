"""`python -m tfbench.train`: train one configuration, measure it, write its row."""

import signal
import sys
from types import FrameType

from absl import app, flags

import tfbench.flags
from tfbench.config import ConfigError
from tfbench.defaults import complete
from tfbench.display import Display

flags.adopt_module_key_flags(tfbench.flags)

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
        from tfbench.runner import run

        record = run(config, display)
    except ConfigError as error:
        display.error(tfbench.flags.usage_error(error))
        return EXIT_REFUSED
    except KeyboardInterrupt:
        display.error("stopped before the run began")
        return EXIT_CODES["interrupted"]
    return EXIT_CODES.get(record.status or "", EXIT_FAILED)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends a run as Ctrl-C does."""
    raise KeyboardInterrupt


def main() -> None:
    """Console entry point."""
    app.run(train)


if __name__ == "__main__":
    sys.exit(main())
