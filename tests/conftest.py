"""One TensorFlow process for all tests of a worker: four logical CPU devices stand for replicas."""

import gc
import os
import sys

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["KERAS_BACKEND"] = "tensorflow"


@pytest.fixture(autouse=True, scope="module")
def _input_iterators_end_with_their_module():
    """TensorFlow waits for ever for an input iterator that is still alive when the interpreter ends.

    Loops and their compiled functions refer to each other, so only the collector ends them.
    """
    yield
    if "tensorflow" in sys.modules:
        gc.collect()
