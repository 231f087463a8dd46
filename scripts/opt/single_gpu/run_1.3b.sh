#!/usr/bin/env bash
# OPT 1.3B with a reward model of 350M on one GPU, LoRA: bash scripts/opt/single_gpu/run_1.3b.sh [--dry_run]
set -euo pipefail
export NPROC=1 out="${OUT:-output/opt-1.3b}"
source "$(dirname "${BASH_SOURCE[0]}")/../../worked.sh"
shared=(--data_path Dahoas/rm-static --data_split 2,4,4 --dtype bf16)

stage sft "${shared[@]}" --model_name_or_path facebook/opt-1.3b --output_dir "$out/sft" \
  --per_device_train_batch_size 16 --gradient_accumulation_steps 8 --lora_dim 128 --gradient_checkpointing
stage reward "${shared[@]}" --model_name_or_path facebook/opt-350m --output_dir "$out/reward" \
  --gradient_accumulation_steps 4 --weight_decay 0.1 --dropout 0.0
stage ppo "${shared[@]}" --actor_model_name_or_path "$(made "$out/sft" facebook/opt-1.3b)" \
  --critic_model_name_or_path "$(made "$out/reward" facebook/opt-350m)" --output_dir "$out/ppo" \
  --gradient_accumulation_steps 2 --actor_lora_dim 128 --only_optimize_lora --actor_gradient_checkpointing
