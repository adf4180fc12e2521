"""`python -m tfbench.doctor`: is this machine right for training? Looks, changes nothing."""

import dataclasses
import json
import sys
import time
from pathlib import Path

from absl import app, flags
from rich.table import Table
from rich.text import Text

from tfbench.checks import examine
from tfbench.checks.finding import LEVELS, Finding, worst
from tfbench.checks.gather import gather
from tfbench.display import Display

FLAGS = flags.FLAGS
TENSORFLOW_ENDS_S = 50.0  # after the start, so that the whole stays under a minute
EXIT_PROBLEM = 1
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
_STYLES = {"ok": "green", "unknown": "dim", "warning": "yellow", "problem": "bold red"}


def define_flags() -> None:
    """Defines the doctor's flags: some have names of another entry point's, so not on import."""
    flags.DEFINE_bool("json", False, "Print JSON and nothing else.")
    flags.DEFINE_string(
        "data_dir",
        None,
        "Folder whose files are read for the disk's speed. Default: TensorFlow Datasets' own.",
    )
    flags.DEFINE_float(
        "load_s", 20.0, "Seconds for which GPUs that are free are kept busy; 0: not at all.", lower_bound=0.0,
        upper_bound=20.0,
    )  # fmt: skip


def doctor(argv: list[str]) -> int:
    """Gather, judge, print; returns the exit code."""
    display = Display()
    if len(argv) > 1:
        display.error(f"{argv[1]!r} is not a flag: flags start with --")
        return EXIT_REFUSED
    if not FLAGS.json:
        display.say("looking at this machine; it takes up to a minute and changes no setting")
    data_dir = Path(FLAGS.data_dir or "~/tensorflow_datasets").expanduser()
    deadline_s = time.monotonic() + TENSORFLOW_ENDS_S
    try:
        findings = examine(gather(load_s=FLAGS.load_s, data_dir=data_dir, deadline_s=deadline_s))
    except KeyboardInterrupt:
        display.error("stopped before the checks were done")
        return EXIT_INTERRUPTED
    level = worst(finding.level for finding in findings)
    if FLAGS.json:
        print(json.dumps({"level": level, "findings": [dataclasses.asdict(f) for f in findings]}, indent=1))
    else:
        display.console.print(table(findings))
        counts = {known: sum(f.level == known for f in findings) for known in LEVELS}
        display.say(", ".join(f"{count} {known}" for known, count in counts.items()))
    return EXIT_PROBLEM if level == "problem" else 0


def table(findings: list[Finding]) -> Table:
    """Check, level, evidence and, under it, the fix."""
    shown = Table(pad_edge=False)
    shown.add_column("check", no_wrap=True)
    shown.add_column("level", no_wrap=True)
    shown.add_column("evidence, fix", overflow="fold")
    for finding in findings:
        text = Text(finding.evidence)
        if finding.fix:
            text.append(f"\n→ {finding.fix}", style="italic")
        shown.add_row(Text(finding.name), Text(finding.level, style=_STYLES[finding.level]), text)
    return shown


def parse(argv: list[str]) -> list[str]:
    """As absl's parser, but a refused flag ends with one message."""
    try:
        return list(FLAGS(argv))
    except flags.Error as error:
        Display().error(f"{error}\nSee python -m tfbench.doctor --help")
        sys.exit(EXIT_REFUSED)


def main() -> None:
    """Console entry point."""
    define_flags()
    app.run(doctor, flags_parser=parse)


if __name__ == "__main__":
    main()
