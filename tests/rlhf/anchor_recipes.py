"""The flags of DeepSpeed-Chat's published training scripts, by the step and model they are for."""

from __future__ import annotations

import shlex

FOUR_SETS = (
    "Dahoas/rm-static Dahoas/full-hh-rlhf Dahoas/synthetic-instruct-gptj-pairwise yitingxie/rlhf-reward-datasets"
)
SIX_SETS = FOUR_SETS + " openai/webgpt_comparisons stanfordnlp/SHP"
CHINESE = "wangrui6/Zhihu-KOL Cohere/miracl-zh-queries-22-12 Hello-SimpleAI/HC3-Chinese mkqa-Chinese"
JAPANESE = "mkqa-Japanese Cohere/miracl-ja-queries-22-12 lmqg/qg_jaquad lmqg/qag_jaquad"

USUAL = "--lr_scheduler_type cosine --seed 1234 --deepspeed --output_dir out"
STEP1 = f"{USUAL} --max_seq_len 512 --num_warmup_steps 0"
STEP3 = f"{USUAL} --data_path Dahoas/rm-static --data_split 2,4,4 --num_warmup_steps 100 --ppo_epochs 1"
STEP3 += " --max_answer_seq_len 256 --max_prompt_seq_len 256 --num_train_epochs 1 --num_padding_at_beginning 1"
STEP3 += " --actor_model_name_or_path actor --critic_model_name_or_path critic"
OLD_SIZES = "--generation_batch_numbers 1 --per_device_train_batch_size {} --per_device_mini_train_batch_size {}"
SIZES = "--generation_batches 1 --per_device_generation_batch_size {0} --per_device_training_batch_size {0}"
DECAY = "--actor_weight_decay 0.1 --critic_weight_decay 0.1"


def step1(model: str, sets: str, size: int, rate: str, epochs: int, more: str = "", split: str = "2,4,4") -> str:
    sizes = f"--per_device_train_batch_size {size} --per_device_eval_batch_size {size}"
    training = f"--learning_rate {rate} --num_train_epochs {epochs}"
    return f"--model_name_or_path {model} --data_path {sets} --data_split {split} {sizes} {training} {STEP1} {more}"


def step3(rates: str, sizes: str, more: str) -> str:
    actor, critic = rates.split()
    return f"{STEP3} --actor_learning_rate {actor} --critic_learning_rate {critic} {sizes} {more}"


BLOCKS = "--lora_dim 128 --lora_module_name decoder.layers."
ACTOR_LORA = "--actor_lora_dim 128 --actor_lora_module_name decoder.layers."
BOTH_LORA = (
    "--actor_lora_dim 64 --critic_lora_dim 64 --critic_lora_module_name layers. --actor_lora_module_name layers."
)
ONE_BOARD = "--enable_tensorboard --tensorboard_path out"
CHECKPOINTED = "--actor_gradient_checkpointing --critic_gradient_checkpointing"
LLAMA = "meta-llama/Llama-2-7b-hf"

