"""The folder of compiled programs: who gets one, what XLA is told, what a run finds and leaves."""

import fcntl
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tfbench.compile_cache import CompileCache, open_cache
from tfbench.config import BenchmarkConfig
from tfbench.hardware import tuning

FACTS: dict[str, str | None] = {"gpu_name": "NVIDIA H200", "driver": "580.1", "tensorflow": "2.21.0"}


def config(**choices: Any) -> BenchmarkConfig:
    return BenchmarkConfig(**({"model": "resnet50", "gpus": 2, "xla": True} | choices))


def opened(tmp_path: Path, **environ: str) -> tuple[CompileCache, dict[str, str]]:
    own = {"XDG_CACHE_HOME": str(tmp_path), **environ}
    cache = open_cache(config(), FACTS, own)
    assert cache is not None
    return cache, own


def flag(environ: dict[str, str], variable: str, name: str) -> str | None:
    """The value of a flag in a variable of flags."""
    found = [part.partition("=") for part in environ[variable].split()]
    return dict((key, value) for key, _, value in found).get(name)


def tune(environ: dict[str, str], results: str) -> None:
    """What XLA does when it compiles."""
    path = flag(environ, "XLA_FLAGS", "--xla_gpu_dump_autotune_results_to")
    assert path is not None
    Path(path).write_text(results)


def compile_program(environ: dict[str, str], name: str) -> None:
    """What TensorFlow does with what XLA compiled."""
    folder = flag(environ, "TF_XLA_FLAGS", "--tf_xla_persistent_cache_directory")
    assert folder is not None
    (Path(folder) / name).write_bytes(b"code")


def test_cold_then_warm_then_partly(tmp_path: Path) -> None:
    cache, environ = opened(tmp_path)
    assert (
        flag(environ, "XLA_FLAGS", "--xla_gpu_load_autotune_results_from") is None
    )  # a missing file is fatal
    tune(environ, results(1))
    compile_program(environ, "gradients")
    assert cache.keep() == "cold"

    cache, environ = opened(tmp_path)
    loaded = flag(environ, "XLA_FLAGS", "--xla_gpu_load_autotune_results_from")
    assert loaded is not None
    assert Path(loaded).read_text() == results(1)
    assert cache.keep() == "warm"  # nothing was compiled, so nothing was dumped
    assert Path(loaded).read_text() == results(1)

    cache, environ = opened(tmp_path)
    tune(environ, results(1, 2))
    compile_program(environ, "update")
    assert cache.keep() == "partly"
    assert Path(loaded).read_text() == results(1, 2)
    assert {path.name for path in Path(loaded).parent.iterdir()} == {"programs", "tuned.txt", "lock"}


def test_collectives_inside_keep_the_tuning_and_no_program(tmp_path: Path) -> None:
    states = []
    for _ in range(2):
        environ = {"XDG_CACHE_HOME": str(tmp_path)}
        cache = open_cache(config(collectives="inside"), FACTS, environ)
        assert cache is not None
        assert "TF_XLA_FLAGS" not in environ
        tune(environ, results(1))
        states.append(cache.keep())
    assert states == ["cold", "partly"]
    # What one way of summing has tuned, the other starts from.
    _, environ = opened(tmp_path)
    assert flag(environ, "XLA_FLAGS", "--xla_gpu_load_autotune_results_from") == str(cache.tuned)


def test_runs_at_the_same_time_keep_what_each_has_tuned(tmp_path: Path) -> None:
    """Two cards of a machine, each with its model: the last to end must not take the other's away."""
    here, environ = opened(tmp_path)
    # A process of its own, so another id.
    code = (
        "import sys; sys.path.insert(0, 'tests'); from pathlib import Path; import test_compile_cache as t;"
    )
    code += f"cache, environ = t.opened(Path({str(tmp_path)!r}));"
    code += "t.tune(environ, t.results(2, 3)); t.compile_program(environ, 'other'); print(cache.keep())"
    tune(environ, results(1, 2))
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert told.stdout.strip() == "cold"
    assert here.tuned.read_text() == results(2, 3)
    compile_program(environ, "gradients")
    assert here.keep() == "cold"
    assert here.tuned.read_text() == results(1, 2, 3)


