#!/usr/bin/env bash
# Sourced by the other scripts: a virtual environment and the requirements, made once, and again when
# requirements.txt has changed. An active environment is used as it is. Also runs alone: bash scripts/setup.sh
set -euo pipefail
repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

environment="${VIRTUAL_ENV:-${CONDA_PREFIX:-}}"
if [ -z "$environment" ]; then
  environment="$repo/.venv"
  if [ ! -x "$environment/bin/python" ]; then
    python="$(command -v python3.11 || command -v python3 || true)"
    if [ -z "$python" ] || ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
      echo "error: Python 3.11 or newer is needed, found ${python:-none}" >&2
      exit 1
    fi
    echo "setting up: a virtual environment in $environment" >&2
    "$python" -m venv "$environment"
  fi
fi
python="$environment/bin/python"

stamp="$environment/.rlhf-requirements.txt"
if ! cmp -s "$repo/requirements.txt" "$stamp"; then
  echo "setting up: installing requirements.txt into $environment (once)" >&2
  "$python" -m pip install --quiet --disable-pip-version-check -r "$repo/requirements.txt" >&2
  cp "$repo/requirements.txt" "$stamp"
fi

# The packages of this folder, from any working directory; a folder named `data` there must not hide ours.
export PYTHONPATH="$repo${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1
