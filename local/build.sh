#!/usr/bin/env bash
# Build the stack as `sam deploy` would want it. pyenv's shims do not count as a Python for SAM, so the real one is found.
set -euo pipefail
python=""
for candidate in "$(command -v python3.13 || true)" "$HOME"/.pyenv/versions/3.13*/bin/python3.13; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 13))' 2>/dev/null; then
        python=$(readlink -f "$("$candidate" -c 'import sys; print(sys.executable)')")
        break
    fi
done
if [ -z "$python" ]; then
    echo "make build: no python3.13 here, and SAM builds only with the Python of the functions' runtime." >&2
    echo "Install Python 3.13 (pyenv install 3.13, or your system's package), or deploy from a machine that has it." >&2
    exit 3
fi
if [ ! -x .venv-sam/bin/sam ]; then
    "$python" -m venv .venv-sam
    .venv-sam/bin/pip install -q "aws-sam-cli==1.170.0"
fi
PYTHONPATH="" PATH="$(dirname "$python"):$PATH" .venv-sam/bin/sam build "$@"
