"""Compiled programs, and what XLA's tuning found, kept between runs in the user's cache folder.

ResNet-50's first step on an H200 took 65 s, of which 39 went away with XLA's tuning known and 11 more with
the programs known. TensorFlow-free: everything is set before TensorFlow starts, and read from files after.
"""

import fcntl
import hashlib
import logging
import os
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

import psutil

from tfbench.config import BenchmarkConfig
from tfbench.hardware import tuning

_LOAD, _DUMP = "--xla_gpu_load_autotune_results_from", "--xla_gpu_dump_autotune_results_to"
_PROGRAMS = "--tf_xla_persistent_cache_directory"
# The user's own settings of XLA, of which TensorFlow's key for a program leaves the flags out.
_OWN = ("XLA_FLAGS", "TF_XLA_FLAGS", "TF_DETERMINISTIC_OPS")
_CUDA_FOLDER = "--xla_gpu_cuda_data_dir="

log = logging.getLogger("tfbench")


def user_cache_dir(environ: MutableMapping[str, str] = os.environ) -> Path:
    """The folder of tfbench in the user's cache directory (the XDG rule)."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tfbench"


class CompileCache:
    """The cache of one kind of card under one set of versions and XLA flags.

    Args:
        folder: made where it is not there.
        with_programs: False keeps what XLA's tuning found only.
        shipped: XLA's tuning results to start from where the folder has none; they then stay among its own.

    Raises:
        OSError: the folder cannot be made, or written to.
    """

    def __init__(self, folder: Path, with_programs: bool = True, shipped: Path | None = None):
        self.with_programs = with_programs
        self.programs = folder / "programs"
        self.tuned, self._new = folder / "tuned.txt", folder / f"tuned.{os.getpid()}.txt"
        self._lock = folder / "lock"
        self.programs.mkdir(parents=True, exist_ok=True)
        for place in (folder, self.programs):  # one that is there may be read-only
            with tempfile.TemporaryFile(dir=place):
                pass
        self._clean(folder)
        self._known, self._was_tuned = set(os.listdir(self.programs)), self.tuned.exists()
        self._shipped = None if self._was_tuned else shipped

    def _clean(self, folder: Path) -> None:
        """Removes what killed runs left.

        Other hosts' processes are not known: at worst a run there that shares the folder keeps no tuning.
        """
        for path in folder.glob("tuned.*.txt"):
            pid = path.name.split(".")[1]
            if path == self._new or (pid.isdecimal() and not psutil.pid_exists(int(pid))):
                path.unlink(missing_ok=True)

    def set_environment(self, environ: MutableMapping[str, str]) -> None:
        """Let XLA read and fill the cache."""
        known = self.tuned if self._was_tuned else self._shipped
        load = [_flag(_LOAD, known)] if known else []
        _add(environ, "XLA_FLAGS", *load, _flag(_DUMP, self._new))
        if self.with_programs:
            _add(environ, "TF_XLA_FLAGS", _flag(_PROGRAMS, self.programs))

    def _add_others(self) -> None:
        """Adds what another run has tuned while this one ran, which it would else take away."""
        if not self.tuned.exists():
            return
        try:
            others, own = (tuning.read(path.read_text(encoding="utf-8")) for path in (self.tuned, self._new))
        except ValueError as error:  # of a version that is read by XLA alone
            log.warning("of what XLA has tuned only this run's is kept: %s", error)
        else:
            self._new.write_text(tuning.write(others | own), encoding="utf-8")

    def keep(self) -> str:
        """Keep what this run has tuned; what the cache was to it.

        Returns:
            "warm": every program came from the cache. Else some were compiled, "tuned": with all of the
            tuning shipped with tfbench; "partly": with the tuning of earlier runs, or not all of it shipped,
            to start from; "cold": without.
        """
        tuned_here = False
        try:
            if self._new.exists():  # holds what was loaded too
                tuned_here = self._shipped is not None and _count(self._new) > _count(self._shipped)
                with open(self._lock, "w") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed: another run may end now too
                    self._add_others()
                    self._new.replace(self.tuned)
        except OSError as error:
            log.warning("what XLA has tuned is not kept: %s", error)
        if self.with_programs and set(os.listdir(self.programs)) <= self._known:
            return "warm"
        if self._shipped:
            return "partly" if tuned_here else "tuned"
        return "partly" if self._was_tuned else "cold"


def open_cache(
    config: BenchmarkConfig, facts: dict[str, str | None], environ: MutableMapping[str, str] = os.environ
) -> CompileCache | None:
    """The cache for a run, set up in `environ`; None where none is used.

    Only GPUs have one: on the CPU XLA reports each program that it loads on a page of its own. Programs
    with the all-reduce inside belong to one set of communicators and are not kept, the tuning of their
    products and convolutions is.

    Args:
        config: of the run.
        facts: what compiled code depends on, such as the card's name and the versions of the software; the
            user's own XLA flags are added here, because TensorFlow's key leaves them out.
        environ: changed; flags of the user that point to another cache stay, and there is no cache then.
    """
    own = "".join(environ.get(name, "") for name in _OWN)
    usable = config.compile_cache and config.gpus and config.xla
    if not usable or any(flag in own for flag in (_LOAD, _DUMP, _PROGRAMS)):
        return None
    parts = sorted(f"{name}={value}" for name, value in facts.items())
    key = hashlib.sha256("\n".join([*parts, own]).encode()).hexdigest()[:16]
    try:
        folder = user_cache_dir(environ) / "compiled" / key
        shipped = _shipped(config, facts, environ)
        cache = CompileCache(folder, config.collectives == "outside", shipped)
    except OSError as error:  # a home that cannot be written costs time, not the run
        log.warning("no compiled program is kept: %s", error)
        return None
    cache.set_environment(environ)
    return cache


def _shipped(
    config: BenchmarkConfig, facts: dict[str, str | None], environ: MutableMapping[str, str]
) -> Path | None:
    """What tfbench ships for this card and software, where nothing asks XLA for choices of another kind.

    XLA takes known results unseen, so one that is not deterministic, or of a kind that the user has switched
    off, would come back with them. Which of XLA's hundreds of flags bear on it differs from version to
    version: with any but CUDA's folder there is none.
    """
    settings = environ.get("XLA_FLAGS", "").split() + environ.get("TF_DETERMINISTIC_OPS", "").split()
    if config.deterministic or any(not setting.startswith(_CUDA_FOLDER) for setting in settings):
        return None
    try:
        return tuning.shipped(facts)
    except (OSError, ValueError) as error:
        log.warning("the tuning that tfbench ships is not used: %s", error)
        return None


def _count(path: Path) -> int:
    """Results in a file of XLA's."""
    return path.read_text(encoding="utf-8").count(f"\n{tuning.RESULT}")


def _flag(name: str, path: Path) -> str:
    """A flag as XLA reads it; a space ends one that is not quoted."""
    return f'{name}="{path}"' if " " in f"{path}" else f"{name}={path}"


def _add(environ: MutableMapping[str, str], name: str, *flags: str) -> None:
    environ[name] = " ".join(filter(None, [environ.get(name, ""), *flags]))
