#!/usr/bin/env bash
# OPT 66B, LoRA, with a reward model of 350M on 8 nodes of 8 GPUs, over a folder that all see. On each node:
# NODE_RANK=0 MASTER_ADDR=HOST bash scripts/opt/multi_node/run_66b.sh   (by SLURM: see scripts/slurm.sbatch)
set -euo pipefail
export NPROC="${NPROC:-8}" NNODES="${NNODES:-8}" out="${OUT:-output/opt-66b}"
source "$(dirname "${BASH_SOURCE[0]}")/../../worked.sh"
shared=(--data_path Dahoas/rm-static Dahoas/full-hh-rlhf --data_split 2,4,4 --dtype bf16)

stage sft "${shared[@]}" --model_name_or_path facebook/opt-66b --output_dir "$out/sft" \
  --per_device_train_batch_size 4 --learning_rate 1e-4 --weight_decay 0.1 --num_train_epochs 2 \
  --gradient_checkpointing --zero_stage 3 --lora_dim 128 --only_optimize_lora
stage reward "${shared[@]}" --model_name_or_path facebook/opt-350m --output_dir "$out/reward" \
  --per_device_train_batch_size 2 --weight_decay 0.1 --dropout 0.0
stage ppo "${shared[@]}" --actor_model_name_or_path "$(made "$out/sft" facebook/opt-66b)" \
  --critic_model_name_or_path "$(made "$out/reward" facebook/opt-350m)" --output_dir "$out/ppo" \
  --per_device_generation_batch_size 4 --per_device_training_batch_size 4 --actor_weight_decay 0.1 \
  --actor_zero_stage 3 --critic_zero_stage 3 --inference_tp_size 8 --tp_gather_partition_size 4 \
  --actor_gradient_checkpointing --actor_lora_dim 128 --only_optimize_lora
