"""Adds XLA's tuning results, kept by runs on real cards, to a file that tfbench ships.

    PYTHONPATH=. python benchmarks/merge_tuning.py \
        tfbench/hardware/tuned/NVIDIA_H200-tensorflow_2.21.0-cudnn_9.19.0.txt \
        ~/.cache/tfbench/compiled/*/tuned.txt

The first file is written anew: what it has stays, later files add what is missing. To replace what it has,
delete it first. Only results of the card, the TensorFlow and the cuDNN in its name belong in it; runs with
--deterministic or XLA flags of their own choose otherwise.
"""

import sys
from pathlib import Path

from tfbench.hardware import tuning


def main(into: str, *paths: str) -> None:
    """Merge, write, say how many."""
    target = Path(into)
    sources = [path for path in (target, *map(Path, paths)) if path != target or path.exists()]
    files = []
    for source in sources:
        try:
            files.append(tuning.read(source.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            sys.exit(f"{source}: {error}")
    try:
        merged = tuning.merge(files)
    except ValueError as error:
        sys.exit(f"{into}: {error}")
    target.write_text(tuning.write(merged), encoding="utf-8")
    left_out = len({key for results in files for key in results}) - len(merged)
    print(f"{into}: {len(merged)} results; {left_out} left out, which only one cuBLAS understands")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(f"two files or more are needed, the one to write first; {len(sys.argv) - 1} given")
    main(*sys.argv[1:])
