"""The matrix rate that this very machine reaches: what MFU is compared with beside the data sheet.

Measured once for a card, its limits and its software, then kept in the user's cache folder.
"""

import json
import logging
import os
from pathlib import Path
from typing import Any

from tfbench import devices
from tfbench.hardware.cards import card_facts
from tfbench.hardware.gpus import Gpu
from tfbench.measure.timing import WindowTimer
from tfbench.precision import PRECISIONS

SIZE = 8192  # of the square product: large enough to fill any card, 134 MB a matrix in half precision
PRODUCTS = 50  # in a window, one after the other on the device
WINDOWS = 7  # the median of their rates counts

log = logging.getLogger("tfbench")


def matrix_flops(gpu: Gpu, precision: str, versions: dict[str, str | None]) -> float:
    """FLOP/s of a large matrix product on the first GPU at `precision`; from the cache where it was measured.

    Args:
        gpu: the card that TensorFlow calls GPU:0.
        precision: a name in PRECISIONS.
        versions: of the driver and libraries; other ones are measured anew.
    """
    path = _cache_dir() / "ceilings.json"
    card = card_facts(gpu)
    limits = {"power_limit_w": card.power_limit_w, "sm_clock_mhz_max": card.sm_clock_mhz_max}
    facts = {"gpu": gpu.name, "mig": gpu.is_mig, **limits, **versions, "precision": precision}
    key = " ".join(f"{name}={value}" for name, value in facts.items())
    known = _read(path)
    if key not in known:
        known[key] = measure_matrix_flops("GPU:0", precision)
        _write(path, known)
    return known[key]


def measure_matrix_flops(device: str, precision: str, size: int = SIZE, products: int = PRODUCTS) -> float:
    """FLOP/s of `size`³ products in the compute dtype of `precision`, on random numbers: zeros run faster.

    The better of XLA's product and the library's, which pick different kernels: a ceiling is the best.
    """
    return max(_product_flops(device, precision, size, products, xla) for xla in (True, False))


def _product_flops(device: str, precision: str, size: int, products: int, xla: bool) -> float:
    """The median rate over WINDOWS windows of `products` products, each needing the one before."""
    import tensorflow as tf

    dtype = PRECISIONS[precision].policy.removeprefix("mixed_")

    def chain(left: Any, right: Any) -> Any:
        for _ in tf.range(products):
            right = tf.matmul(left, right)
        return right

    with tf.device(device):
        run = tf.function(chain, jit_compile=xla)
        # Standard normal rows scaled so that a product of any length stays standard normal.
        left = tf.cast(tf.random.stateless_normal((size, size), (0, 1)) / size**0.5, dtype)
        right = tf.cast(tf.random.stateless_normal((size, size), (2, 3)), dtype)
        run(left, right)
        timer = WindowTimer(devices.synchronize)
        for _ in range(WINDOWS):
            with timer.window() as counted:
                run(left, right)
                counted.add(1, products)
    rates = sorted(window.samples * 2 * size**3 / window.seconds for window in timer.windows)
    return rates[len(rates) // 2]


def _cache_dir() -> Path:
    """The folder of tfbench in the user's cache directory (the XDG rule)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tfbench"


def _read(path: Path) -> dict[str, float]:
    """What was measured before; a cache that cannot be read costs a measurement, not the run."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        log.warning("%s is not readable and is written anew: %s", path, error)
        return {}


def _write(path: Path, known: dict[str, float]) -> None:
    """Replace the cache as a whole, so that no reader sees half of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(known, indent=1), encoding="utf-8")
        new.replace(path)
    except OSError as error:
        log.warning("the measured matrix rate is not kept: %s", error)
