#!/usr/bin/env bash
# What does each number format buy? Copy this file and edit the lists; flags given to it go to every run.
#
#   ./scripts/sweep_precision.sh [flags of python -m tfbench.sweep]
#
# Started again after whatever ended it, it runs only what is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup_venv.sh
python=$(venv_python) || exit 2
exec "$python" -m tfbench.sweep \
  --sweep="model=resnet50,bert_large precision=fp32,tf32,mixed_float16,mixed_bfloat16" \
  --repeats=3 --gpus=1 --results_dir=tfbench_results/precision "$@"
