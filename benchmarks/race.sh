#!/bin/sh
# tfbench against PyTorch on one GPU, in turn: A B A B …; rows in race/MODEL-BATCH/TIME, then the ratio of the medians,
# the mean of the single ratios of neighbours with its 95 % interval (Student's) and how far they spread. Ends at the
# first run of either side that does not end well. Copy and edit.
#   benchmarks/race.sh resnet50 1024 3
#   benchmarks/race.sh bert_large 64 3 --seq_length=512     # flags that both sides know
set -eu
model=${1:-resnet50} batch=${2:-1024} rounds=${3:-3}
shift $(($# < 3 ? $# : 3))
here=$(dirname "$0") out=race/$model-$batch$(echo "$*" | tr -d " ")/$(date +%Y%m%d-%H%M%S)
mkdir -p "$out"
for _ in $(seq "$rounds"); do
    python -m tfbench.train --model="$model" --gpus=1 --per_replica_batch_size="$batch" --steps=60 --windows=6 \
        --target_interval_percent=0 --results_dir="$out" "$@"
    python "$here/pytorch_peer.py" --model="$model" --batch="$batch" --csv="$out/peers.csv" "$@"
done
python - "$out" <<'PYTHON'
import csv, statistics, sys
from tfbench.inputbench.compare import ratio
ours = [float(row["samples_per_sec"]) for row in csv.DictReader(open(f"{sys.argv[1]}/runs.csv"))]
theirs = [float(row["samples_per_sec"]) for row in csv.DictReader(open(f"{sys.argv[1]}/peers.csv"))]
pairs = list(zip(ours, theirs, strict=True))
ratios = [a / b for a, b in pairs]
mean, low, high = ratio(*zip(*pairs))
ends = "one pair, so without an interval" if low is None else f"95 %: {low:.3f} to {high:.3f}"
print(f"tfbench {statistics.median(ours):,.1f} of {len(ours)} runs, PyTorch {statistics.median(theirs):,.1f} of {len(theirs)}: "
      f"{statistics.median(ours) / statistics.median(theirs):.3f} x; "
      f"pairs: {mean:.3f} x ({ends}), from {min(ratios):.3f} to {max(ratios):.3f}")
PYTHON
