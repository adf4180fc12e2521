"""--scaling: the same training on 1, 2, 4, … replicas, each beside a run on one. TensorFlow-free."""

import dataclasses
import statistics as stdlib_statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tfbench import records
from tfbench.config import BenchmarkConfig, ConfigError
from tfbench.defaults import complete
from tfbench.display import Display
from tfbench.hardware.gpus import Machine
from tfbench.records import RunRecord
from tfbench.sweeping import plan
from tfbench.sweeping.matrix import ImpossiblePointsError, Matrix, Point, choices_of, combinations

_HEADER = (
    "point", "samples/s", "per replica", "efficiency", "95 %", "exposed all-reduce, ms", "GPUs", "link",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Study:
    """One configuration at several numbers of replicas, the single one first."""

    points: tuple[Point, ...]


def replica_counts(gpus: str | None, cpu_replicas: int, machine: Machine) -> list[int]:
    """Numbers of replicas: those listed, or 1, 2, 4, … up to the number given and it as well.

    Args:
        gpus: --gpus, also as a list such as "1,2,8"; "0": the CPU, as `cpu_replicas` logical devices.
        cpu_replicas: of the largest run on the CPU.
        machine: the devices that are there.

    Raises:
        ConfigError: not numbers, or no two of them.
    """
    words = (gpus or "auto").split(",")
    if words == ["auto"]:
        words = [f"{len(machine.gpus)}"]
    if not all(word.strip().isdecimal() for word in words):
        raise ConfigError("gpus", gpus, "auto, a whole number, or with --scaling a list such as 1,2,4")
    counts = sorted({int(word) for word in words})
    on_cpu = counts == [0]
    if len(counts) == 1:
        most = cpu_replicas if on_cpu else counts[0]
        counts = sorted({2**power for power in range(most.bit_length()) if 2**power <= most} | {most})
    if 0 in counts or len({1, *counts}) < 2:
        flag, value = ("cpu_replicas", cpu_replicas) if on_cpu else ("gpus", gpus)
        raise ConfigError(
            flag, value, "--scaling needs at least 2 replicas: --gpus=0 --cpu_replicas=2, or GPUs"
        )
    return sorted({1, *counts})


def studies(
    base: Mapping[str, Any], matrix: Matrix, mode: str, machine: Machine
) -> tuple[list[Study], list[str]]:
    """Complete and check every point before anything runs.

    Args:
        base: the choices that all points share; `gpus` may be a list; without a choice of `diagnose` all but
            the single replicas are diagnosed.
        matrix: what is swept besides; may be empty.
        mode: "weak": each replica's batch stays; "strong": the global batch stays that of one replica.
        machine: the devices that are there.

    Returns:
        A study for each combination of the matrix, and sentences for the user, each once.

    Raises:
        ConfigError: no two numbers of replicas.
        ImpossiblePointsError: points that this machine, model or data rules out, or whose batch cannot be
            divided.
    """
    counts = replica_counts(base.get("gpus"), base.get("cpu_replicas") or 1, machine)
    made, problems, sentences = [], [], dict[str, None]()
    for combination in combinations(matrix):
        shared = dict(base) | choices_of(combination) | {"scaling_mode": mode}
        points: list[Point] = []
        for count in counts:
            name = " ".join([*(f"{k}={v}" for k, v in combination.items()), f"replicas={count}"])
            try:
                single = points[0].config if points else None
                config, said = complete(_choices(shared, count, single), machine)
            except ConfigError as error:
                problems.append((name, f"{error}"))
                continue
            points.append(Point(name, config))
            sentences |= dict.fromkeys(said)
        made.append(Study(tuple(points)))
    if problems:
        raise ImpossiblePointsError(problems)
    return made, list(sentences)


def _choices(shared: Mapping[str, Any], count: int, single: BenchmarkConfig | None) -> dict[str, Any]:
    """The choices of a study for `count` replicas.

    Args:
        shared: by the whole study.
        count: of the replicas.
        single: the configuration of one replica, once it is complete.

    Raises:
        ConfigError: its batch cannot be dealt out.
    """
    devices = {"gpus": 0, "cpu_replicas": count} if shared.get("gpus") == "0" else {"gpus": count}
    chosen = dict(shared) | devices
    if chosen.get("diagnose") is None:
        chosen["diagnose"] = count > 1
    if single is not None:
        strong = chosen["scaling_mode"] == "strong"
        batch = single.per_replica_batch_size
        chosen["per_replica_batch_size"] = share(batch, count) if strong else batch
    return chosen


def share(batch: int, count: int) -> int:
    """The batch of a replica of `count`, that all have the samples of a single one.

    Raises:
        ConfigError: they cannot be dealt out evenly.
    """
    if batch % count:
        accepted = f"for strong scaling a multiple of {count}, to be dealt out to {count} replicas"
        raise ConfigError("per_replica_batch_size", batch, accepted)
    return batch // count


def show(study: Study, rows: Sequence[RunRecord], mode: str, display: Display) -> None:
    """The study's table."""
    display.grid(f"{mode} scaling", _HEADER, [line(study, point, rows) for point in study.points])
    if not study.points[0].config.gpus:
        display.say("Replicas on a CPU share its cores: their efficiency says nothing of GPUs.")


def line(study: Study, point: Point, rows: Sequence[RunRecord]) -> tuple[str, ...]:
    """One number of replicas, in the columns of `_HEADER`.

    Rows count as for `records.find_baseline`: of runs that were alone, of one replica only on cards of the
    newest run on several.
    """
    own = _ok(point, rows)
    if not own:
        return (point.name, *[""] * (len(_HEADER) - 1))
    newest, count = own[-1], point.config.num_replicas
    own = [row for row in own if row.gpu_uuids == newest.gpu_uuids]
    single = [row for row in _ok(study.points[0], rows) if records.on_its_cards(row, newest)]
    rate = _mean(own)
    shown = [f"{rate:,.1f}", f"{rate / count:,.1f}", "", ""]
    if single and count > 1:
        shown[2] = f"{100 * rate / count / _mean(single):.1f} %"
        shown[3] = _interval(own, single, count)
    exposed = [row.exposed_communication_ms for row in own if row.exposed_communication_ms is not None]
    exposed_ms = f"{stdlib_statistics.fmean(exposed):.2f}" if exposed else ""
    return (point.name, *shown, exposed_ms, newest.gpu_indices or "", newest.topology or "")


def _ok(point: Point, rows: Sequence[RunRecord]) -> list[RunRecord]:
    alone = plan.rows_of(point.config, rows, beside=False)
    return [row for row in alone if row.status == "ok" and row.samples_per_sec]


def _mean(rows: Sequence[RunRecord]) -> float:
    return stdlib_statistics.fmean(row.samples_per_sec for row in rows if row.samples_per_sec)


def _interval(own: Sequence[RunRecord], single: Sequence[RunRecord], count: int) -> str:
    """Of the efficiency, in percent; "" where the runs have no interval."""
    from tfbench.measure import statistics  # brings SciPy: a sweep that is refused does without

    ends = [rate_of_runs(own), rate_of_runs(single)]
    if None in ends:
        return ""
    low, high = statistics.ratio_interval(*filter(None, ends))
    return f"{100 * low / count:.1f} to {100 * high / count:.1f}"


def rate_of_runs(rows: Sequence[RunRecord]) -> tuple[float, float, float] | None:
    """Mean rate of runs of one configuration with the 95 % interval over runs; None where there is none."""
    from tfbench.measure import statistics

    rates = [row.samples_per_sec for row in rows if row.samples_per_sec is not None]
    ends = [(row.samples_per_sec_low, row.samples_per_sec_high) for row in rows]
    found = statistics.interval_over_runs(rates, ends)
    return None if found is None else (stdlib_statistics.fmean(rates), *found)
