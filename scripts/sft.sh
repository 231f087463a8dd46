#!/usr/bin/env bash
# Step 1, supervised fine-tuning, in NPROC processes. The flags are those of `rlhf sft --help`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$python" -m rlhf sft "$@"
