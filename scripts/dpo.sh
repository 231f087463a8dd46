#!/usr/bin/env bash
# DPO, preferences without a reward model, in NPROC processes. The flags are those of `rlhf dpo --help`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$python" -m rlhf dpo "$@"
