"""Prices of GPUs, from a file that the user keeps: tfbench knows none."""

import csv
import dataclasses
import datetime
import math
import os
import re
from collections.abc import Mapping

from tfbench.hardware import specs

COLUMNS = ("card", "currency", "price_per_hour", "source", "date")


class CostError(ValueError):
    """Why costs cannot be computed: the message names the line or flag and what is accepted."""


@dataclasses.dataclass(frozen=True)
class Price:
    """What one GPU costs."""

    card: str  # short name of specs.csv, or as NVML calls it
    currency: str  # ISO 4217
    per_hour: float  # of one GPU
    source: str
    date: str  # of the price, ISO 8601


@dataclasses.dataclass(frozen=True)
class Prices:
    """The prices of one file, all in one currency."""

    file: str
    currency: str
    by_card: Mapping[str, Price]  # card in lower case → price

    def of(self, gpu_name: str | None) -> Price | None:
        """Price of the card that NVML calls so, by that name or else by its short one; None where unknown."""
        spec = specs.find(gpu_name)
        names = [name.lower() for name in (gpu_name, spec.gpu if spec else None) if name]
        return next((self.by_card[name] for name in names if name in self.by_card), None)


def read(path: str | os.PathLike[str]) -> Prices:
    """Reads a file of prices.

    Raises:
        CostError: it holds no prices, or a line that is none; the message names the line.
        OSError: it cannot be read.
    """
    by_card: dict[str, Price] = {}
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:  # spreadsheets begin files with a mark
            reader = csv.DictReader(file, strict=True)
            if sorted(reader.fieldnames or ()) != sorted(COLUMNS):
                raise CostError(
                    f"{path}, line 1: the columns are {','.join(COLUMNS)}, but here are "
                    f"{','.join(reader.fieldnames or ()) or 'none'}"
                )
            for cells in reader:
                price = _price(f"{path}, line {reader.line_num}", cells)
                if price.card.lower() in by_card:
                    raise CostError(f"{path}, line {reader.line_num}: a second price of {price.card}")
                by_card[price.card.lower()] = price
    except (UnicodeDecodeError, csv.Error) as error:
        raise CostError(f"{path} is no CSV file in UTF-8: {error}") from error
    currencies = sorted({price.currency for price in by_card.values()})
    if len(currencies) != 1:
        found = " and ".join(currencies) or "no price"
        raise CostError(f"{path}: {found}; prices must be there, all in one currency to be compared")
    return Prices(os.fspath(path), currencies[0], by_card)


def _price(where: str, cells: Mapping[str | None, str | list[str] | None]) -> Price:
    """The price of one line.

    Raises:
        CostError: a cell is missing, too many or not what its column takes.
    """
    texts = {name: cell.strip() for name, cell in cells.items() if name and isinstance(cell, str)}
    if None in cells or len(texts) != len(COLUMNS) or not all(texts.values()):
        raise CostError(f"{where}: each of {','.join(COLUMNS)} needs one value")
    if not re.fullmatch("[A-Z]{3}", texts["currency"]):
        raise CostError(f"{where}: currency={texts['currency']}: three capital letters, such as USD")
    try:
        per_hour = float(texts["price_per_hour"])
    except ValueError:
        per_hour = math.nan
    if not 0 < per_hour < math.inf:
        raise CostError(
            f"{where}: price_per_hour={texts['price_per_hour']}: a number above 0, such as 2.50, for one GPU"
        )
    try:
        datetime.date.fromisoformat(texts["date"])
    except ValueError as error:
        raise CostError(f"{where}: date={texts['date']}: the day of the price as YYYY-MM-DD") from error
    return Price(texts["card"], texts["currency"], per_hour, texts["source"], texts["date"])
