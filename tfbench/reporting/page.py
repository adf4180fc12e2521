"""A report as one HTML file: no script, nothing loaded, light and dark as the reader's system has it."""

from collections.abc import Sequence
from html import escape
from importlib import resources

from tfbench.reporting import svg
from tfbench.reporting.document import Cell, Chart, Report, Section, Table

# What a browser may load for the page, whatever texts of rows are in it: nothing but its own style and icon.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def render(report: Report) -> str:
    """The whole page."""
    style = resources.files("tfbench.reporting").joinpath("page.css").read_text(encoding="utf-8")
    links = "".join(
        f'<li><a href="#{section.key}">{escape(section.title)}</a></li>' for section in report.sections
    )
    lead = "".join(f"<p>{escape(sentence)}</p>" for sentence in report.lead)
    body = "\n".join(_section(section) for section in report.sections)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(report.title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f"<header><h1>{escape(report.title)}</h1>{lead}</header>\n"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n'
        f"<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _section(section: Section) -> str:
    head = f'<section id="{section.key}" aria-labelledby="{section.key}-title">'
    head += f'<h2 id="{section.key}-title">{escape(section.title)}</h2>'
    if section.missing:
        return f'{head}<p class="missing">{escape(section.missing)}</p></section>'
    charts = "".join(_figure(chart) for chart in section.charts)
    tables = "".join(_table(table) for table in section.tables)
    intro = f"<p>{escape(section.intro)}</p>" if section.intro else ""
    return f'{head}{intro}<div class="charts">{charts}</div>\n{tables}</section>'


def _figure(chart: Chart) -> str:
    """A picture with its caption and, where colours mean something, what they mean."""
    items = "".join(
        f'<li><svg viewBox="0 0 24 10" aria-hidden="true"><path d="M0 5H24" '
        f'class="l l{colour} key{" dashed" if dashed else ""}"/></svg>{escape(name)}</li>'
        for colour, dashed, name in svg.legend(chart)
    )
    names = f'<ul class="legend">{items}</ul>' if items else ""
    caption = f"<figcaption><b>{escape(chart.title)}</b><span>{escape(chart.unit)}</span></figcaption>"
    return f"<figure>{caption}{svg.draw(chart)}{names}</figure>"


def _table(table: Table) -> str:
    """A table that can be folded away. The roles say what it is where narrow screens stack its cells."""
    table = table.without_empty_columns()
    head = "".join(_heading(column, table.is_numeric(i)) for i, column in enumerate(table.columns))
    rows = "".join(_row(table.columns, row) for row in table.rows)
    return (
        f"<details open><summary>{escape(table.title)}</summary>"
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(table.title)}">'
        f'<table role="table" aria-label="{escape(table.title)}"><thead role="rowgroup">'
        f'<tr role="row">{head}</tr></thead><tbody role="rowgroup">{rows}</tbody></table></div></details>\n'
    )


def _heading(column: str, is_numeric: bool) -> str:
    css = ' class="number"' if is_numeric else ""
    return f'<th scope="col" role="columnheader"{css}>{escape(column)}</th>'


def _row(columns: Sequence[str], cells: Sequence[Cell]) -> str:
    first, *rest = zip(columns, cells, strict=True)
    name = first[1]
    title = f' title="{escape(name.hover)}"' if name.hover else ""
    heading = f'<th scope="row" role="rowheader"{title}>{escape(name.text)}</th>'
    return f'<tr role="row">{heading}{"".join(_cell(column, cell) for column, cell in rest)}</tr>'


def _cell(column: str, cell: Cell) -> str:
    """The value with all its digits is in the cell for machines, and shown to who points at it."""
    classes = " ".join(filter(None, ("number" if cell.value is not None else "", cell.mark)))
    text = escape(cell.text)
    if cell.value is not None:
        text = f'<data value="{cell.value!r}" title="{cell.value!r}">{text}</data>'
    empty = "" if cell.text else ' data-empty=""'
    css = f' class="{classes}"' if classes else ""
    return f'<td role="cell" data-label="{escape(column)}"{css}{empty}>{text}</td>'
