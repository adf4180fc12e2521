"""The matrix rate that this very machine reaches: what MFU is compared with beside the data sheet.

Measured once for a card, its limits and its software, then kept in the user's cache folder.
"""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from tfbench.compile_cache import user_cache_dir
from tfbench.hardware.cards import card_facts
from tfbench.hardware.gpus import Gpu
from tfbench.microbench import matmul
from tfbench.microbench.case import median

_METHOD = 2  # of measuring; rates of another one are measured anew

log = logging.getLogger("tfbench")


def matrix_flops(gpu: Gpu, precision: str, versions: Mapping[str, str | None]) -> float:
    """FLOP/s of a large matrix product on the first GPU at `precision`; from the cache where it was measured.

    Args:
        gpu: the card that TensorFlow calls GPU:0.
        precision: a name in PRECISIONS.
        versions: of the driver and libraries; other ones are measured anew.
    """
    number_format = matmul.FORMAT_OF_TRAINING[precision]
    known = _read(_path()).get(_key(gpu, number_format, versions))
    if known is not None:
        return known
    measured = measure_matrix_flops("GPU:0", number_format)
    keep(gpu, number_format, versions, measured)
    return measured


def measure_matrix_flops(device: str, number_format: str, size: int = matmul.SIZE) -> float:
    """FLOP/s of `size`³ products on random numbers, one after the other.

    Sustained on purpose: under a power limit the energy of an operation bounds the mean rate of a whole step,
    also one that rests between its products. A burst on a cool H200 is 12 % faster.

    The better of XLA's product and the library's, which pick different kernels: a ceiling is the best.

    Args:
        device: TensorFlow's name.
        number_format: a name in `matmul.FORMATS`.
        size: of the square matrices.
    """
    shape = (size, size, size)
    engines = ("library", "xla")
    results = [matmul.measure(device, number_format, shape, engine, matmul.CEILING_S) for engine in engines]
    for engine, result in zip(engines, results, strict=True):
        if result.is_wrong:
            log.warning(
                "%s products of %s on %s are wrong by %.1e of their size; rounding explains %.1e",
                number_format, engine, device, result.relative_error, result.bound,
            )  # fmt: skip
    return max(median(result.rates) for result in results) * 1e12


def keep(gpu: Gpu, number_format: str, versions: Mapping[str, str | None], flops: float) -> None:
    """Remembers a measured rate.

    Args:
        gpu: the card that was measured.
        number_format: a name in `matmul.FORMATS`.
        versions: of the driver and libraries.
        flops: FLOP/s.
    """
    known = _read(_path())
    known[_key(gpu, number_format, versions)] = flops
    _write(_path(), known)


def _key(gpu: Gpu, number_format: str, versions: Mapping[str, str | None]) -> str:
    """All that may change the rate."""
    card = card_facts(gpu)
    limits = {"power_limit_w": card.power_limit_w, "sm_clock_mhz_max": card.sm_clock_mhz_max}
    software = {name: versions.get(name) for name in ("driver", "tensorflow")}
    facts = {"gpu": gpu.name, "mig": gpu.is_mig, **limits, **software, "format": number_format}
    return " ".join(f"{name}={value}" for name, value in (facts | {"method": _METHOD}).items())


def _path() -> Path:
    return user_cache_dir() / "ceilings.json"


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
