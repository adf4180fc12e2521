"""How many GPUs the measured input feeds, and what limits it. TensorFlow-free."""

import dataclasses
from collections.abc import Mapping, Sequence

from tfbench.config import BenchmarkConfig
from tfbench.display import interval
from tfbench.inputbench.drain import Drained
from tfbench.records import RunRecord

# Of the usable cores. With fewer busy, by any process, not computing but something else is the limit.
BUSY_SHARE = 0.8
# Of the usable cores. With more busy by others, the input would be faster alone.
OTHERS_SHARE = 0.1
# Of a core. A thread that is busier hardly waits, so what runs in it is the limit.
THREAD_SHARE = 0.9


@dataclasses.dataclass(frozen=True)
class GpuRate:
    """What one GPU takes."""

    samples_per_sec: float
    source: str  # where the figure is from


def newest_rate(rows: Sequence[RunRecord], config: BenchmarkConfig) -> GpuRate | None:
    """Rate of a GPU in the newest good run of the model and sample size with synthetic data; None: no run."""
    alike = [
        row
        for row in rows
        if row.status == "ok"
        and row.data == "synthetic"
        and row.samples_per_sec_per_gpu
        and (row.model, row.image_size, row.seq_length)
        == (config.model, config.image_size, config.seq_length)
    ]
    if not alike:
        return None
    newest = max(alike, key=lambda row: row.started_at or "")
    assert newest.samples_per_sec_per_gpu is not None
    source = f"run {newest.run_id}: {newest.precision}, batch {newest.per_replica_batch_size}"
    return GpuRate(newest.samples_per_sec_per_gpu, f"{source} on {newest.gpu_name}")


def gpus_fed(drained: Drained, rate: GpuRate) -> dict[str, float | str | None]:
    """Columns of the row."""
    low, high = drained.interval
    each = rate.samples_per_sec
    return {
        "gpu_rate": each,
        "gpu_rate_source": rate.source,
        "gpus_fed": drained.samples_per_sec / each,
        "gpus_fed_low": None if low is None else low / each,
        "gpus_fed_high": None if high is None else high / each,
    }


def verdict(drained: Drained, cpu_cores: int, rate: GpuRate | None) -> str:
    """The answer in one sentence."""
    low, high = drained.interval
    ends = "" if low is None else f" (95 %: {interval(low, high)})"
    answer = (
        f"This host delivers {drained.samples_per_sec:,.0f} samples/s{ends} with {drained.cores_busy:.1f} of "
        f"{cpu_cores} cores busy"
    )
    if rate is None:
        return f"{answer}."
    fed, each = drained.samples_per_sec / rate.samples_per_sec, f"{rate.samples_per_sec:,.0f} samples/s"
    low, high = (None if end is None else end / rate.samples_per_sec for end in (low, high))
    if fed < 1:
        ends = "" if low is None else f", 95 %: {interval(low, high, 2)}"
        return f"{answer}: too little for one GPU of {each} ({fed:.2f} of it{ends}; {rate.source})."
    ends = "" if low is None else f" (95 %: {interval(low, high, 1)})"
    return f"{answer}: enough for {fed:,.1f} GPUs{ends} of {each} each ({rate.source})."


def limit(whole: Drained, stages: Mapping[str, Drained], cpu_cores: int) -> str:
    """Where to look for more samples/s.

    Args:
        whole: the input as the replicas get it.
        stages: as for `cost_of_each`.
        cpu_cores: that the process may use.
    """
    others = whole.cores_busy_by_others
    idle = cpu_cores - whole.cores_busy - others
    if idle > (1 - BUSY_SHARE) * cpu_cores:
        busiest = whole.busiest_thread
        limits = "storage, a stage in one thread or copies to the devices are"
        if busiest is not None and busiest > THREAD_SHARE:
            limits = f"a stage in one thread is, which uses {busiest:.0%} of a core"
        elif busiest is not None:
            limits = (
                "storage, copies to the devices or threads that wait for each other are, for none uses more "
                f"than {busiest:.0%} of a core"
            )
        return f"{idle:.1f} of {cpu_cores} cores are idle, so computing is not the limit: {limits}."
    much = others > OTHERS_SHARE * cpu_cores
    taken = f" ({others:.1f} of them are taken by other processes)" if much else ""
    sentence = f"The cores are the limit{taken}: a sample takes {whole.cpu_us_per_sample:,.1f} µs of CPU time"
    name, cost = max(cost_of_each(stages).items(), key=lambda item: item[1])
    if len(stages) == 1:
        return f"{sentence}."
    return f"{sentence}. The stage that takes most is '{name}', about {cost:,.1f} µs."


def cost_of_each(stages: Mapping[str, Drained]) -> dict[str, float]:
    """CPU µs a sample that each stage adds to those before it; noise can make a cheap one negative.

    Args:
        stages: figures of each stage with all before it, in their order, the whole input at the end.
    """
    costs, before = {}, 0.0
    for name, drained in stages.items():
        costs[name] = drained.cpu_us_per_sample - before
        before = drained.cpu_us_per_sample
    return costs
