#!/bin/sh
# tfbench against PyTorch on one GPU, in turn: A B A B …; rows in race/, then the ratio of the medians and how far
# the single ratios of neighbours spread. Copy and edit.
#   benchmarks/race.sh resnet50 1024 3
set -eu
model=${1:-resnet50} batch=${2:-1024} rounds=${3:-3}
here=$(dirname "$0") out=race/$model-$batch
mkdir -p "$out"
for _ in $(seq "$rounds"); do
    python -m tfbench.train --model="$model" --gpus=1 --per_replica_batch_size="$batch" --steps=60 --windows=6 \
        --target_interval_percent=0 --results_dir="$out"
    python "$here/pytorch_peer.py" --model="$model" --batch="$batch" --csv="$out/peers.csv"
done
python - "$out" <<'PYTHON'
import csv, statistics, sys
ours = [float(row["samples_per_sec"]) for row in csv.DictReader(open(f"{sys.argv[1]}/runs.csv")) if row["status"] == "ok"]
theirs = [float(row["samples_per_sec"]) for row in csv.DictReader(open(f"{sys.argv[1]}/peers.csv"))]
if not ours or not theirs:
    sys.exit("one side has no run that ended well")
ratios = [a / b for a, b in zip(ours, theirs)]
print(f"tfbench {statistics.median(ours):,.1f} of {len(ours)} runs, PyTorch {statistics.median(theirs):,.1f} of {len(theirs)}: "
      f"{statistics.median(ours) / statistics.median(theirs):.3f} x, from {min(ratios):.3f} to {max(ratios):.3f}")
PYTHON
