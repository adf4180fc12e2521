#!/usr/bin/env bash
# Where does a larger batch stop paying? Copy this file and edit the lists; flags given to it go to every run.
#
#   ./scripts/sweep_batch.sh [flags of python -m tfbench.sweep]
#
# A batch that does not fit gets a row with status oom, and the sweep goes on. Started again after whatever
# ended it, it runs only what is missing; --retry=none leaves alone what did not fit.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup_venv.sh
python=$(venv_python) || exit 2
exec "$python" -m tfbench.sweep \
  --sweep="precision=tf32,mixed_float16 per_replica_batch_size=32,64,128,256,512" \
  --model=resnet50 --gpus=1 --results_dir=tfbench_results/batch "$@"
