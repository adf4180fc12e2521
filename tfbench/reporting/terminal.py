"""A report in the terminal: its sentences and tables."""

from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from tfbench.reporting.document import Cell, Report, Section, Table

_LONGEST_WORD = 12  # that is never broken
_MOST_LINES = 3  # of a row's name; longer ones stand below the table
_STYLES = {"": "", "good": "green", "warn": "yellow", "bad": "red"}


def show(report: Report, console: Console) -> None:
    """Print everything; long cells are folded, never cut."""
    for sentence in report.lead:
        console.print(Text(sentence), soft_wrap=True)
    for section in report.sections:
        _show_section(section, console)


def _show_section(section: Section, console: Console) -> None:
    console.print()
    console.print(Text(section.title, style="bold underline"))
    if said := section.missing or section.intro:
        console.print(Text(said, style="dim"))
    for table in section.tables:
        _show_table(table.without_empty_columns(), console)


def _show_table(table: Table, console: Console) -> None:
    """In a narrow terminal a name would be a column of syllables: a number stands for it then."""
    names = dict.fromkeys(row[0].text for row in table.rows)
    numbers = {name: number for number, name in enumerate(names, 1)}
    longest = max(map(len, numbers), default=0)
    if longest <= _MOST_LINES * _widths(table, console.width)[0]:
        console.print(_table(table, console.width))
        return
    rows = [[Cell(str(numbers[row[0].text])), *row[1:]] for row in table.rows]
    console.print(_table(Table(table.title, table.columns, rows), console.width))
    for name, number in numbers.items():
        console.print(Text(f"{number}: {name}"))


def _table(table: Table, width: int) -> RichTable:
    """Words are broken only as far as the table would not fit otherwise (rich's widths cut columns off)."""
    drawn = RichTable(
        title=Text(table.title),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for i, (column, wide) in enumerate(zip(table.columns, _widths(table, width), strict=True)):
        justify: Literal["left", "right"] = "right" if table.is_numeric(i) else "left"
        drawn.add_column(Text(column), justify=justify, overflow="fold", width=wide)
    for row in table.rows:
        drawn.add_row(*map(_text, row))
    return drawn


def _widths(table: Table, width: int) -> list[int]:
    """Of the columns, so that all are seen; what is left over goes where the most text is folded."""
    full, words = [], []
    for i, column in enumerate(table.columns):
        texts = [column, *(row[i].text for row in table.rows)]
        full.append(max(map(len, texts)))
        words.append(max(len(word) for text in texts for word in text.split()))
    room = width - 2 * len(full)  # two spaces between columns
    fitting = ([min(length, cap) for length in words] for cap in range(_LONGEST_WORD, 0, -1))
    widths = next((each for each in fitting if sum(each) <= room), [1] * len(full))
    for _ in range(room - sum(widths)):
        folded = max(range(len(full)), key=lambda i: full[i] / widths[i])
        widths[folded] += widths[folded] < full[folded]
    return widths


def _text(cell: Cell) -> Text:
    return Text(cell.text, style=_STYLES[cell.mark])
