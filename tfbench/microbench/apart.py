"""A product in a process of its own: XLA's compiler may crash on it, and takes other flags there.

`python -m tfbench.microbench.apart JSON` is the other process; its answer is the only line of its output.
Imports TensorFlow when something is measured.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from typing import Any

from tfbench.config import BenchmarkConfig
from tfbench.hardware.specs import GpuSpec
from tfbench.measure.timing import Window
from tfbench.microbench import matmul
from tfbench.microbench.case import NotPossibleError, Result

TIMEOUT_S = 120  # TensorFlow's start, XLA's tuning and the measuring
# With its Triton kernels among the candidates, TensorFlow 2.21's XLA crashed on FP8 products of an H200.
_XLA_FLAGS = "--xla_gpu_enable_triton_gemm=false"


def measure(
    device: str,
    precision: str,
    shape: matmul.Shape,
    engine: str,
    seconds: float,
    spec: GpuSpec | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Result:
    """As `matmul.measure`, in another process that uses no Triton kernels.

    Raises:
        NotPossibleError: the format's units were not used, or the process died or did not end.
    """
    asked = {"device": device, "precision": precision, "shape": shape, "engine": engine, "seconds": seconds}
    environ = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {_XLA_FLAGS}".strip()}
    command = [sys.executable, "-m", __name__, json.dumps(asked)]
    try:
        done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise NotPossibleError(f"not reached: no answer within {timeout_s:g} s") from None
    if done.returncode:
        raise NotPossibleError(f"not reached: the process that tried it {_ending(done.returncode)}")
    answer: dict[str, Any] = json.loads(done.stdout)
    if "not_possible" in answer:
        raise NotPossibleError(answer["not_possible"])
    windows = tuple(Window(**window) for window in answer.pop("windows"))  # of the same monotonic clock
    rates = tuple(answer.pop("rates"))
    return Result(**answer | {"rates": rates, "windows": windows, "peak": matmul.peak_of(spec, precision)})


def _ending(code: int) -> str:
    """How a process ended that did not end well."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}; micro.log has what it said"
    return f"ended with exit code {code}; micro.log has what it said"


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """What the other process measures: the fields of a Result, or why there is none."""
    from tfbench import devices

    on_gpu = asked["device"].startswith("GPU")
    config = BenchmarkConfig(model="resnet50", gpus=1 if on_gpu else 0, cpu_replicas=1)
    devices.set_environment(config)
    devices.open_devices(config)
    try:
        found = matmul.measure(**asked | {"shape": tuple(asked["shape"])})
    except NotPossibleError as reason:
        return {"not_possible": str(reason)}
    return dataclasses.asdict(found)


if __name__ == "__main__":
    print(json.dumps(answer(json.loads(sys.argv[1]))))
