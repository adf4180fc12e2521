"""The cards of a run, before it and right after its windows, as columns of the row. TensorFlow-free."""

from collections.abc import Sequence
from typing import Any

import pynvml

from tfbench.hardware.cards import CardFacts, card_facts
from tfbench.hardware.gpus import Gpu


class CardWatch:
    """Reads the cards now, and again when told to.

    Args:
        gpus: The run's GPUs.
        nvml: The `pynvml` module, or what stands for it in a test.

    Attributes:
        before: Each card now.
        after: Each card when looked at again; empty until then.
    """

    def __init__(self, gpus: Sequence[Gpu], nvml: Any = pynvml):
        self._gpus, self._nvml = gpus, nvml
        self.before = self._read()
        self.after: list[CardFacts] = []

    def look_again(self) -> None:
        """Reads the cards once more: right after the windows, while links have not yet gone to sleep."""
        self.after = self._read()

    def columns(self) -> dict[str, Any]:
        """Columns of the row, see `columns`."""
        return columns(self.before, self.after)

    def _read(self) -> list[CardFacts]:
        return [card_facts(gpu, self._nvml) for gpu in self._gpus]


def columns(before: Sequence[CardFacts], after: Sequence[CardFacts]) -> dict[str, Any]:
    """Columns of the row that follow from the run's cards.

    Args:
        before: The cards before the run.
        after: The same cards, in the same order, right after the windows; empty where it did not come so far.

    Returns:
        Of several cards the lowest clock and limit, since the slowest card sets the pace; every different
        link, joined by "|"; the sum of the errors. What one card does not say is None for all.
    """
    latest = after or before
    return {
        "sm_clock_mhz_max": _least([card.sm_clock_mhz_max for card in latest]),
        "power_limit_w": _least([card.power_limit_w for card in latest]),
        "pcie_link": _pcie_link(after),
        "ecc_errors": _errors_between(before, after) if after else None,
    }


def _least(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return min(known) if known and len(known) == len(values) else None


def _pcie_link(cards: Sequence[CardFacts]) -> str | None:
    """Generation and lanes, such as "5x16"."""
    links = {(card.pcie_generation, card.pcie_width) for card in cards}
    if not links or any(None in link for link in links):
        return None
    return "|".join(sorted(f"{generation}x{width}" for generation, width in links))


def _errors_between(before: Sequence[CardFacts], after: Sequence[CardFacts]) -> int | None:
    total = 0
    for earlier, later in zip(before, after, strict=True):
        first, last = earlier.ecc_errors_uncorrected, later.ecc_errors_uncorrected
        if first is None or last is None or last < first:  # fewer: the card was reset in between
            return None
        total += last - first
    return total
