"""How a run ended: an exception's status and the sentence for the row. TensorFlow-free."""

import errno
import logging
import os
import re

STATUSES = (
    "ok",
    "oom",
    "host_oom",
    "hang",
    "no_update",
    "short_data",
    "unsupported_gpu",
    "failed",
    "interrupted",
)

# Out of GPU memory shows in many ways: allocator and libraries fail first where workspaces find no room.
_OUT_OF_MEMORY = re.compile(
    r"out of memory|OOM when allocating|RESOURCE_EXHAUSTED|CUDNN_STATUS_ALLOC_FAILED|"
    r"CUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)|failed to create cublas handle",
    re.IGNORECASE,
)
_HOST_ALLOCATOR = re.compile(r"by allocator (mkl)?cpu|by allocator gpu_host", re.IGNORECASE)
_UNSUPPORTED_GPU = re.compile(
    r"no kernel image is available|INVALID_PTX|UNSUPPORTED_PTX_VERSION|unsupported gpu architecture",
    re.IGNORECASE,
)
NOTE_LENGTH = 500  # characters: TensorFlow's messages carry whole graphs


def classify(error: BaseException) -> tuple[str, str]:
    """Status of a run that `error` ended, and what to say about it."""
    text = f"{error}"
    name = type(error).__name__
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "stopped by the user"
    if isinstance(error, MemoryError):
        return "host_oom", "the host has no memory left"
    if os.strerror(errno.ENOSPC) in text:  # for TensorFlow a resource that is exhausted, as memory is
        return "failed", f"the disk is full: {_first_lines(text)}"
    if _HOST_ALLOCATOR.search(text):
        return "host_oom", f"out of host memory; a smaller batch may fit: {_first_lines(text)}"
    if name == "ResourceExhaustedError" or _OUT_OF_MEMORY.search(text):
        return "oom", f"out of GPU memory; a smaller --per_replica_batch_size may fit: {_first_lines(text)}"
    if name in ("OutOfRangeError", "StopIteration"):
        return "short_data", "the data ended before the steps did"
    if _UNSUPPORTED_GPU.search(text):
        return "unsupported_gpu", f"this TensorFlow has no code for this GPU: {_first_lines(text)}"
    return "failed", f"{name}: {_first_lines(text)}"


def log_traceback(error: BaseException) -> None:
    """The whole story, for train.log."""
    logging.getLogger("tfbench").error("the run ended early", exc_info=error)


def _first_lines(text: str) -> str:
    """The beginning of a message, on one line."""
    return " ".join(text.split())[:NOTE_LENGTH]
