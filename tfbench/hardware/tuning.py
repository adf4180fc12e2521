"""XLA's tuning results as text, and those that tfbench ships, measured on real cards. TensorFlow-free.

XLA takes a result for an operation where the device (compute capability, cores, clock, bandwidth, L2, cuDNN)
and the operation's text are the same, and leaves the others alone. It takes it unseen: whatever release wrote
it, and also where its flags would now forbid the choice. A file that it cannot parse, or with two results for
one operation, ends the run. So a shipped file is for one TensorFlow, and is read here first.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

SHIPPED = Path(__file__).parent / "tuned"  # files named by `file_name`, which XLA reads from there
RESULT = "results {\n"  # begins a result
_HEADER = "version: 3\n"  # of the text's form
_LINE = re.compile(r' *(?:\w+ \{|\}|\w+: (?:"(?:[^"\\]|\\.)*"|[-+.\w]+))\n')
_FIELDS = {"device", "hlo", "version"}  # of a result, beside its choice
# A choice that is a place in the list of one cuBLAS; -1 leaves it to cuBLAS.
_PLACE_IN_LIST = re.compile(r"^    gemm \{\n(?:      .*\n)*?      algorithm: \d", re.MULTILINE)

Key = tuple[str, str]  # device, operation


def read(text: str) -> dict[Key, str]:
    """The results in a file of XLA's, each as its lines.

    Raises:
        ValueError: it is no such file, is cut off, or has two results for one operation.
    """
    header, *blocks = re.split(f"^{RESULT}", text, flags=re.MULTILINE)
    if header != _HEADER:
        raise ValueError(f"it begins with {header[:40]!r}, a file of XLA's results with {_HEADER!r}")
    results: dict[Key, str] = {}
    for number, block in enumerate(blocks, start=1):
        key = _key(block, f"result {number} of {len(blocks)}")
        if key in results:
            raise ValueError(f"result {number} of {len(blocks)} is the second for its operation")
        results[key] = block
    return results


def merge(files: Sequence[Mapping[Key, str]]) -> dict[Key, str]:
    """One file's worth of several: of two results for an operation the earlier file's.

    What only the cuBLAS that it was measured with understands is left out: XLA does not compare cuBLAS.

    Raises:
        ValueError: they are not of one device.
    """
    merged = {key: block for results in reversed(files) for key, block in results.items()}
    devices = sorted({device for device, _ in merged})
    if len(devices) != 1:
        raise ValueError(f"the results must be of one device, not of {', '.join(devices) or 'none'}")
    return {key: block for key, block in merged.items() if not _PLACE_IN_LIST.search(block)}


def write(results: Mapping[Key, str]) -> str:
    """A file for XLA, in the order of the keys."""
    return _HEADER + "".join(RESULT + results[key] for key in sorted(results))


def _key(block: str, name: str) -> Key:
    """Device and operation of one result, all of whose lines must be a text proto's."""
    depth = 1
    for line in block.splitlines(keepends=True):
        if not depth or not _LINE.fullmatch(line):
            raise ValueError(f"{name}: {line[:40]!r} does not belong there")
        depth += line.endswith("{\n") - (line.strip() == "}")
    fields = dict(re.findall(r"^  (\w+): (.*)$", block, flags=re.MULTILINE))
    if depth or fields.keys() != _FIELDS:
        raise ValueError(f"{name} is not whole")
    return fields["device"], fields["hlo"]


def shipped(facts: Mapping[str, str | None]) -> Path | None:
    """The file that was measured with this card, TensorFlow and cuDNN; None where there is none.

    Args:
        facts: the card's name as `gpu_name`, and versions by package; cuDNN's is that of NVIDIA's package.

    Raises:
        OSError, ValueError: the file cannot be read, or is not XLA's.
    """
    card, tensorflow = facts.get("gpu_name"), facts.get("tensorflow")
    cudnn = {version for name, version in facts.items() if name.startswith("nvidia-cudnn-cu")}
    if not card or not tensorflow or len(cudnn) != 1:
        return None
    path = SHIPPED / file_name(card, tensorflow, f"{cudnn.pop()}")
    if not path.exists():
        return None
    try:
        read(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return path


def file_name(card: str, tensorflow: str, cudnn: str) -> str:
    """As in NVIDIA_H200-tensorflow_2.21.0-cudnn_9.19.0.txt; of cuDNN's version XLA compares three parts.

    Args:
        card: as NVML calls it.
        tensorflow: version.
        cudnn: version of cuDNN or of its package.
    """
    parts = (card, f"tensorflow_{tensorflow}", f"cudnn_{'.'.join(cudnn.split('.')[:3])}")
    return "-".join(re.sub(r"[^\w.+]+", "_", part) for part in parts) + ".txt"
