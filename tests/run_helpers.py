"""What the tests of the command line and of the run share: processes, made-up GPUs. TensorFlow-free."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tfbench import records
from tfbench.config import BenchmarkConfig
from tfbench.hardware.gpus import Gpu, Machine
from tfbench.records import RunRecord

ROOT = Path(__file__).parents[1]
DEADLINE_S = 300  # a run that takes longer hangs

# A value other than the default for each field, all of them possible together on two GPUs.
OTHER_VALUES: dict[str, Any] = {
    "model": "bert_tiny",
    "data": "pydoc",
    "data_dir": "/data/sets",
    "cache": "auto",
    "on_bad_record": "skip",
    "input": "dali",
    "data_service": "grpc://input-host:5050",
    "vocab": "vocab.txt",
    "pack": True,
    "image_size": 64,
    "seq_length": 48,
    "gpus": 2,
    "cpu_replicas": 1,  # with GPUs there is no other: see CPU_VALUES
    "per_replica_batch_size": 24,
    "requested_per_replica_batch_size": 48,
    "accumulate": 3,
    "precision": "mixed_bfloat16",
    "xla": True,
    "kernels": "fused",
    "collectives": "inside",
    "scaling_mode": "strong",
    "optimizer": "lamb",
    "learning_rate": 0.00123456789,
    "lr_schedule": "cosine",
    "lr_warmup_steps": 7,
    "lr_total_steps": 1000,
    "weight_decay": 1e-05,
    "dropout": 0.25,
    "initial_loss_scale": 1024.0,
    "seed": 11,
    "deterministic": True,
    "compile_cache": False,
    "steps": 12,
    "warmup_steps": 3,
    "windows": 4,
    "steps_per_loop": 2,
    "target_interval_percent": 2.5,
    "max_windows": 9,
    "results_dir": "out/of the way",
    "tag": 'it\'s "1/2" = 50 % #x',
    "tensorboard": False,
    "profile_steps": 5,
    "diagnose": True,
}
CPU_VALUES = OTHER_VALUES | {"gpus": 0, "cpu_replicas": 4, "collectives": "outside"}

_NO_TENSORFLOW = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("tensorflow", "keras"):
            raise AssertionError(f"{name} must not be imported")

sys.meta_path.insert(0, Refuse())
"""


def gpu(**fields: Any) -> Gpu:
    """An H200 unless told otherwise."""
    h200: dict[str, Any] = {
        "index": 0,
        "uuid": "GPU-1",
        "pci_bus_id": "00000000:01:00.0",
        "name": "NVIDIA H200",
        "memory_gib": 140.0,
        "compute_capability": (9, 0),
    }
    return Gpu(**h200 | fields)


def machine(*gpus: Gpu) -> Machine:
    """A machine with these GPUs, or without any because of "no driver here"."""
    return Machine(gpus=gpus, cpu_cores=2, ram_gib=8.0, reason_without_gpu="" if gpus else "no driver here")


def fields_with_flags() -> list[str]:
    return [f.name for f in dataclasses.fields(BenchmarkConfig)]


def environment(**variables: str) -> dict[str, str]:
    """Of a child process: tfbench can be imported anywhere, no GPU is visible, tables are not cut."""
    return os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"} | variables


def environment_without_tensorflow(folder: Path) -> dict[str, str]:
    """Of a child process that fails when it imports TensorFlow or Keras."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(_NO_TENSORFLOW)
    return environment(PYTHONPATH=f"{folder}{os.pathsep}{ROOT}")


def python(*arguments: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS` in a folder, its output as text."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=env or environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def train(*flags: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`python -m tfbench.train FLAGS` in a folder."""
    return python("-m", "tfbench.train", *flags, cwd=cwd, env=env)


def only_row(results_dir: Path) -> RunRecord:
    """The row of a results folder with one run."""
    (row,) = records.read(results_dir / "runs.csv")
    return row


def run_folder(results_dir: Path) -> Path:
    """The folder of the one run of a results folder, which its row names."""
    run_id = only_row(results_dir).run_id
    assert run_id is not None
    return results_dir / run_id
