#!/usr/bin/env bash
# Sets up tfbench in a virtual environment and runs the main job; a second call runs at once.
#
#   ./scripts/quickstart.sh [flags of python -m tfbench.train]
#
# Without flags: ResNet-50 on all GPUs, or a small try-out on the CPU where there is none.
set -euo pipefail
called_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup_venv.sh
setup_venv data
cd "$called_from"
echo "running: python -m tfbench.train $*"
exec "$venv/bin/python" -m tfbench.train "$@"
