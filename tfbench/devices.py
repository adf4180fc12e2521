"""Devices: what must be set before TensorFlow starts, what is really there, and the strategy over it."""

import contextlib
import ctypes
import logging
import os
import sys
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

from tfbench import malloc
from tfbench.config import BenchmarkConfig, ConfigError


class DeviceError(RuntimeError):
    """The devices asked for cannot be used; the message says which, why and what to do."""


def set_environment(config: BenchmarkConfig, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what the process reads only once, when TensorFlow is imported or its first GPU opened.

    What the user has set stays, but for the device order: NVML counts GPUs by PCI bus, so CUDA must too.
    """
    environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    environ.setdefault("TF_GPU_THREAD_MODE", "gpu_private")  # launches do not queue behind input threads
    environ["KERAS_BACKEND"] = "tensorflow"
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    for flag, value in _xla_flags(config).items():
        own = environ.get("XLA_FLAGS", "")
        if flag not in own:
            environ["XLA_FLAGS"] = f"{own} {flag}={value}".strip()
    if config.data != "synthetic":
        malloc.keep_freed_memory(environ)


def _xla_flags(config: BenchmarkConfig) -> dict[str, str]:
    """XLA's flags that the run needs."""
    flags = {}
    if config.deterministic and config.gpus:
        flags["--xla_gpu_deterministic_ops"] = "true"
    if config.kernels == "fused":
        # Products by cuBLAS alone. With nothing left to fuse into them XLA's own are no faster (BERT-large
        # on an H200: 1,864 sequences/s without, 1,867 with) and to tune them is half of a cold start.
        flags["--xla_gpu_enable_triton_gemm"] = "false"
    return flags


@contextlib.contextmanager
def native_messages_to(path: Path) -> Iterator[None]:
    """Append what C++ code writes to standard error inside the block to a file.

    TensorFlow's libraries greet with a screen of remarks before any log level of theirs applies.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with open(path, "a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def open_devices(config: BenchmarkConfig) -> list[str]:
    """Make exactly the devices of the run visible to TensorFlow.

    Returns:
        TensorFlow's names of the devices, one for each replica.

    Raises:
        ConfigError: more GPUs asked for than TensorFlow sees.
    """
    import tensorflow as tf

    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
    gpus = tf.config.list_physical_devices("GPU")
    if config.gpus > len(gpus):
        raise ConfigError("gpus", config.gpus, f"TensorFlow sees {len(gpus)}{_why_fewer(len(gpus))}")
    tf.config.set_visible_devices(gpus[: config.gpus], "GPU")
    for gpu in gpus[: config.gpus]:
        tf.config.experimental.set_memory_growth(gpu, True)
    if config.gpus:
        return [f"GPU:{index}" for index in range(config.gpus)]
    _divide_cpu(config.cpu_replicas)
    return [f"CPU:{index}" for index in range(config.cpu_replicas)]


def _why_fewer(seen: int) -> str:
    """What NVML and the build say about GPUs that TensorFlow does not see."""
    import tensorflow as tf

    from tfbench.hardware.gpus import this_machine

    machine = this_machine()
    if not tf.test.is_built_with_cuda():
        return "; this TensorFlow is built without CUDA: pip install 'tfbench[cuda]'"
    if not machine.gpus:
        return f"; {machine.reason_without_gpu}. Use --gpus=0 for the CPU"
    if len(machine.gpus) > seen:
        return (
            f", the driver {len(machine.gpus)}: TensorFlow could not load a CUDA library "
            "(pip install 'tfbench[cuda]'); train.log in the run's folder names it"
        )
    return f"; use --gpus={seen} or fewer, or check CUDA_VISIBLE_DEVICES"


def _divide_cpu(replicas: int) -> None:
    """Stand in `replicas` logical devices for the CPU; a process decides once how many it has."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    present = tf.config.get_logical_device_configuration(cpu)
    if replicas > 1 and len(present or []) < replicas:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)


def check_devices(devices: list[str], xla: bool) -> None:
    """A small product on every device, compiled as the run will be, compared with its known result.

    Raises:
        DeviceError: a device gives an error or a wrong result.
    """
    import tensorflow as tf

    for device in devices:
        product = tf.function(tf.matmul, jit_compile=xla)
        try:
            with tf.device(device):
                ones = tf.ones((64, 64))
                result = product(ones, ones).numpy()
        except tf.errors.OpError as error:
            raise DeviceError(f"{device} cannot multiply two matrices: {error.message}") from error
        if not (result == 64).all():
            raise DeviceError(f"{device} multiplies wrongly: 64 ones times 64 ones gave {result[0, 0]}")


def build_strategy(devices: list[str]) -> Any:
    """A MirroredStrategy over the devices, one replica or many, so that a baseline differs in nothing else.

    Logical CPU devices share one memory: their sums are taken on one of them, which also lets one process
    use several strategies after each other. Gradients come packed (see step.py).
    """
    import tensorflow as tf

    on_cpu = devices[0].startswith("CPU")
    reduction = tf.distribute.ReductionToOneDevice() if on_cpu else tf.distribute.NcclAllReduce(num_packs=0)
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=reduction)


def synchronize() -> None:
    """Wait until every device has done all work given to it."""
    import tensorflow as tf

    tf.test.experimental.sync_devices()


def reset_peak_memory(gpus: int) -> None:
    """Let the allocator's peak start anew, so that it is the steps' and not the build's."""
    import tensorflow as tf

    for index in range(gpus):
        tf.config.experimental.reset_memory_stats(f"GPU:{index}")


def peak_memory_gib(gpus: int) -> float | None:
    """Highest use of one GPU by the allocator since the reset; None on the CPU.

    What the allocator reserved, and what NVML shows, is nearly the whole card.
    """
    import tensorflow as tf

    peaks = [tf.config.experimental.get_memory_info(f"GPU:{index}")["peak"] for index in range(gpus)]
    return max(peaks) / 2**30 if peaks else None


def library_versions() -> dict[str, str | None]:
    """Versions of the CUDA libraries in use: columns cuda (TensorFlow's build), cudnn and nccl (loaded)."""
    import tensorflow as tf

    build = tf.sysconfig.get_build_info()
    if not build.get("is_cuda_build") or not tf.config.list_logical_devices("GPU"):
        return {"cuda": None, "cudnn": None, "nccl": None}
    cudnn, nccl = _loaded_library("libcudnn.so.9"), _loaded_library("libnccl.so.2")
    number = ctypes.c_int()
    if nccl is not None and nccl.ncclGetVersion(ctypes.byref(number)) != 0:
        nccl = None
    return {
        "cuda": build.get("cuda_version"),
        "cudnn": _dotted(cudnn.cudnnGetVersion()) if cudnn is not None else None,
        "nccl": _dotted(number.value) if nccl is not None else None,
    }


def _loaded_library(name: str) -> ctypes.CDLL | None:
    """A shared library that TensorFlow has opened; None where it opened none."""
    try:
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
    except OSError:
        return None


def _dotted(version: int) -> str:
    """NVIDIA's 1-2 digits for each part: 91400 → 9.14.0."""
    return f"{version // 10000}.{version % 10000 // 100}.{version % 100}"
