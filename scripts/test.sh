#!/usr/bin/env bash
# The tests, after the style check; flags go to pytest: bash scripts/test.sh -k losses
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$repo"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
"$python" -m ruff check .
exec "$python" -m pytest "$@"
