"""What the doctor tries with TensorFlow, in a process of its own that may crash or hang.

Every finished stage is one line on standard output, so that a later crash costs only the later stages.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

PREFIX = "tfbench.doctor: "
STAGES = ("import", "devices", "product", "all_reduce", "libraries", "load")

CPU = "CPU:0"  # stands in where there is no GPU

LOAD_SIZE = 8192  # of the square products: large enough to fill any card
LOAD_PRODUCTS = 20  # queued between two looks at the clock: 30 ms of an H200, half a second of a T4
LEAST_LOAD_S = 3.0  # less shows no clock or temperature that lasts
_AFTER_LOAD_S = 3.0  # for the last products and the end of the process
_ELEMENTS = 2**18  # of the checked all-reduce: 1 MB, so that it takes the path of real gradients


def tell(stage: str, facts: dict[str, Any]) -> None:
    """One line to the parent, by itself even where a library has written without an end of line."""
    print("\n" + PREFIX + json.dumps({"stage": stage, **facts}), flush=True)


def import_tensorflow() -> dict[str, Any]:
    """Version and build of TensorFlow."""
    import tensorflow as tf

    build = tf.sysconfig.get_build_info()
    return {
        "version": tf.__version__,
        "is_cuda_build": bool(build.get("is_cuda_build")),
        "cuda": build.get("cuda_version"),
        "cudnn": build.get("cudnn_version"),
        "compute_capabilities": list(build.get("cuda_compute_capabilities", [])),
    }


def find_devices() -> dict[str, Any]:
    """GPUs that TensorFlow opens; it takes of their memory only what it needs."""
    import tensorflow as tf

    found = tf.config.list_physical_devices("GPU")
    for gpu in found:
        tf.config.experimental.set_memory_growth(gpu, True)
    return {"gpus": len(found)}


def gpus() -> list[str]:
    """TensorFlow's names of its GPUs."""
    import tensorflow as tf

    return [f"GPU:{index}" for index in range(len(tf.config.list_physical_devices("GPU")))]


def compile_product() -> dict[str, Any]:
    """A product and functions of libdevice, compiled by XLA on every device; the sum is known: 4096."""
    import tensorflow as tf

    def sum_of(ones: Any) -> Any:
        product = tf.matmul(ones, ones)  # 64 everywhere
        return tf.reduce_sum(tf.math.expm1(product - 64.0) + tf.pow(product / 64.0, 1.5))

    total = tf.function(sum_of, jit_compile=True)
    sums = {}
    for device in gpus() or [CPU]:
        with tf.device(device):
            sums[device] = float(total(tf.ones((64, 64))))
    return {"sums": sums, "expected": 4096.0}


def find_libraries() -> dict[str, Any]:
    """Versions of the CUDA libraries that are loaded by now."""
    from tfbench.devices import library_versions

    return dict(library_versions())


def all_reduce() -> dict[str, Any]:
    """Replica r gives (r + 1) × v; every replica must get v × n(n + 1)/2, exactly."""
    import tensorflow as tf

    from tfbench.devices import build_strategy

    strategy = build_strategy(gpus() or [CPU])
    values = tf.cast(tf.range(_ELEMENTS) % 1024, tf.float32)  # small integers: their sums are exact

    def replica() -> Any:
        context = tf.distribute.get_replica_context()
        mine = values * tf.cast(context.replica_id_in_sync_group + 1, tf.float32)
        return context.all_reduce(tf.distribute.ReduceOp.SUM, mine)

    replicas = strategy.num_replicas_in_sync
    sums = strategy.experimental_local_results(tf.function(lambda: strategy.run(replica))())
    expected = values * (replicas * (replicas + 1) / 2)
    wrong = [index for index, got in enumerate(sums) if not bool(tf.reduce_all(got == expected))]
    return {"replicas": replicas, "results": len(sums), "wrong": wrong}


def load(load_s: float, deadline_s: float) -> dict[str, Any]:
    """Matrix products in float16 on all GPUs at once, for `load_s` seconds or what is left of the time.

    Tells "load_begins" and, halfway, "load_half".

    Args:
        load_s: Seconds; 0: none.
        deadline_s: Time on the monotonic clock when this process must have ended.
    """
    devices = gpus()
    if not devices or load_s == 0:
        return {"tflops": []}
    run, operands = _chain(devices)
    load_s = min(load_s, deadline_s - time.monotonic() - _AFTER_LOAD_S)
    if load_s < LEAST_LOAD_S:
        raise TimeoutError("no time was left for it")
    start_s = time.monotonic()
    tell("load_begins", {})
    half_told = False
    while (now_s := time.monotonic()) < start_s + load_s:
        if not half_told and now_s > start_s + load_s / 2:
            tell("load_half", {})
            half_told = True
        run(operands)
    end_s = time.monotonic()
    return {"start_s": start_s, "end_s": end_s, "tflops": _alone_tflops(run, operands)}


def _chain(devices: list[str]) -> tuple[Callable[..., None], dict[str, Any]]:
    """A function that lets devices multiply and waits for them, called once; and operands of each device."""
    import tensorflow as tf

    from tfbench.devices import synchronize

    def multiply(left: Any, right: Any) -> Any:
        for _ in tf.range(LOAD_PRODUCTS):
            right = tf.matmul(left, right)
        return right

    chain = tf.function(multiply)

    def run(operands: dict[str, Any]) -> None:
        for device, (left, right) in operands.items():
            with tf.device(device):
                chain(left, right)
        synchronize()

    operands = {}
    for device in devices:
        with tf.device(device):
            # Rows scaled so that a product of any length stays standard normal: zeros need less power.
            left = tf.random.stateless_normal((LOAD_SIZE, LOAD_SIZE), (0, 1)) / LOAD_SIZE**0.5
            right = tf.random.stateless_normal((LOAD_SIZE, LOAD_SIZE), (2, 3))
            operands[device] = tf.cast(left, tf.float16), tf.cast(right, tf.float16)
    run(operands)
    return run, operands


def _alone_tflops(run: Callable[..., None], operands: dict[str, Any]) -> list[float]:
    """The rate of each warm card, one after the other, so that one slow card is not all cards' rate."""
    rates = []
    for device, pair in operands.items():
        start_s = time.monotonic()
        run({device: pair})
        rates.append(LOAD_PRODUCTS * 2 * LOAD_SIZE**3 / (time.monotonic() - start_s) / 1e12)
    return rates


def main(load_s: float, deadline_s: float) -> None:
    """All stages in turn. One that fails says why; nothing can follow a failed import."""
    # Spelt out, because mypy 2.4 finds the type of such a tuple by itself in three runs of four only.
    stages: tuple[Callable[[], dict[str, Any]], ...] = (
        import_tensorflow, find_devices, compile_product, all_reduce, find_libraries,
        lambda: load(load_s, deadline_s),
    )  # fmt: skip
    steps = dict(zip(STAGES, stages, strict=True))
    for name, step in steps.items():
        try:
            tell(name, step())
        except Exception as error:  # whatever a library raises is what the parent wants to know
            tell(name, {"error": f"{type(error).__name__}: {error}"})
            if name == "import":
                return


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]))