def test_nobody_reads_or_replaces_the_tuning_while_another_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two runs that end together, the later would else overwrite what it has not read."""
    cache, environ = opened(tmp_path)
    tune(environ, results(1))
    seen = []

    def looking(function: Any) -> Any:
        def inner(*arguments: Any) -> Any:
            with open(cache.tuned.parent / "lock", "w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    seen.append((function.__name__, "locked"))
            return function(*arguments)

        return inner

    monkeypatch.setattr(CompileCache, "_add_others", looking(CompileCache._add_others))
    monkeypatch.setattr(Path, "replace", looking(Path.replace))
    cache.keep()
    assert seen == [("_add_others", "locked"), ("replace", "locked")]
    assert cache.tuned.read_text() == results(1)


def test_tuning_in_a_form_that_is_not_known_is_kept_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for text in ("version: 4\nfirst", "version: 4\nfirst and second"):
        cache, environ = opened(tmp_path)
        tune(environ, text)
        cache.keep()
        assert cache.tuned.read_text() == text
    assert "only this run's is kept" in caplog.text


def test_flags_of_the_user_stay(tmp_path: Path) -> None:
    _, environ = opened(
        tmp_path, XLA_FLAGS="--xla_gpu_autotune_level=3", TF_XLA_FLAGS="--tf_xla_clustering_debug"
    )
    assert environ["XLA_FLAGS"].startswith("--xla_gpu_autotune_level=3 ")
    assert environ["TF_XLA_FLAGS"].startswith("--tf_xla_clustering_debug ")


@pytest.mark.parametrize(
    "choices",
    [{"gpus": 0}, {"xla": False}, {"compile_cache": False}],
    ids=["cpu", "no XLA", "refused"],
)
def test_who_has_none(tmp_path: Path, choices: dict[str, Any]) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    assert open_cache(config(**choices), FACTS, environ) is None
    assert environ == {"XDG_CACHE_HOME": str(tmp_path)}
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("XLA_FLAGS", "--xla_gpu_load_autotune_results_from=/mine"),
        ("XLA_FLAGS", "--xla_gpu_dump_autotune_results_to=/mine"),
        ("TF_XLA_FLAGS", "--tf_xla_persistent_cache_directory=/mine"),
    ],
)
def test_a_cache_of_the_users_own_is_left_alone(tmp_path: Path, variable: str, value: str) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path), variable: value}
    assert open_cache(config(), FACTS, environ) is None
    assert environ[variable] == value


@pytest.mark.parametrize("name", [*FACTS, "XLA_FLAGS"])
def test_another_card_version_or_flag_has_its_own(tmp_path: Path, name: str) -> None:
    cache, environ = opened(tmp_path)
    other_environ = {"XDG_CACHE_HOME": str(tmp_path)}
    facts = dict(FACTS)
    if name == "XLA_FLAGS":
        other_environ[name] = "--xla_gpu_deterministic_ops=true"
    else:
        facts[name] = "another"
    other = open_cache(config(), facts, other_environ)
    assert other is not None
    assert other.programs != cache.programs
    assert flag(environ, "TF_XLA_FLAGS", "--tf_xla_persistent_cache_directory") == str(cache.programs)


def test_a_folder_that_cannot_be_written_costs_the_cache_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tfbench").write_text("a file where the folder should be")
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    assert open_cache(config(), FACTS, environ) is None
    assert environ == {"XDG_CACHE_HOME": str(tmp_path)}
    assert "no compiled program is kept" in caplog.text


def test_a_folder_that_is_there_but_read_only_costs_the_cache_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache, _ = opened(tmp_path)
    cache.programs.rmdir()
    cache.programs.symlink_to("/proc/self/attr")  # a folder in which nobody, root neither, may make a file
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    assert open_cache(config(), FACTS, environ) is None
    assert environ == {"XDG_CACHE_HOME": str(tmp_path)}
    assert "no compiled program is kept" in caplog.text


def test_what_killed_runs_left_is_removed_and_a_running_ones_is_not(tmp_path: Path) -> None:
    cache, environ = opened(tmp_path)
    tune(environ, "of an earlier run under this very process id")
    folder = cache.programs.parent
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead, alive = folder / f"tuned.{ended.pid}.txt", folder / f"tuned.{os.getppid()}.txt"
    for path in (dead, alive, folder / "tuned.txt"):
        path.write_text(path.name)

    cache, _ = opened(tmp_path)
    assert {path.name for path in folder.iterdir()} == {"programs", "tuned.txt", alive.name}
    assert cache.keep() == "warm"  # nothing was compiled: what was tuned stays as it is
    assert (folder / "tuned.txt").read_text() == "tuned.txt"


def test_tuning_that_cannot_be_kept_costs_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache, environ = opened(tmp_path)
    tune(environ, "first")
    cache.tuned.mkdir()  # a folder cannot be replaced by a file
    assert cache.keep() == "warm"
    assert "is not kept" in caplog.text


ENTRY = """results {{
  device: "CUDA: 9.0, Cores: 132, DNN version: 9.19.0"
  hlo: "{{\\n  ROOT dot = f16[{size},8] dot()\\n}}"
  result {{
    gemm {{
      algorithm: -1
    }}
  }}
  version: 22
}}
"""


def results(*sizes: int) -> str:
    """A file of XLA's with a result for products of these sizes."""
    return "version: 3\n" + "".join(ENTRY.format(size=size) for size in sizes)


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of shipped files, with one of two results for FACTS' card and software."""
    folder = tmp_path / "tuned"
    folder.mkdir()
    (folder / "NVIDIA_H200-tensorflow_2.21.0-cudnn_9.19.0.txt").write_text(results(1, 2))
    monkeypatch.setattr(tuning, "SHIPPED", folder)
    return folder


CUDNN = {"nvidia-cudnn-cu12": "9.19.0.56"}


