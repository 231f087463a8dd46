#!/usr/bin/env bash
# Step 3, PPO, in NPROC processes. The flags are those of `rlhf ppo --help`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$python" -m rlhf ppo "$@"
