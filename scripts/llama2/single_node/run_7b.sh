#!/usr/bin/env bash
# Llama-2 7B as actor and as reward model, on one node of 8 GPUs: bash scripts/llama2/single_node/run_7b.sh [--dry_run]
set -euo pipefail
export NPROC="${NPROC:-8}" out="${OUT:-output/llama2-7b}"
source "$(dirname "${BASH_SOURCE[0]}")/../../worked.sh"
model=meta-llama/Llama-2-7b-hf
shared=(--data_path Dahoas/rm-static --data_split 2,4,4 --dtype bf16)
one=(--model_name_or_path "$model" --learning_rate 9.65e-6 --gradient_checkpointing --zero_stage 3)

stage sft "${shared[@]}" "${one[@]}" --per_device_train_batch_size 4 --num_train_epochs 4 --output_dir "$out/sft"
stage reward "${shared[@]}" "${one[@]}" --per_device_train_batch_size 8 --weight_decay 0.1 --output_dir "$out/reward"
stage ppo "${shared[@]}" --actor_model_name_or_path "$(made "$out/sft" $model)" \
  --critic_model_name_or_path "$(made "$out/reward" $model)" --output_dir "$out/ppo" \
  --per_device_generation_batch_size 4 --per_device_training_batch_size 4 \
  --actor_zero_stage 3 --critic_zero_stage 3 --actor_gradient_checkpointing --critic_gradient_checkpointing \
  --actor_lora_dim 64 --critic_lora_dim 64 --only_optimize_lora
