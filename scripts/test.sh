#!/usr/bin/env bash
# Sets up tfbench in a virtual environment and passes the tests, format, lint and type checks.
#
#   ./scripts/test.sh [arguments of pytest]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup_venv.sh
setup_venv data,test
echo "ruff and mypy"
"$venv/bin/ruff" format --check --quiet . || fail "not formatted: $venv/bin/ruff format ."
"$venv/bin/ruff" check --quiet .
"$venv/bin/mypy"
echo "pytest $*"
exec "$venv/bin/python" -m pytest "$@"
