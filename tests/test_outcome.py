"""Every way in which a run ends has its status and one sentence."""

import logging

import pytest

from tfbench.outcome import NOTE_LENGTH, STATUSES, classify, log_traceback


def tensorflow_error(name: str, text: str) -> Exception:
    """An error as TensorFlow would raise it: only the name of its type counts."""
    return type(name, (Exception,), {})(text)


GPU_OOM = "OOM when allocating tensor with shape[256,64,112,112] on GPU:0 by allocator GPU_0_bfc"
# As the public threads show them.
CASES = [
    (tensorflow_error("ResourceExhaustedError", GPU_OOM), "oom"),
    (tensorflow_error("ResourceExhaustedError", "failed to allocate memory"), "oom"),
    (
        tensorflow_error("InternalError", "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 B"),
        "oom",
    ),
    (tensorflow_error("InternalError", "CUDNN_STATUS_ALLOC_FAILED in cuda_dnn.cc(4369)"), "oom"),
    (tensorflow_error("InternalError", "failed to create cublas handle: the library was not init"), "oom"),
    (tensorflow_error("InternalError", "CUBLAS_STATUS_NOT_INITIALIZED"), "oom"),
    (tensorflow_error("InternalError", "CUBLAS_STATUS_ALLOC_FAILED"), "oom"),
    (tensorflow_error("UnknownError", "CUDA_ERROR_OUT_OF_MEMORY: out of memory"), "oom"),
    (MemoryError(), "host_oom"),
    (
        tensorflow_error("ResourceExhaustedError", "OOM when allocating tensor on CPU:0 by allocator mklcpu"),
        "host_oom",
    ),
    (tensorflow_error("ResourceExhaustedError", "OOM when allocating by allocator cpu"), "host_oom"),
    (tensorflow_error("ResourceExhaustedError", "OOM when allocating by allocator gpu_host_bfc"), "host_oom"),
    (tensorflow_error("OutOfRangeError", "End of sequence"), "short_data"),
    (StopIteration(), "short_data"),
    (KeyboardInterrupt(), "interrupted"),
    (
        tensorflow_error("InternalError", "CUDA_ERROR_INVALID_PTX: a PTX JIT compilation failed"),
        "unsupported_gpu",
    ),
    (tensorflow_error("InternalError", "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"), "unsupported_gpu"),
    (
        tensorflow_error("InternalError", "no kernel image is available for execution on the device"),
        "unsupported_gpu",
    ),
    (tensorflow_error("ResourceExhaustedError", "out/events; No space left on device"), "failed"),
    (ValueError("shapes do not match"), "failed"),
    (tensorflow_error("InvalidArgumentError", "label out of range"), "failed"),
    (RuntimeError(), "failed"),
    (SystemError("the loop ran out of steps"), "failed"),
]


@pytest.mark.parametrize(("error", "status"), CASES, ids=lambda case: f"{case!r}"[:60])
def test_status(error, status):
    assert classify(error)[0] == status
    assert status in STATUSES


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("two\nlines\n\n  of   text", "RuntimeError: two lines of text"),
        ("", "RuntimeError: "),
    ],
)
def test_note_is_one_line(text, expected):
    assert classify(RuntimeError(text))[1] == expected


@pytest.mark.parametrize(("error", "status"), CASES, ids=lambda case: f"{case!r}"[:60])
def test_note_is_bounded(error, status):
    graph = "".join(f"\n\t [[node {index}]]" for index in range(5000))
    note = classify(type(error)(f"{error}{graph}"))[1]
    assert "\n" not in note
    assert "\t" not in note
    assert 0 < len(note) <= NOTE_LENGTH + 100  # and the sentence before it


def test_note_says_what_to_do_and_what_happened():
    _, note = classify(tensorflow_error("ResourceExhaustedError", GPU_OOM))
    assert "--per_replica_batch_size" in note
    assert "shape[256,64,112,112]" in note
    assert classify(ValueError("shapes do not match"))[1] == "ValueError: shapes do not match"


def test_whole_traceback_goes_to_the_log(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("tfbench"), "propagate", True)
    try:
        raise ValueError("where it broke")
    except ValueError as error:
        log_traceback(error)
    assert "Traceback" in caplog.text
    assert "where it broke" in caplog.text
