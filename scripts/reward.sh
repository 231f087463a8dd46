#!/usr/bin/env bash
# Step 2, the reward model, in NPROC processes. The flags are those of `rlhf reward --help`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$python" -m rlhf reward "$@"
