#!/usr/bin/env bash
# Qwen3 4B, LoRA, with a reward model of 0.6B on one GPU: bash scripts/qwen3/single_gpu/run_4b.sh [--dry_run]
set -euo pipefail
export NPROC=1 out="${OUT:-output/qwen3-4b}"
source "$(dirname "${BASH_SOURCE[0]}")/../../worked.sh"
shared=(--data_path Dahoas/rm-static --data_split 2,4,4 --dtype bf16)
lora=(--lora_dim 64 --only_optimize_lora --gradient_checkpointing)

stage sft "${shared[@]}" "${lora[@]}" --model_name_or_path Qwen/Qwen3-4B --output_dir "$out/sft" \
  --per_device_train_batch_size 4 --gradient_accumulation_steps 16 --lora_learning_rate 2e-4
stage reward "${shared[@]}" --model_name_or_path Qwen/Qwen3-0.6B --output_dir "$out/reward" \
  --per_device_train_batch_size 8 --gradient_accumulation_steps 4 --learning_rate 1e-5
stage ppo "${shared[@]}" --actor_model_name_or_path "$(made "$out/sft" Qwen/Qwen3-4B)" \
  --critic_model_name_or_path "$(made "$out/reward" Qwen/Qwen3-0.6B)" --output_dir "$out/ppo" \
  --per_device_training_batch_size 4 --gradient_accumulation_steps 4 --actor_gradient_checkpointing \
  --actor_lora_dim 64 --actor_lora_learning_rate 5e-5 --only_optimize_lora
