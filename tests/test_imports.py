"""The arrows of the design: who may import whom, and who must do without TensorFlow."""

import ast
from pathlib import Path

import pytest
from run_helpers import ROOT, environment_without_tensorflow, fields_with_flags, python, train

PACKAGE = ROOT / "tfbench"

# Which of our modules and packages each may import, at the top or inside a function. What is not listed is an
# entry point or a part of one: it may import everything, and nothing listed may import it but what names it.
_CHOICES = {"config", "data", "models", "optimizers", "precision"}
MAY_IMPORT = {
    "config": set(),
    "records": set(),
    "outcome": set(),
    "display": set(),
    "optimizers": set(),
    "malloc": set(),
    "precision": set(),
    "hardware": set(),
    "measure": {"hardware"},
    "kernels": {"config"},
    "models": {"config", "kernels"},
    "data": {"config", "malloc", "models", "pinned"},
    "flags": _CHOICES,
    "defaults": _CHOICES | {"hardware", "kernels"},
    "training": {"config", "data"},
    "checks": {"devices", "hardware", "measure"},
    "sweeping": {
        "config",
        "defaults",
        "display",
        "flags",
        "hardware",
        "journal",
        "measure",
        "outcome",
        "records",
        "summary",
    },
    "study": {
        "config",
        "defaults",
        "devices",
        "display",
        "flags",
        "hardware",
        "measure",
        "precision",
        "records",
        "sweeping",
    },
    "repeats": {"config", "display", "flags", "measure", "records"},
    "compile_cache": {"config", "hardware"},
    "ceilings": {"compile_cache", "hardware", "microbench"},
    "microbench": {
        "config",
        "data",
        "devices",
        "display",
        "hardware",
        "measure",
        "models",
        "pinned",
        "records",
    },
    "inputbench": {
        "config",
        "data",
        "devices",
        "display",
        "flags",
        "hardware",
        "journal",
        "measure",
        "models",
        "outcome",
        "records",
    },
    "diagnose": {"config", "devices", "display", "journal", "measure", "step", "training"},
    "device_trace": set(),
    "reporting": {"hardware", "measure", "microbench", "models", "records"},
    "journal": {"config", "flags", "measure", "records"},
    "summary": {"config", "hardware", "journal", "measure", "models", "records"},
    "curves": {"config", "journal", "measure"},
    "devices": {"config", "hardware", "malloc"},
    "pinned": set(),
    "step": {"config", "models", "optimizers", "precision"},
}
ENTRY_POINTS = {"train", "doctor", "sweep", "report", "micro", "make_data", "input", "data_service"}
WITHOUT_TENSORFLOW = (
    "tfbench.config", "tfbench.flags", "tfbench.defaults", "tfbench.records", "tfbench.journal",
    "tfbench.summary", "tfbench.outcome", "tfbench.display", "tfbench.devices", "tfbench.train",
    "tfbench.doctor", "tfbench.repeats", "tfbench.models", "tfbench.data", "tfbench.optimizers",
    "tfbench.precision", "tfbench.report", "tfbench.compile_cache", "tfbench.micro", "tfbench.ceilings",
    "tfbench.input", "tfbench.data_service", "tfbench.malloc", "tfbench.pinned",
)  # fmt: skip
PACKAGES_WITHOUT_TENSORFLOW = ("measure", "hardware", "checks", "sweeping", "reporting", "microbench")


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def unit_of(path: Path) -> str:
    """The module, or the package, that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def ours(module: str, name: str = "") -> str | None:
    """The unit of tfbench that an import names; "" for the package itself, None for a library."""
    parts = f"{module}.{name}".split(".")
    if parts[0] != "tfbench":
        return None
    unit = parts[1]
    return unit if (PACKAGE / unit).is_dir() or (PACKAGE / f"{unit}.py").is_file() else ""


def imported(source: str) -> set[str]:
    """Units of tfbench that a source imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {ours(f"{alias.name}.") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative import"
            found |= {ours(node.module or "", alias.name) for alias in node.names}
    return {unit for unit in found if unit}


def units_imported(path: Path) -> set[str]:
    """Other units of tfbench that a file imports."""
    return imported(path.read_text()) - {unit_of(path)}


@pytest.mark.parametrize(
    ("source", "units"),
    [
        ("import tfbench", set()),
        ("import tfbench.flags", {"flags"}),
        ("import os, tfbench.hardware.gpus as g", {"hardware"}),
        ("from tfbench import config, data, __version__", {"config", "data"}),
        ("from tfbench.models.spec import Batch", {"models"}),
        ("def f():\n  from tfbench import step", {"step"}),
        ("import tfbench_other, collections.abc", set()),
    ],
)
def test_scanner_sees_every_way_to_import(source, units):
    assert imported(source) == units


@pytest.mark.parametrize("unit", list(MAY_IMPORT))
def test_arrows_go_one_way(unit):
    files = [path for path in sources() if unit_of(path) == unit]
    assert files
    for path in files:
        wrong = units_imported(path) - MAY_IMPORT[unit]
        assert not wrong, f"{path.relative_to(ROOT)} imports {', '.join(sorted(wrong))}"


def test_nothing_imports_an_entry_point():
    for path in sources():
        wrong = units_imported(path) & ENTRY_POINTS
        assert not wrong, f"{path.relative_to(ROOT)} imports {', '.join(sorted(wrong))}"


@pytest.fixture(scope="module")
def without_tensorflow(tmp_path_factory):
    """Environment of a child process that cannot import TensorFlow."""
    return environment_without_tensorflow(tmp_path_factory.mktemp("blocker"))


def test_blocker_blocks(tmp_path, without_tensorflow):
    for module in ("tensorflow", "keras.layers"):
        done = python("-c", f"import {module}", cwd=tmp_path, env=without_tensorflow)
        assert done.returncode == 1
        assert "must not be imported" in done.stderr


def test_modules_without_tensorflow(tmp_path, without_tensorflow):
    inner = [
        "tfbench." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for path in sources()
        if unit_of(path) in PACKAGES_WITHOUT_TENSORFLOW and path.name != "__init__.py"
    ]
    assert len(inner) >= 8
    code = f"import {', '.join((*WITHOUT_TENSORFLOW, *inner))}"
    done = python("-c", code, cwd=tmp_path, env=without_tensorflow)
    assert done.returncode == 0, done.stderr


def test_help_lists_every_flag_without_tensorflow(tmp_path, without_tensorflow):
    done = train("--help", cwd=tmp_path, env=without_tensorflow)
    missing = [name for name in fields_with_flags() if f"--{name}" not in done.stdout.replace("[no]", "")]
    assert not missing
    assert "Traceback" not in done.stderr