RECIPES: dict[str, tuple[str, str]] = {
    "sft opt-1.3b one GPU": (
        "sft",
        f"--model_name_or_path facebook/opt-1.3b --gradient_accumulation_steps 8 --lora_dim 128 --zero_stage 0 "
        f"{ONE_BOARD} --deepspeed --output_dir out",
    ),
    "sft opt-6.7b one GPU": (
        "sft",
        step1("facebook/opt-6.7b", FOUR_SETS, 8, "1e-3", 16, f"--weight_decay 0. --gradient_checkpointing {BLOCKS} "
              "--zero_stage 0 --gradient_accumulation_steps 16"),
    ),
    "sft opt-1.3b one node": (
        "sft",
        step1("facebook/opt-1.3b", FOUR_SETS, 8, "9.65e-6", 16, f"--weight_decay 0. --zero_stage 2 {ONE_BOARD} "
              "--gradient_accumulation_steps 1"),
    ),
    "sft opt-13b one node": (
        "sft",
        step1("facebook/opt-13b", FOUR_SETS, 4, "1e-4", 16, f"--weight_decay 0. --gradient_checkpointing {BLOCKS} "
              "--zero_stage 3 --gradient_accumulation_steps 1"),
    ),
    "sft opt-66b nodes": (
        "sft",
        step1("facebook/opt-66b", SIX_SETS, 4, "1e-4", 2, f"--weight_decay 0.1 --gradient_checkpointing {BLOCKS} "
              "--zero_stage 3 --gradient_accumulation_steps 1"),
    ),
    "sft llama2-7b one node": (
        "sft",
        step1(LLAMA, FOUR_SETS, 4, "9.65e-6", 4, "--weight_decay 0. --gradient_checkpointing --zero_stage 3 "
              "--lora_dim 128 --lora_module_name layers."),
    ),
    "sft chinese": (
        "sft", step1("bigscience/bloom-1b1", CHINESE, 8, "9.65e-6", 16, "--weight_decay 0. --zero_stage 2", "10,0,0"),
    ),
    "sft japanese": (
        "sft", step1("sberbank-ai/mGPT", JAPANESE, 4, "9.65e-6", 16, "--weight_decay 0. --zero_stage 2", "10,0,0"),
    ),
    "reward opt-350m one GPU": (
        "reward",
        "--model_name_or_path facebook/opt-350m --num_padding_at_beginning 1 --weight_decay 0.1 --dropout 0.0 "
        f"--gradient_accumulation_steps 4 --zero_stage 0 {ONE_BOARD} --deepspeed --output_dir out",
    ),
    "reward opt-350m nodes, older": (
        "reward",
        step1("facebook/opt-350m", FOUR_SETS, 2, "5e-5", 1, "--weight_decay 0.1 --disable_dropout --zero_stage 0 "
              "--num_padding_at_beginning 1 --gradient_accumulation_steps 1"),
    ),
    "reward llama2-7b": (
        "reward",
        step1(LLAMA, "Dahoas/rm-static", 8, "9.65e-6", 1, "--weight_decay 0.1 --gradient_checkpointing --offload "
              "--zero_stage 3 --num_padding_at_beginning 0"),
    ),
    "dpo opt-350m": (
        "dpo",
        "--model_name_or_path facebook/opt-350m --weight_decay 0.1 --dropout 0.0 --gradient_accumulation_steps 4 "
        f"--zero_stage 0 {ONE_BOARD} --deepspeed --output_dir out",
    ),
    "dpo llama2-7b": (
        "dpo",
        step1(LLAMA, "Dahoas/rm-static", 8, "9.65e-6", 1, "--weight_decay 0.1 --gradient_checkpointing --offload "
              "--zero_stage 3 --lora_dim 128 --lora_module_name layers."),
    ),
    "ppo opt-1.3b one GPU": (
        "ppo",
        "--actor_model_name_or_path actor --critic_model_name_or_path critic --actor_zero_stage 0 "
        "--critic_zero_stage 0 --num_padding_at_beginning 1 --gradient_accumulation_steps 2 --deepspeed "
        "--actor_lora_dim 128 --enable_hybrid_engine --actor_gradient_checkpointing --actor_dropout 0.0 "
        "--output_dir out",
    ),
    "ppo opt-6.7b one GPU": (
        "ppo",
        step3("5e-4 5e-6", SIZES.format(8), f"--gradient_accumulation_steps 16 {CHECKPOINTED} --actor_zero_stage 0 "
              "--critic_zero_stage 0 --actor_lora_dim 128 --disable_actor_dropout --enable_hybrid_engine"),
    ),
    "ppo opt-1.3b one node": (
        "ppo",
        step3("9.65e-6 5e-6", SIZES.format(4), "--gradient_accumulation_steps 1 --actor_dropout 0.0 "
              f"--actor_zero_stage 2 --critic_zero_stage 2 --enable_hybrid_engine --print_answers --enable_ema "
              f"{ONE_BOARD}"),
    ),
    "ppo opt-1.3b one node, older": (
        "ppo",
        step3("9.65e-6 5e-6", OLD_SIZES.format(4, 4), "--gradient_accumulation_steps 1 --disable_actor_dropout "
              f"--actor_zero_stage 2 --critic_zero_stage 2 --enable_ema --enable_hybrid_engine {ONE_BOARD}"),
    ),
    "ppo opt-13b one node": (
        "ppo",
        step3("5e-4 5e-6", SIZES.format(16), "--gradient_accumulation_steps 1 --actor_gradient_checkpointing "
              f"--inference_tp_size 2 --actor_zero_stage 3 --critic_zero_stage 3 --disable_actor_dropout {ACTOR_LORA} "
              "--enable_hybrid_engine"),
    ),
    "ppo opt-66b nodes": (
        "ppo",
        step3("5e-4 5e-6", OLD_SIZES.format(4, 4), f"{DECAY} --gradient_accumulation_steps 1 --enable_hybrid_engine "
              "--inference_tp_size 8 --tp_gather_partition_size 4 --actor_zero_stage 3 --critic_zero_stage 3 "
              f"--actor_gradient_checkpointing --disable_actor_dropout {ACTOR_LORA}"),
    ),
    "ppo llama2-7b": (
        "ppo",
        step3("9.65e-6 5e-6", SIZES.format(1), f"{DECAY} {CHECKPOINTED} --offload_reference_model --actor_dropout 0.0 "
              f"--actor_zero_stage 3 --critic_zero_stage 3 --enable_hybrid_engine {BOTH_LORA}"),
    ),
    "ppo llama2-7b mixed precision": (
        "ppo",
        step3("9.65e-6 5e-6", SIZES.format(1), f"{DECAY} {CHECKPOINTED} --offload_reference_model --actor_dropout 0.0 "
              f"--actor_zero_stage 3 --critic_zero_stage 3 --enable_mixed_precision_lora {BOTH_LORA}"),
    ),
    "ppo opt sweep": (
        "ppo",
        step3("9.65e-6 5e-6", SIZES.format(4), "--actor_dropout 0.0 --print_answers --actor_zero_stage 2 "
              "--critic_zero_stage 2 --offload --actor_lora_dim 0 --enable_test_mode --test_stop_step 20"),
    ),
}  # fmt: skip


def command(name: str) -> tuple[str, list[str]]:
    """The stage and the command line of a recipe."""
    stage, line = RECIPES[name]
    return stage, shlex.split(line)
