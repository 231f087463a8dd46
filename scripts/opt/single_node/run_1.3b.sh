#!/usr/bin/env bash
# OPT 1.3B with a reward model of 350M on one node of 8 GPUs: bash scripts/opt/single_node/run_1.3b.sh [--dry_run]
set -euo pipefail
export NPROC="${NPROC:-8}" out="${OUT:-output/opt-1.3b}"
source "$(dirname "${BASH_SOURCE[0]}")/../../worked.sh"
shared=(--data_path Dahoas/rm-static --data_split 2,4,4 --dtype bf16)

stage sft "${shared[@]}" --model_name_or_path facebook/opt-1.3b --output_dir "$out/sft" \
  --per_device_train_batch_size 8 --learning_rate 9.65e-6 --num_train_epochs 16 --zero_stage 2
stage reward "${shared[@]}" --model_name_or_path facebook/opt-350m --output_dir "$out/reward" \
  --per_device_train_batch_size 4 --weight_decay 0.1 --dropout 0.0
stage ppo "${shared[@]}" --actor_model_name_or_path "$(made "$out/sft" facebook/opt-1.3b)" \
  --critic_model_name_or_path "$(made "$out/reward" facebook/opt-350m)" --output_dir "$out/ppo" \
  --per_device_generation_batch_size 4 --per_device_training_batch_size 4 \
  --actor_zero_stage 2 --critic_zero_stage 2 --enable_ema
