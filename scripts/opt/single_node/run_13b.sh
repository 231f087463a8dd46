#!/usr/bin/env bash
# OPT 13B, LoRA, with a reward model of 350M on one node of 8 GPUs: bash scripts/opt/single_node/run_13b.sh [--dry_run]
set -euo pipefail
export NPROC="${NPROC:-8}" out="${OUT:-output/opt-13b}"
source "$(dirname "${BASH_SOURCE[0]}")/../../worked.sh"
shared=(--data_path Dahoas/rm-static --data_split 2,4,4 --dtype bf16)

stage sft "${shared[@]}" --model_name_or_path facebook/opt-13b --output_dir "$out/sft" \
  --per_device_train_batch_size 4 --learning_rate 1e-4 --num_train_epochs 16 --gradient_checkpointing \
  --zero_stage 3 --lora_dim 128 --only_optimize_lora
stage reward "${shared[@]}" --model_name_or_path facebook/opt-350m --output_dir "$out/reward" \
  --per_device_train_batch_size 8 --weight_decay 0.1 --dropout 0.0
stage ppo "${shared[@]}" --actor_model_name_or_path "$(made "$out/sft" facebook/opt-13b)" \
  --critic_model_name_or_path "$(made "$out/reward" facebook/opt-350m)" --output_dir "$out/ppo" \
  --actor_zero_stage 3 --critic_zero_stage 3 --inference_tp_size 2 \
  --actor_gradient_checkpointing --actor_lora_dim 128 --only_optimize_lora
