"""What a run shows while it runs: a progress bar on a terminal, plain lines elsewhere. TensorFlow-free."""

import contextlib
import logging
import math
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

log = logging.getLogger("tfbench")
log.propagate = False  # what goes to the terminal is decided here
log.addHandler(logging.NullHandler())


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Go on unseen: a reader that has gone (`| head`) does not cost the run its row."""
        with contextlib.suppress(SystemExit):
            super().on_broken_pipe()


def interval(low: float | None, high: float | None, digits: int = 0) -> str:
    """The ends of an interval in words, empty where there is none; nothing bounds an infinite upper one."""
    if low is None or high is None:
        return ""
    return f"{low:,.{digits}f} " + ("or more" if math.isinf(high) else f"to {high:,.{digits}f}")


class Display:
    """Messages, progress and the final table; everything also goes to the log."""

    def __init__(self, console: Console | None = None):
        self.console = console or _Console()

    def say(self, text: str) -> None:
        """One step of the run."""
        log.info(text)
        self.console.print(Text(text), soft_wrap=True)

    def warn(self, text: str) -> None:
        """Something that makes the result smaller than the user may think."""
        log.warning(text)
        self.console.print(Text.assemble(("warning:", "yellow"), " ", text), soft_wrap=True)

    def error(self, text: str) -> None:
        """Why there is no result."""
        log.error(text)
        self.console.print(Text.assemble(("error:", "red"), " ", text), soft_wrap=True)

    def table(self, title: str, rows: list[tuple[str, str, str]]) -> None:
        """The result: (name, value, remark) a row."""
        table = Table(title=Text(title), title_justify="left", show_header=False, pad_edge=False)
        table.add_column(no_wrap=True)
        table.add_column(justify="right", style="bold", no_wrap=True)
        table.add_column(style="dim", overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))  # as it is: no markup, no emoji codes
            log.info("%s: %s %s", *row)
        self.console.print(table)

    def grid(self, title: str, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
        """Lines under a header, the first column to the left and figures to the right."""
        table = Table(title=Text(title), title_justify="left", pad_edge=False)
        for index, name in enumerate(header):
            table.add_column(name, justify="right" if index else "left", overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
            log.info("%s", "  ".join(row))
        self.console.print(table)

    def steps(self, total: int) -> "StepProgress":
        """Progress over `total` steps, warm-up included."""
        return StepProgress(self, total)


class Bar:
    """A progress bar on a terminal; elsewhere there is none, and whoever moves it prints lines.

    Args:
        display: where to.
        columns: of rich's bar.
        auto_refresh: redraw from a thread.
    """

    def __init__(self, display: Display, *columns: ProgressColumn, auto_refresh: bool = True):
        self.display, self.on_terminal = display, display.console.is_terminal
        self._bar = Progress(
            *columns, console=display.console, auto_refresh=auto_refresh, disable=not self.on_terminal
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


class StepProgress(Bar):
    """Steps done, rate and loss so far; moves between windows only, so that it never disturbs one."""

    def __init__(self, display: Display, total: int):
        self.total, self.done = total, 0
        phase, figures = TextColumn("{task.description}"), TextColumn("{task.fields[figures]}")
        super().__init__(display, phase, BarColumn(), MofNCompleteColumn(), figures, TimeRemainingColumn())
        self._task = self._bar.add_task("warm-up", total=total, figures="")

    def extend(self, steps: int) -> None:
        """There will be `steps` more than was thought."""
        self.total += steps
        self._bar.update(self._task, total=self.total)

    def advance(self, steps: int, phase: str, figures: str = "") -> None:
        """`steps` more are done; `figures` are the rate and loss so far."""
        self.done += steps
        self._bar.update(self._task, advance=steps, description=phase, figures=figures)
        line = f"step {self.done}/{self.total}  {phase}  {figures}".rstrip()
        log.info(line)
        if not self.on_terminal:
            self.display.console.print(Text(line), soft_wrap=True)
