#!/usr/bin/env bash
# Sets up tfbench in a virtual environment and passes the tests, format, lint and type checks.
#
#   ./scripts/test.sh [arguments of pytest]
#
# Tests run in a process for each core, in four at most: each imports TensorFlow. One at a time: -n 0.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup_venv.sh
setup_venv data,test
echo "ruff and mypy"
"$venv/bin/ruff" format --check --quiet . || fail "not formatted: $venv/bin/ruff format ."
"$venv/bin/ruff" check --quiet .
"$venv/bin/mypy"
processes=$(nproc)
((processes < 4)) || processes=4
set -- -n "$processes" --dist loadfile "$@" # a file's tests share what they have set up
echo "pytest $*"
exec "$venv/bin/python" -m pytest "$@"
