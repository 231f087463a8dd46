#!/usr/bin/env bash
# All three stages; without flags the bundled sample. NPROC=2 bash scripts/rlhf.sh uses two processes.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$python" -m rlhf run "$@"
