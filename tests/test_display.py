"""What a run shows: plain lines for a file or a pipe, a bar on a terminal, text as it is."""

import io
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from run_helpers import DEADLINE_S, environment

from tfbench.display import Display

# Would be colours, an emoji, an error (a closing tag without its opening) or lost, were they not shown as is.
AWKWARD = r"[red]a[/red] :rocket: [/] \[b] data/[0-9]* 100 % 'q' https://x.y"


def display(*, terminal: bool = False) -> tuple[Display, io.StringIO]:
    """A display and where it writes."""
    file = io.StringIO()
    return Display(Console(file=file, force_terminal=terminal, width=100)), file


def test_without_a_terminal_progress_is_plain_lines():
    shown, file = display()
    with shown.steps(12) as progress:
        progress.advance(1, "warm-up", "loss 6.9000")
        progress.advance(1, "warm-up")
        progress.advance(10, "measuring", "1,234.5 samples/s  loss 2.0000")
    assert file.getvalue().splitlines() == [
        "step 1/12  warm-up  loss 6.9000",
        "step 2/12  warm-up",
        "step 12/12  measuring  1,234.5 samples/s  loss 2.0000",
    ]


def test_on_a_terminal_progress_is_a_bar():
    shown, file = display(terminal=True)
    with shown.steps(12) as progress:
        progress.advance(12, "measuring", "9.9 samples/s")
    text = file.getvalue()
    assert "━" in text
    assert "12/12" in text
    assert "9.9 samples/s" in text
    assert "step 12/12" not in text


def test_more_steps_than_planned():
    shown, file = display()
    with shown.steps(10) as progress:
        progress.advance(10, "measuring")
        progress.extend(5)
        progress.advance(5, "measuring")
    assert file.getvalue().splitlines() == ["step 10/10  measuring", "step 15/15  measuring"]


@pytest.mark.parametrize(
    ("method", "start"), [("say", ""), ("warn", "warning: "), ("error", "error: ")], ids=lambda value: value
)
def test_text_is_shown_as_it_is(method, start):
    shown, file = display()
    getattr(shown, method)(AWKWARD)
    assert file.getvalue() == f"{start}{AWKWARD}\n"


def test_long_text_stays_on_one_line():
    shown, file = display()
    shown.error("word " * 100)
    assert len(file.getvalue().splitlines()) == 1


def test_table_shows_every_cell_as_it_is():
    shown, file = display()
    shown.table("resnet50, ok [1]", [("samples/s", "1,234.5", "95 %"), ("! gate", "", AWKWARD)])
    text = file.getvalue()
    for cell in ("resnet50, ok [1]", "samples/s", "1,234.5", "95 %", "! gate", AWKWARD):
        assert cell in text


def test_everything_goes_to_the_log_too():
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    log = logging.getLogger("tfbench")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    shown, _ = display(terminal=True)
    try:
        shown.say("50 % of [it]")
        shown.warn("slow")
        shown.error("broken")
        shown.table("title", [("loss", "1.5", "last window")])
        with shown.steps(3) as progress:
            progress.advance(3, "measuring", "loss 1")
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    assert lines.getvalue().splitlines() == [
        "INFO 50 % of [it]",
        "WARNING slow",
        "ERROR broken",
        "INFO loss: 1.5 last window",
        "INFO step 3/3  measuring  loss 1",
    ]


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path: Path):
    code = "from tfbench.display import Display\nd = Display()\nfor _ in 'abc': d.say('x')\nopen('end', 'w')"
    reader, writer = os.pipe()
    os.close(reader)
    try:
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env=environment(),
            stdout=writer,
            check=True,
            timeout=DEADLINE_S,
        )
    finally:
        os.close(writer)
    assert (tmp_path / "end").exists()
