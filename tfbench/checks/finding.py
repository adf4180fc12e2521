"""What a check of the doctor says."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Literal

from tfbench.checks.facts import Card

Level = Literal["ok", "unknown", "warning", "problem"]
LEVELS: tuple[Level, ...] = ("ok", "unknown", "warning", "problem")  # the worse the later
Verdict = tuple[Level, str, str]  # level, evidence, fix


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: Of the check.
        level: ok; unknown: could not be looked at; warning: makes runs slower or less certain; problem.
        evidence: What was seen, with units.
        fix: What to do about it; "" where nothing is to be done.
    """

    name: str
    level: Level
    evidence: str
    fix: str = ""


def worst(levels: Iterable[Level]) -> Level:
    """The worst of some levels; ok if there are none."""
    return max(levels, key=LEVELS.index, default="ok")


def of_cards(name: str, cards: tuple[Card, ...], judge: Callable[[Card], Verdict]) -> Finding:
    """One finding from a verdict on every card: the worst level, cards that say the same named together."""
    if not cards:
        return Finding(name, "unknown", "no GPU is visible")
    verdicts: dict[Verdict, list[str]] = {}
    for ordinal, card in enumerate(cards):
        verdicts.setdefault(judge(card), []).append(str(ordinal))
    level = worst(verdict[0] for verdict in verdicts)
    ordered = sorted(verdicts.items(), key=lambda item: -LEVELS.index(item[0][0]))
    evidence = "; ".join(f"GPU {', '.join(gpus)}: {said}" for (_, said, _), gpus in ordered)
    fixes = dict.fromkeys(fix for (its_level, _, fix), _ in ordered if fix and its_level == level)
    return Finding(name, level, evidence, "; ".join(fixes))
