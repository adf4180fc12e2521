"""How fast do replicas sum their gradients, and by which algorithm?

    python experiments/all_reduce.py --gpus=2

MirroredStrategy's all-reduce of messages of growing size, outside XLA, cut into 16 tensors as gradients come:
NCCL, hierarchical copy and reduction to one device, the first two with 0, 1 and 2 packs. Bus bandwidth is
2 (n - 1) / n × bytes ÷ time, which on a ring is what each link carries.
"""

from typing import Any

from absl import flags

from tfbench import study
from tfbench.config import ConfigError

ON_GPU: dict[str, Any] = {}
ON_CPU = {"gpus": "0"}
HEADER = ("wire", "algorithm", "message, MiB", "status", "ms", "bus bandwidth, GB/s")
TENSORS = 16  # that a message is cut into
CPU_REPLICAS = 2

MIB = flags.DEFINE_list("mib", None, "Sizes of a message. Default: 1,16,128,512 on GPUs, 0.25,1 not.")


def bus_gb_per_s(message_bytes: float, replicas: int, sums_per_s: float) -> float:
    """NCCL's definition for an all-reduce, 10⁹ bytes/s."""
    return 2 * (replicas - 1) / replicas * message_bytes * sums_per_s / 1e9


def algorithms(on_gpu: bool) -> dict[str, Any]:
    """By name and packs; NCCL needs GPUs."""
    import tensorflow as tf

    packed = {"hierarchical copy": tf.distribute.HierarchicalCopyAllReduce}
    if on_gpu:
        packed = {"nccl": tf.distribute.NcclAllReduce, **packed}
    by_name = {f"{name}, {n} packs": kind(num_packs=n) for name, kind in packed.items() for n in (0, 1, 2)}
    return {**by_name, "to one device": tf.distribute.ReductionToOneDevice()}


def sum_rate(devices: list[str], algorithm: Any, message_bytes: float, dtype: str) -> study.Estimate:
    """All-reduces/s.

    Raises:
        ArithmeticError: a sum is wrong.
    """
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy(devices, cross_device_ops=algorithm)
    length = max(1, round(message_bytes / TENSORS / tf.as_dtype(dtype).size))

    messages = [
        strategy.experimental_distribute_values_from_function(
            lambda context: tf.fill([length], tf.cast(context.replica_id_in_sync_group + 1, dtype))
        )
        for _ in range(TENSORS)
    ]

    def replica(*tensors: Any) -> list[Any]:
        placed = [tf.identity(tensor) for tensor in tensors]  # an argument has no device, which NCCL asks for
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, placed)

    run = tf.function(lambda *tensors: strategy.run(replica, args=tensors))
    expected = len(devices) * (len(devices) + 1) // 2
    for tensor in run(*messages):
        for local in strategy.experimental_local_results(tensor):
            if not bool(tf.reduce_all(local == tf.cast(expected, dtype))):
                raise ArithmeticError(f"a sum is {local[0]}, not {expected}")
    return study.timed(lambda: run(*messages), windows=5)


def main(argv: list[str]) -> int:
    """Time every algorithm at every size and wire precision."""
    experiment = study.Experiment("all_reduce", ON_GPU, ON_CPU)
    devices = experiment.open_devices(CPU_REPLICAS)
    if len(devices) < 2:
        raise ConfigError("gpus", len(devices), "2 or more to sum over; 0: logical CPU devices")
    sizes = study.numbers(MIB, (1, 16, 128, 512) if experiment.on_gpu else (0.25, 1))
    lines, curves = [], {"float32": {}, "float16": {}}
    for wire, by_name in curves.items():
        for name, algorithm in algorithms(experiment.on_gpu).items():
            by_name[name] = []
            for mib in sizes:
                try:
                    rate, status = sum_rate(devices, algorithm, mib * 2**20, wire), "ok"
                except Exception as error:  # whatever it is, it is shown, and the other algorithms go on
                    rate, status = None, f"{type(error).__name__}: {error}".splitlines()[0][:100]
                bus = rate and rate.times(bus_gb_per_s(mib * 2**20, len(devices), 1.0))
                by_name[name].append((mib, bus))
                lines.append((wire, name, mib, status, rate and 1e3 / rate.value, bus))
    figure, panels = study.canvas(f"All-reduce over {', '.join(devices)}", len(curves))
    for axes, (wire, by_name) in zip(panels, curves.items(), strict=True):
        study.draw_lines(axes, f"message, MiB of {wire}", "bus bandwidth, GB/s", by_name)
    largest = [line for line in lines if line[2] == sizes[-1] and line[5]]
    best = max(largest, key=lambda line: line[5].value, default=None)
    answer = (
        f"At {sizes[-1]:g} MiB the fastest is {best[1]} in {best[0]}: {study.spoken(best[5], 'GB/s')}."
        if best
        else ""
    )
    return experiment.finish(HEADER, lines, answer or "Nothing ran: see the statuses.", figure)


if __name__ == "__main__":
    study.start(main)
