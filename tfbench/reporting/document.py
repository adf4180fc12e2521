"""What a report says, before it is known how it is shown."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

Mark = Literal["", "good", "warn", "bad"]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell of a table.

    Attributes:
        text: what is shown.
        value: the number behind the text with all its digits; None for words.
        mark: what the reader's eye should be drawn to; the text says the same in words.
        hover: what more the page says of a row's name when it is pointed at.
    """

    text: str
    value: float | None = None
    mark: Mark = ""
    hover: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows below named columns; the first cell of a row names it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def is_numeric(self, index: int) -> bool:
        """Whether a column holds numbers, which are set to the right."""
        return any(row[index].value is not None for row in self.rows)

    def without_empty_columns(self) -> "Table":
        """The same with only those columns that say something of a row."""
        kept = [i for i in range(len(self.columns)) if any(row[i].text for row in self.rows)]
        rows = [[row[i] for i in kept] for row in self.rows]
        return Table(self.title, [self.columns[i] for i in kept], rows)


@dataclasses.dataclass(frozen=True)
class Bar:
    """One bar, split into named parts where it has several; with the interval of its whole length."""

    label: str
    parts: Sequence[tuple[str, float]]  # name, length
    shown: str  # the number beside the label
    low: float | None = None
    high: float | None = None

    @property
    def length(self) -> float:
        """Of all parts together."""
        return math.fsum(length for _, length in self.parts)


@dataclasses.dataclass(frozen=True)
class BarChart:
    """Horizontal bars that start at 0."""

    title: str
    unit: str
    bars: Sequence[Bar]


@dataclasses.dataclass(frozen=True)
class Point:
    """One place on a line, with the interval of its height and what is said when it is pointed at."""

    x: float
    y: float
    hover: str
    low: float | None = None
    high: float | None = None


@dataclasses.dataclass(frozen=True)
class Line:
    """Points in the order of x. An ideal or a limit is dashed and has no dots."""

    name: str
    points: Sequence[Point]
    dashed: bool = False


@dataclasses.dataclass(frozen=True)
class LineChart:
    """Lines over one x axis.

    Attributes:
        title: what is shown.
        unit: of the heights.
        x_label: what x is, with its unit.
        lines: at least one, each with at least one point.
        doubling: equal steps along x are equal factors.
        from_zero: heights start at 0.
        spans: parts of x that are shaded.
        log_log: equal steps along both axes are equal factors, and powers of ten are named; all values are
            above 0.
        dots: each point is marked, can be pointed at by itself, and has its x named below; else x has round
            numbers, and a place in the picture says what every line is there.
    """

    title: str
    unit: str
    x_label: str
    lines: Sequence[Line]
    doubling: bool = False
    from_zero: bool = True
    spans: Sequence[tuple[float, float]] = ()
    dots: bool = True
    log_log: bool = False


Chart = BarChart | LineChart


@dataclasses.dataclass(frozen=True)
class Section:
    """One question and its answer.

    Attributes:
        key: name inside the page's address.
        title: heading.
        intro: how to read it.
        charts: pictures of what the tables hold.
        tables: every number.
        missing: where there are neither, which run would fill the section.
    """

    key: str
    title: str
    intro: str = ""
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    missing: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """A title, sentences on what was read, and the sections."""

    title: str
    lead: Sequence[str]
    sections: Sequence[Section]


def figure(value: float, digits: int = 4) -> str:
    """A number with so many significant digits, but whole above them: 12345.6 → 12,346."""
    if not math.isfinite(value):
        return str(value)
    magnitude = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{min(max(digits - 1 - magnitude, 0), 9)}f}"


def words(text: object, mark: Mark = "") -> Cell:
    """A cell of words; nothing for None."""
    return Cell("" if text is None else str(text), mark=mark)


def number(value: float | None, digits: int = 4, mark: Mark = "") -> Cell:
    """A cell of a number; nothing where it is unknown."""
    return Cell("") if value is None else Cell(figure(value, digits), value, mark)


def count(value: int | None) -> Cell:
    """A cell of a whole number; nothing where it is unknown."""
    return Cell("") if value is None else Cell(f"{value:,}", value)


def percent(share: float | None, digits: int = 1, mark: Mark = "") -> Cell:
    """A cell of a share as per cent, the share itself behind it; nothing where it is unknown."""
    return Cell("") if share is None else Cell(f"{100 * share:.{digits}f} %", share, mark)


def percent_interval(low: float | None, high: float | None) -> Cell:
    """A cell of both ends of a share's 95 % interval; nothing where there is none."""
    return Cell("" if low is None or high is None else f"{100 * low:.1f} to {100 * high:.1f} %")


def interval(low: float | None, high: float | None, digits: int = 4) -> Cell:
    """A cell of both ends of a 95 % interval; nothing where there is none."""
    if low is None:
        return Cell("")
    return Cell(f"{figure(low, digits)} to {'?' if high is None else figure(high, digits)}")
