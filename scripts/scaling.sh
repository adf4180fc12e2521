#!/usr/bin/env bash
# What does each further GPU add? Weak scaling (the same batch per GPU), then strong (the same global batch),
# over 1, 2, 4, … GPUs, with runs on one GPU in between. Copy this file and edit it; flags given to it go to
# every run.
#
#   ./scripts/scaling.sh [flags of python -m tfbench.sweep]
#
#   ./scripts/scaling.sh --gpus=1,2,8 --model=bert_large     other GPUs, another model
#   ./scripts/scaling.sh --repeats=3                         intervals that hold what differs between runs
#
# Started again after whatever ended it, it runs only what is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup_venv.sh
python=$(venv_python) || exit 2
trap 'exit 130' INT TERM # the sweep ends its run first
# Strong scaling divides the batch of one GPU, so that must be a multiple of every number of GPUs; with 256 on
# one, each of eight has 32.
code=0
for mode in weak strong; do
  "$python" -m tfbench.sweep \
    --scaling="$mode" --model=resnet50 --precision=mixed_float16 --per_replica_batch_size=256 \
    --gpus=auto --results_dir=tfbench_results/scaling "$@" || code=$?
  # 1: some runs did not end ok; 2: refused, or none did, which the other mode would not change.
  if [[ $code -ge 2 ]]; then exit "$code"; fi
done
exit "$code"
