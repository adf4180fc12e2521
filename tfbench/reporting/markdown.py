"""A report as Markdown: its sentences and tables."""

from tfbench.reporting.document import Cell, Report, Section, Table


def render(report: Report) -> str:
    """The whole text."""
    head = [f"# {report.title}", *map(_escape, report.lead)]
    return "\n\n".join([*head, *(_section(section) for section in report.sections)]) + "\n"


def _section(section: Section) -> str:
    said = section.missing or section.intro
    parts = [f"## {section.title}", *([_escape(said)] if said else []), *map(_table, section.tables)]
    return "\n\n".join(parts)


def _table(table: Table) -> str:
    table = table.without_empty_columns()
    lines = [
        _line([_escape(column) for column in table.columns]),
        _line(["---:" if table.is_numeric(i) else "---" for i in range(len(table.columns))]),
        *(_line([_cell(cell) for cell in row]) for row in table.rows),
    ]
    return f"**{_escape(table.title)}**\n\n" + "\n".join(lines)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Cell) -> str:
    return f"**{_escape(cell.text)}**" if cell.mark and cell.text else _escape(cell.text)


def _escape(text: str) -> str:
    """So that notes and file names are shown as they are."""
    for character in "\\`*_[]<>|":
        text = text.replace(character, "\\" + character)
    return " ".join(text.split())
