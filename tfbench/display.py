"""What a run shows while it runs: a progress bar on a terminal, plain lines elsewhere. TensorFlow-free."""

import logging
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

log = logging.getLogger("tfbench")
log.propagate = False  # what goes to the terminal is decided here
log.addHandler(logging.NullHandler())


class Display:
    """Messages, progress and the final table; everything also goes to the log."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(highlight=False)

    def say(self, text: str) -> None:
        """One step of the run."""
        log.info(text)
        self.console.print(text, markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Something that makes the result smaller than the user may think."""
        log.warning(text)
        self.console.print(f"[yellow]warning:[/yellow] {_escaped(text)}", soft_wrap=True)

    def error(self, text: str) -> None:
        """Why there is no result."""
        log.error(text)
        self.console.print(f"[red]error:[/red] {_escaped(text)}", soft_wrap=True)

    def table(self, title: str, rows: list[tuple[str, str, str]]) -> None:
        """The result: (name, value, remark) a row."""
        table = Table(title=title, title_justify="left", show_header=False, pad_edge=False)
        table.add_column(no_wrap=True)
        table.add_column(justify="right", style="bold", no_wrap=True)
        table.add_column(style="dim", overflow="fold")
        for row in rows:
            table.add_row(*(_escaped(cell) for cell in row))
            log.info("%s: %s %s", *row)
        self.console.print(table)

    def steps(self, total: int) -> "StepProgress":
        """Progress over `total` steps, warm-up included."""
        return StepProgress(self, total)


class StepProgress:
    """Steps done, rate and loss so far; moves between windows only, so that it never disturbs one."""

    def __init__(self, display: Display, total: int):
        self.display, self.total, self.done = display, total, 0
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=display.console, disable=not display.console.is_terminal)
        self._task = self._bar.add_task("warm-up", total=total, figures="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def advance(self, steps: int, phase: str, figures: str = "") -> None:
        """`steps` more are done; `figures` are the rate and loss so far."""
        self.done += steps
        self._bar.update(self._task, advance=steps, description=phase, figures=figures)
        line = f"step {self.done}/{self.total}  {phase}  {figures}".rstrip()
        log.info(line)
        if not self.display.console.is_terminal:
            self.display.console.print(line, markup=False, soft_wrap=True)


def _escaped(text: str) -> str:
    """Text that rich prints as it is."""
    return text.replace("[", r"\[")
