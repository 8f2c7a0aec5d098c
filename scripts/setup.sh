#!/usr/bin/env bash
# Fills a virtual environment with everything that demo, tests and checks need: setup.sh FOLDER. `make setup` calls it.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: setup.sh FOLDER}

fail() { echo "make setup: $*" >&2; exit 1; }

python=${PYTHON:-python3}
right_version='import sys; sys.exit(sys.version_info < (3, 11))'
if ! command -v "$python" > /dev/null || ! "$python" -c "$right_version" 2> /dev/null; then
    for python in python3.13 python3.12 python3.11 none; do
        if command -v "$python" > /dev/null && "$python" -c "$right_version" 2> /dev/null; then break; fi
    done
    [ "$python" != none ] || fail "Python 3.11 or newer is missing; install it, or name it: make setup PYTHON=/path/to/python3"
fi
"$python" -c 'import ensurepip, venv' 2> /dev/null \
    || fail "$python cannot make virtual environments; install its venv package (Debian: apt-get install python3-venv)"
command -v c++ > /dev/null || command -v g++ > /dev/null \
    || fail "a C++ compiler is missing (Debian: apt-get install g++): the shards of a target add up their results in compiled code"

[ -x "$venv/bin/python" ] || { echo "making $venv with $("$python" --version)"; "$python" -m venv "$venv"; }
# Tools below find their helpers, ninja above all, in the same environment.
PATH="$(cd "$venv/bin" && pwd):$PATH"
export PATH PYTHONSAFEPATH=1 PIP_DISABLE_PIP_VERSION_CHECK=1

install() {
    # shellcheck disable=SC2086  # PIP_FLAGS holds several words
    python -m pip install -qq --constraint constraints.txt ${PIP_FLAGS:-} "$@"
}

echo "installing torch"
install torch numpy "setuptools>=77" wheel ninja
# DeepSpeed looks at torch while it is built; in an isolated build it would fetch another torch.
echo "installing deepspeed"
DS_BUILD_OPS=0 install --no-build-isolation deepspeed
echo "installing outrider and its tools"
install --no-build-isolation --editable '.[dev]'
python scripts/prebuild_ops.py
