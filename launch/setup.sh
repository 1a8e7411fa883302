#!/usr/bin/env bash
# Set up a virtual environment with this package, editable: setup.sh PYTHON VENV EXTRA
set -euo pipefail
source "$(dirname "$0")/common.sh"
cd "$(dirname "$0")/.."
[ $# = 3 ] || fail "expected three words: setup.sh PYTHON VENV EXTRA"
python=$1 venv=$2 extra=$3
[ -w . ] || fail "$PWD cannot be written to by this user; clone the repository to a folder of your own"

command -v "$python" >/dev/null || fail "no $python on this machine; install Python 3.11 or newer, or give PYTHON=/path/to/it"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$python is $("$python" --version 2>&1); expected 3.11 or newer: give PYTHON=/path/to/it"
[ -x "$venv/bin/pip" ] || "$python" -m venv "$venv" ||
    fail "could not make the environment $venv; on Debian and Ubuntu install python3-venv"

pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

# torch's default build for Linux includes gigabytes of CUDA. Without a GPU, the version below is installed first: it is
# the one most likely available as a CPU build, and later requirements do not replace it.
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    echo "setting up $venv: torch"
    if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
        pip install 'torch>=2.6,<3'
    else
        pip install 'torch==2.13.0'
    fi
fi
echo "setting up $venv: megatron01[$extra]"
pip install --editable ".[$extra]"
