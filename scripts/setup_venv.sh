# shellcheck shell=bash
# Sourced by the other scripts: a virtual environment with tfbench in it, made once and checked in no time.
#
#   setup_venv EXTRAS    e.g. setup_venv data,test
#   venv_python          prints the path of its interpreter
#
# TFBENCH_VENV names its folder (default: .venv in the project), TFBENCH_PYTHON the interpreter that makes it.

fail() {
  echo "error: $*" >&2
  exit 1
}

find_python() {
  local candidate
  for candidate in ${TFBENCH_PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if command -v "$candidate" >/dev/null 2>&1 &&
      "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; then
      echo "$candidate"
      return
    fi
  done
  fail "tfbench needs Python 3.11, 3.12 or 3.13; found $(python3 --version 2>&1 || echo none)." \
    "Install one, or name it: TFBENCH_PYTHON=/path/to/python3.12 $0"
}

has_nvidia_driver() {
  command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU '
}

# The interpreter of an environment that is there; the other scripts set none up.
venv_python() {
  local python=${TFBENCH_VENV:-.venv}/bin/python
  [ -x "$python" ] || fail "no $python: run ./scripts/quickstart.sh first, which makes it, or set TFBENCH_VENV"
  echo "$python"
}

setup_venv() {
  local extras=$1 python mark
  venv=${TFBENCH_VENV:-$PWD/.venv}
  if has_nvidia_driver; then
    extras=cuda,$extras
  fi
  mark=$venv/installed-$extras
  if [ ! -x "$venv/bin/python" ]; then
    python=$(find_python) || exit 1
    echo "making a virtual environment with $("$python" --version) in $venv"
    "$python" -m venv "$venv" || fail "no virtual environment: is the venv module there (Debian: python3-venv)?"
  fi
  if ! cmp --silent setup.cfg "$mark"; then
    echo "installing tfbench[$extras] into $venv (TensorFlow is large: some minutes the first time)"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".[$extras]" ||
      fail "installation failed; the lines above say why"
    cp setup.cfg "$mark" # compared next time: nothing to do until it changes
  fi
}
