#!/usr/bin/env bash
# Install the project into .venv: scripts/install.sh EXTRA, where EXTRA is one of pyproject.toml's (parity, test, dev).
set -euo pipefail
cd "$(dirname "$0")/.."
extra=${1:-parity}
venv=${VENV:-.venv}
python=${PYTHON:-python3}

"$python" - <<'PY' || { echo "install: Python 3.11 or newer is needed (set PYTHON=...)" >&2; exit 1; }
import sys
sys.exit(sys.version_info < (3, 11))
PY
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || {
    echo "install: cannot make a virtual environment (on Debian: apt-get install python3-venv)" >&2
    exit 1
}
pip() { "$venv/bin/python" -m pip --disable-pip-version-check -q "$@"; }

if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    torch=$(grep '^torch==' requirements.txt)
    if command -v nvidia-smi >/dev/null 2>&1; then
        pip install "$torch"
    else
        # The default build brings gigabytes of CUDA libraries. A configured index may offer the CPU build;
        # otherwise PyTorch's own CPU index has it.
        pip install "$torch+cpu" 2>/dev/null || pip install "$torch" --index-url https://download.pytorch.org/whl/cpu
    fi
fi
# PyTorch's CUDA build brings the Triton that it needs.
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
if "$venv/bin/python" -c 'import triton' 2>/dev/null; then
    grep -v '^triton==' requirements.txt >"$constraints"
else
    cat requirements.txt >"$constraints"
fi
pip install -c "$constraints" -e ".[$extra]"
