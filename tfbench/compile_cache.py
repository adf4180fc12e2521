"""Compiled programs, and what XLA's tuning found, kept between runs in the user's cache folder.

ResNet-50's first step on an H200 took 65 s, of which 39 went away with XLA's tuning known and 11 more with
the programs known. TensorFlow-free: everything is set before TensorFlow starts, and read from files after.
"""

import hashlib
import logging
import os
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

import psutil

from tfbench.config import BenchmarkConfig

_LOAD, _DUMP = "--xla_gpu_load_autotune_results_from", "--xla_gpu_dump_autotune_results_to"
_PROGRAMS = "--tf_xla_persistent_cache_directory"

log = logging.getLogger("tfbench")


def user_cache_dir(environ: MutableMapping[str, str] = os.environ) -> Path:
    """The folder of tfbench in the user's cache directory (the XDG rule)."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tfbench"


class CompileCache:
    """The cache of one kind of card under one set of versions and XLA flags.

    Args:
        folder: made where it is not there.
        with_programs: False keeps what XLA's tuning found only.

    Raises:
        OSError: the folder cannot be made, or written to.
    """

    def __init__(self, folder: Path, with_programs: bool = True):
        self.with_programs = with_programs
        self.programs = folder / "programs"
        self.tuned, self._new = folder / "tuned.txt", folder / f"tuned.{os.getpid()}.txt"
        self.programs.mkdir(parents=True, exist_ok=True)
        for place in (folder, self.programs):  # one that is there may be read-only
            with tempfile.TemporaryFile(dir=place):
                pass
        self._clean(folder)
        self._known, self._was_tuned = set(os.listdir(self.programs)), self.tuned.exists()

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
        load = [f"{_LOAD}={self.tuned}"] if self._was_tuned else []
        _add(environ, "XLA_FLAGS", *load, f"{_DUMP}={self._new}")
        if self.with_programs:
            _add(environ, "TF_XLA_FLAGS", f"{_PROGRAMS}={self.programs}")

    def keep(self) -> str:
        """Keep what this run has tuned; what the cache was to it.

        Returns:
            "warm": every program came from the cache; "partly": some were compiled, with the tuning of
            earlier runs to start from; "cold": without.
        """
        try:
            if self._new.exists():  # holds what was loaded too
                self._new.replace(self.tuned)
        except OSError as error:
            log.warning("what XLA has tuned is not kept: %s", error)
        if self.with_programs and set(os.listdir(self.programs)) <= self._known:
            return "warm"
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
    own = environ.get("XLA_FLAGS", "") + environ.get("TF_XLA_FLAGS", "")
    usable = config.compile_cache and config.gpus and config.xla
    if not usable or any(flag in own for flag in (_LOAD, _DUMP, _PROGRAMS)):
        return None
    parts = sorted(f"{name}={value}" for name, value in facts.items())
    key = hashlib.sha256("\n".join([*parts, own]).encode()).hexdigest()[:16]
    try:
        cache = CompileCache(user_cache_dir(environ) / "compiled" / key, config.collectives == "outside")
    except OSError as error:  # a home that cannot be written costs time, not the run
        log.warning("no compiled program is kept: %s", error)
        return None
    cache.set_environment(environ)
    return cache


def _add(environ: MutableMapping[str, str], name: str, *flags: str) -> None:
    environ[name] = " ".join(filter(None, [environ.get(name, ""), *flags]))