def loaded(environ: dict[str, str], facts: dict[str, str | None] | None = None, **choices: Any) -> str | None:
    """The file that XLA is told to load."""
    assert open_cache(config(**choices), FACTS | CUDNN if facts is None else facts, environ) is not None
    return flag(environ, "XLA_FLAGS", "--xla_gpu_load_autotune_results_from")


@pytest.mark.parametrize(
    ("found", "states"),
    [
        (results(1, 2), ["tuned", "partly"]),  # XLA writes what it loaded
        (results(1, 2, 3), ["partly", "partly"]),  # and what it had to tune here
    ],
)
def test_an_empty_cache_starts_from_what_is_shipped(
    tmp_path: Path, shipped: Path, found: str, states: list[str]
) -> None:
    told = []
    for program, path in (("first", next(shipped.iterdir())), ("second", None)):
        environ = {"XDG_CACHE_HOME": str(tmp_path)}
        cache = open_cache(config(), FACTS | CUDNN, environ)
        assert cache is not None
        expected = path or cache.tuned  # the second run has results of its own and loads no other
        assert flag(environ, "XLA_FLAGS", "--xla_gpu_load_autotune_results_from") == str(expected)
        tune(environ, found)
        compile_program(environ, program)
        told.append(cache.keep())
        assert cache.tuned.read_text() == found
    assert told == states
    assert next(shipped.iterdir()).read_text() == results(1, 2)


def test_collectives_inside_start_from_what_is_shipped(tmp_path: Path, shipped: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    cache = open_cache(config(collectives="inside"), FACTS | CUDNN, environ)
    assert cache is not None
    tune(environ, results(1, 2))
    assert cache.keep() == "tuned"


@pytest.mark.parametrize(
    "other",
    [
        {"gpu_name": "NVIDIA H200 NVL"},
        {"gpu_name": None},
        {"tensorflow": "2.21.1"},
        {"nvidia-cudnn-cu12": "9.19.1.2"},
        {"nvidia-cudnn-cu12": "9.1.9.0"},
        {"nvidia-cudnn-cu13": "9.20.0.48"},  # either may be the one that is loaded
        {"nvidia-cudnn-cu12": None},
    ],
    ids=str,
)
def test_another_card_or_software_starts_cold(
    tmp_path: Path, shipped: Path, other: dict[str, str | None]
) -> None:
    assert loaded({"XDG_CACHE_HOME": str(tmp_path)}, FACTS | CUDNN | other) is None


def test_without_nvidias_package_of_cudnn_its_version_is_not_known(tmp_path: Path, shipped: Path) -> None:
    frontend: dict[str, str | None] = {"nvidia-cudnn-frontend": "9.19.0"}  # is no cuDNN
    assert loaded({"XDG_CACHE_HOME": str(tmp_path)}, FACTS | frontend) is None
    assert loaded({"XDG_CACHE_HOME": str(tmp_path)}, FACTS | frontend | CUDNN) is not None


@pytest.mark.parametrize(
    ("own", "choices", "is_used"),
    [
        ({"XLA_FLAGS": "--xla_gpu_cuda_data_dir=/usr/local/cuda"}, {}, True),
        ({"XLA_FLAGS": "--xla_gpu_cuda_data_dir=/cuda --xla_gpu_enable_triton_gemm=false"}, {}, False),
        ({"XLA_FLAGS": "/a/file/of/flags"}, {}, False),
        ({"TF_DETERMINISTIC_OPS": "1"}, {}, False),
        ({}, {"deterministic": True}, False),
    ],
    ids=str,
)
def test_shipped_choices_are_left_where_xla_is_asked_for_others(
    tmp_path: Path, shipped: Path, own: dict[str, str], choices: dict[str, Any], is_used: bool
) -> None:
    assert (loaded({"XDG_CACHE_HOME": str(tmp_path), **own}, **choices) is not None) is is_used


def test_determinism_by_the_environment_has_a_cache_of_its_own(tmp_path: Path) -> None:
    assert opened(tmp_path)[0].programs != opened(tmp_path, TF_DETERMINISTIC_OPS="1")[0].programs


@pytest.mark.parametrize("content", [b"\xff\xfe", results(1, 2)[:-20].encode()], ids=["bytes", "cut off"])
def test_a_damaged_shipped_file_costs_no_run(
    tmp_path: Path, shipped: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    (path,) = shipped.iterdir()
    path.write_bytes(content)
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    cache = open_cache(config(), FACTS | CUDNN, environ)
    assert cache is not None
    assert flag(environ, "XLA_FLAGS", "--xla_gpu_load_autotune_results_from") is None
    assert f"is not used: {path}" in caplog.text
    tune(environ, results(1))
    compile_program(environ, "first")
    assert cache.keep() == "cold"


def test_paths_with_spaces_are_quoted(tmp_path: Path) -> None:
    """XLA splits its flags at spaces, as a shell does."""
    home = tmp_path / "a home"
    cache, environ = opened(home)
    assert shlex.split(environ["TF_XLA_FLAGS"]) == [f"--tf_xla_persistent_cache_directory={cache.programs}"]
    assert shlex.split(environ["XLA_FLAGS"])[-1].startswith(
        f"--xla_gpu_dump_autotune_results_to={cache.programs.parent}"
    )
