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
echo "install: kimi-k2[$extra] into $venv, about 1 GB on disk with PyTorch for the CPU (8 GB with CUDA), some minutes"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || {
    echo "install: cannot make a virtual environment (on Debian: apt-get install python3-venv)" >&2
    exit 1
}
# What is imported is compiled then; compiling all of it here would take most of the time.
pip() { "$venv/bin/python" -m pip --disable-pip-version-check install --no-compile "$@"; }
lists=$(mktemp -d)
trap 'rm -rf "$lists"' EXIT

pytorch=
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    torch=$(grep '^torch==' requirements.txt)
    if command -v nvidia-smi >/dev/null 2>&1; then
        pip "$torch"
    else
        # The default build brings gigabytes of CUDA libraries. A configured index may offer the CPU build;
        # otherwise PyTorch's own CPU index has it. It is a third of the work: its files alone, beside the next step.
        { pip --no-deps "$torch+cpu" 2>/dev/null ||
            pip --no-deps "$torch" --index-url https://download.pytorch.org/whl/cpu; } &
        pytorch=$!
    fi
fi
# What builds the project, and what it needs that does not itself need PyTorch, whose CUDA build brings its own Triton.
others() {
    if "$venv/bin/python" -c 'import triton' 2>/dev/null; then
        grep -v '^triton==' requirements.txt >"$lists/constraints"
    else
        cp requirements.txt "$lists/constraints"
    fi
    pip -c "$lists/constraints" -r "$lists/others"
}
"$venv/bin/python" - "$extra" >"$lists/others" <<'PY'
import re, sys, tomllib
with open("pyproject.toml", "rb") as file:
    about = tomllib.load(file)
def needed(lines):
    for line in lines:
        if own := re.fullmatch(r"kimi-k2\[(.+)\]", line):
            for extra in own[1].split(","):
                yield from needed(about["project"]["optional-dependencies"][extra])
        elif not line.startswith(("torch>", "compressed-tensors>", "vllm>")):
            yield line
print(*about["build-system"]["requires"], sep="\n")
print(*needed([*about["project"]["dependencies"], f"kimi-k2[{sys.argv[1]}]"]), sep="\n")
PY
built=0 cpu=0
others || built=$?
[ -z "$pytorch" ] || wait "$pytorch" || cpu=$?
if [ "$cpu" != 0 ]; then
    echo "install: no index that can be reached has PyTorch's CPU build; its default one comes instead" >&2
    pip "$torch"
    others
elif [ "$built" != 0 ]; then
    exit "$built"
fi
pip -c "$lists/constraints" --no-build-isolation -e ".[$extra]"
