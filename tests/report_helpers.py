"""Made-up rows for the tests of the report, and a reader of its page."""

import dataclasses
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from tfbench import records
from tfbench.records import RunRecord
from tfbench.reporting.document import Section

VOID = {"meta", "link", "br", "hr", "img", "input"}  # elements of HTML that have no end


def row(**fields: Any) -> RunRecord:
    """A good row of ResNet-50 on one H200, 1000 samples/s ± 10, unless told otherwise."""
    rate = fields.get("samples_per_sec", 1000.0)
    good: dict[str, Any] = {
        "run_id": f"run-{fields.get('started_at', '')}-{rate}",
        "run_key": "key",
        "started_at": "2026-01-01T10:00:00.000+00:00",
        "status": "ok",
        "model": "resnet50",
        "image_size": 224,
        "data": "synthetic",
        "precision": "mixed_float16",
        "xla": True,
        "scaling_mode": "weak",
        "num_gpus": 1,
        "num_replicas": 1,
        "per_replica_batch_size": 256,
        "accumulate": 1,
        "optimizer": "sgd",
        "steps_per_loop": 10,
        "samples_per_sec": rate,
        "samples_per_sec_low": None if rate is None else rate - 10,
        "samples_per_sec_high": None if rate is None else rate + 10,
        "gpu_name": "NVIDIA H200",
        "driver": "580.1",
        "tensorflow": "2.21.0",
        "host": "left",
        "flags": "--model=resnet50",
    }
    return RunRecord(**good | fields)


def write(path: Path, rows: Iterable[RunRecord]) -> Path:
    """The rows as a results file."""
    for each in rows:
        records.append(path, each)
    return path


def cells(section: Section) -> list[dict[str, tuple[str, float | None]]]:
    """The rows of all tables of a section: column → (text, value)."""
    return [
        {column: (cell.text, cell.value) for column, cell in zip(table.columns, line, strict=True)}
        for table in section.tables
        for line in table.rows
    ]


@dataclasses.dataclass
class Element:
    """One element of a page, and all text inside it."""

    tag: str
    attributes: dict[str, str | None]
    section: str | None
    text: str = ""


class Page(HTMLParser):
    """Every element of a page, in order; refuses one whose ends do not match."""

    def __init__(self, html: str):
        super().__init__()
        self.elements: list[Element] = []
        self._open: list[Element] = []
        self.feed(html)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        inherited = self._open[-1].section if self._open else None
        element = Element(tag, attributes, attributes.get("id") if tag == "section" else inherited)
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data

    def all(self, tag: str, section: str | None = None) -> list[Element]:
        """Elements of one tag, of one section if named."""
        return [e for e in self.elements if e.tag == tag and section in (None, e.section)]
