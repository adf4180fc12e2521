"""Freed memory is kept: pages that the kernel has to give, counted in a process of its own."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tfbench import malloc

ROOT = Path(__file__).parents[1]
FAULTS = """
import resource
import numpy as np

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        blocks = [np.ones(4 << 20, np.uint8) for _ in range(8)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

given_back = faults()
{keep}
faults()  # fills what is kept
print(given_back, faults())
"""
ALONE = """
from tfbench.malloc import keep_freed_memory
assert keep_freed_memory()
"""
# TensorFlow undoes what a process has set when it makes the iterator.
BESIDE_AN_INPUT = """
import tensorflow as tf
from data_helpers import IMAGE_MODEL, config_of
from tfbench.data import open_input
source = open_input(config_of("digits"), IMAGE_MODEL, tf.distribute.MirroredStrategy(["CPU:0"]))
source.next()
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library than glibc")
@pytest.mark.parametrize("keep", [ALONE, BESIDE_AN_INPUT], ids=["alone", "beside an input"])
def test_freed_memory_is_used_again_without_the_kernel(keep: str) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    environ["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}"
    script = FAULTS.format(keep=keep)
    told = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True
    )
    given_back, kept = map(int, told.stdout.split())
    assert kept < 0.1 * given_back


def test_the_users_own_settings_stay() -> None:
    assert not malloc.keep_freed_memory({"MALLOC_ARENA_MAX": "2"})
    assert not malloc.keep_freed_memory({"GLIBC_TUNABLES": "glibc.malloc.check=1"})
