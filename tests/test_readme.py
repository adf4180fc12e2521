"""README's tables are the code's and the committed rows'.

`PYTHONPATH=. python tests/test_readme.py` writes them anew.
"""

import datetime
import itertools
import re
from pathlib import Path

import pytest

from tfbench import records
from tfbench.records import RunRecord

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


# Of two runs of the same flags; other machines came later.
SITTING = datetime.timedelta(minutes=15)


def measured() -> str:
    """Rows of results/h200 for people: of each configuration the newest sitting, on all its cards."""
    lines = [
        "| model | GPUs | batch per GPU | LR warm-up | runs | samples/s | 95 % | step, ms "
        "| efficiency (95 %) | GPU utilisation | W per GPU | J per sample | MFU | peak memory, GiB "
        "| steps skipped |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    rows = [row for row in records.read(ROOT / "results" / "h200" / "runs.csv") if row.status == "ok"]
    rows.sort(key=lambda row: (row.model, row.seq_length or 0, row.per_replica_batch_size, row.num_gpus))
    repeats: dict[tuple[str, str], list[list[RunRecord]]] = {}
    for row in sorted(rows, key=lambda row: row.started_at):
        sittings = repeats.setdefault((row.run_key, row.environment), [[]])
        if sittings[-1] and _apart(sittings[-1][-1], row) > SITTING:
            sittings.append([])
        sittings[-1].append(row)
    newest: dict[tuple[object, ...], list[RunRecord]] = {}
    for group in sorted(itertools.chain(*repeats.values()), key=lambda group: rows.index(group[0])):
        long = lr_warmup(group[0]) == "10,000"
        what = (
            group[0].model,
            group[0].num_gpus,
            group[0].per_replica_batch_size,
            long,
            *shown_flags(group[0]),
        )
        newest[what] = max(newest.get(what, group), group, key=_without_flags_then_newest)
    return "\n".join(lines + [measured_line(group) for group in newest.values()])


def _without_flags_then_newest(group: list[RunRecord]) -> tuple[bool, str]:
    """XLA's flags of the user's own are trials."""
    return "XLA_FLAGS" not in (group[-1].environment or ""), group[-1].started_at


def _apart(before: RunRecord, after: RunRecord) -> datetime.timedelta:
    return datetime.datetime.fromisoformat(after.started_at) - datetime.datetime.fromisoformat(
        before.started_at
    )


def shown_flags(row: RunRecord) -> list[str]:
    """Of a run, those that a reader compares."""
    shown = ("--kernels=fused", "--seq_length=512", "--collectives=update", "--collectives=inside")
    return [flag for flag in shown if flag in row.flags]


def lr_warmup(row: RunRecord) -> str:
    """Steps in which the learning rate rose: how far the weights came."""
    return f"{int(re.search(r'--lr_warmup_steps=([0-9]+)', row.flags)[1]):,}"


def measured_line(repeats: list[RunRecord]) -> str:
    """The run of the median rate; of two the lower."""
    row = sorted(repeats, key=lambda row: row.samples_per_sec)[(len(repeats) - 1) // 2]
    skipped = [repeat.steps_skipped for repeat in repeats]
    cells = (
        row.model + "".join(f" `{flag}`" for flag in shown_flags(row)),
        row.num_gpus, row.per_replica_batch_size, lr_warmup(row), len(repeats),
        f"**{row.samples_per_sec:,.0f}**",
        f"{row.samples_per_sec_low:,.0f} to {row.samples_per_sec_high:,.0f}", f"{row.step_time_ms_mean:.1f}",
        efficiency(row), f"{row.gpu_util_mean:.0f} %", f"{row.power_w_mean:.0f}",
        f"{row.energy_j_per_sample:.3f}", f"{100 * row.mfu:.1f} %", f"{row.peak_memory_gib:.1f}",
        ", ".join(map(str, skipped)) if any(skipped) else 0,
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def efficiency(row: RunRecord) -> str:
    """Of the row's own mode; strong rows say so."""
    strong = row.scaling_mode == "strong"
    name = f"{row.scaling_mode}_scaling_efficiency"
    value, low, high = (getattr(row, f"{name}{end}") for end in ("", "_low", "_high"))
    if value is None:
        return ""
    ends = "" if low is None else f" ({100 * low:.1f} to {100 * high:.1f})"
    return f"{'strong: ' * strong}{100 * value:.1f} %{ends}"


TABLES = {"TABLE": measured, "COLUMNS": records.markdown_columns}


def section(name: str) -> re.Pattern[str]:
    """What stands between a table's two marks."""
    return re.compile(f"(<!-- {name} -->\n).*?(\n<!-- END {name} -->)", re.DOTALL)


@pytest.mark.parametrize("name", list(TABLES))
def test_table_is_up_to_date(name):
    found = section(name).search(README.read_text(encoding="utf-8"))
    assert found, f"README.md has no table {name}"
    expected = f"{found[1]}{TABLES[name]()}{found[2]}"
    assert found[0] == expected, "README.md is behind: PYTHONPATH=. python tests/test_readme.py"


if __name__ == "__main__":
    text = README.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        text = section(name).sub(lambda found, table=table: f"{found[1]}{table()}{found[2]}", text)
    README.write_text(text, encoding="utf-8")
