"""The numbers of the pipeline's stages, in one place. ``rlhf run --ppo-args "…"`` overrules any of them.

Batch sizes are those of one process. The pipeline divides them by the number of processes, so that an update
sees as many rows however many share the work.
"""

from __future__ import annotations

import os

from rlhf.choices import GROUPED
from rlhf.ppo_options import GROUP_SIZE

Flags = dict[str, object]

# A model of about a million parameters from scratch, on the bundled dialogues: minutes on two CPU cores.
SAMPLE_SPLIT = "8,10,2"  # PPO needs questions alone, and few of them

SAMPLE: dict[str, Flags] = {
    "sft": {
        "data_split": SAMPLE_SPLIT,
        "max_seq_len": 128,
        "per_device_train_batch_size": 32,
        "per_device_eval_batch_size": 64,
        "num_train_epochs": 10,
        "learning_rate": 3e-3,
        "weight_decay": 0.1,
        "num_warmup_steps": 20,
        "lr_scheduler_type": "cosine",
        "eval_interval": 112,
    },
    "reward": {
        "data_split": SAMPLE_SPLIT,
        "max_seq_len": 128,
        "per_device_train_batch_size": 32,
        "per_device_eval_batch_size": 64,
        "num_train_epochs": 5,
        "learning_rate": 5e-4,
        "weight_decay": 0.1,
        "num_warmup_steps": 20,
    },
    # Scores are brought to one scale on the SFT model's answers; the rate falls to 0 and the KL coefficient is small,
    # which held the KL at 1.5 to 2 nats. Larger rates leave the neighbourhood that the reward model can judge.
    "ppo": {
        "data_split": SAMPLE_SPLIT,
        "max_prompt_seq_len": 96,
        "max_answer_seq_len": 32,
        "per_device_generation_batch_size": 128,
        "per_device_training_batch_size": 32,
        "gradient_accumulation_steps": 4,
        "num_train_epochs": 100,
        "max_steps": 80,
        "actor_learning_rate": 4e-4,
        "critic_learning_rate": 1e-3,
        "num_warmup_steps": 5,
        "lr_scheduler_type": "linear",
        "kl_ctl": 0.05,
        "normalize_scores": True,
        "eval_interval": 20,
    },
}

# A pretrained model: DeepSpeed-Chat's settings for its 1.3b actor and 350m reward model.
PRETRAINED: dict[str, Flags] = {
    "sft": {
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "learning_rate": 9.65e-6,
        "num_train_epochs": 2,
    },
    "reward": {
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "learning_rate": 5e-5,
        "weight_decay": 0.1,
        "dropout": 0.0,
    },
    "ppo": {
        "per_device_generation_batch_size": 8,
        "per_device_training_batch_size": 8,
        "actor_learning_rate": 9.65e-6,
        "critic_learning_rate": 5e-6,
        "actor_dropout": 0.0,
        "num_warmup_steps": 100,
        "num_eval_prompts": 64,
    },
}

# On top of it, as DeepSpeed-Chat's scripts for its larger OPT actors have it: adapters alone train.
LARGE_ACTORS = {"6.7b": 1, "13b": 2, "30b": 1, "66b": 8}  # processes that share one generating model
LARGE: dict[str, Flags] = {
    "sft": {"lora_dim": 128, "only_optimize_lora": True, "gradient_checkpointing": True},
    "reward": {},
    "ppo": {"actor_lora_dim": 128, "only_optimize_lora": True, "actor_gradient_checkpointing": True},
}

SAMPLE_MODEL = "recipe:llama-1m"
SAMPLE_DATA = "sample"
SAMPLE_JUDGE = "data.sample.gold:score"  # tells right answers from wrong ones, on the bundled prompts alone


def recipe(actor_model: str, data_path: list[str], world_size: int, estimator: str = "gae") -> dict[str, Flags]:
    """The recipe of an actor on its data, on `world_size` processes: ``{stage: {flag: value}}``."""
    chosen = SAMPLE if actor_model.startswith("recipe:") else PRETRAINED
    flags = {stage: dict(values) for stage, values in chosen.items()}
    if estimator in GROUPED:
        # as many answers as with one to a prompt
        prompts = flags["ppo"]["per_device_generation_batch_size"]
        flags["ppo"]["num_samples_per_prompt"] = GROUP_SIZE
        flags["ppo"]["per_device_generation_batch_size"] = max(1, prompts // GROUP_SIZE)
    sharing = LARGE_ACTORS.get(actor_model.removeprefix("facebook/opt-"))
    if sharing is not None:
        for stage, values in LARGE.items():
            flags[stage] |= values
        flags["ppo"]["inference_tp_size"] = sharing if world_size % sharing == 0 else 1
    if data_path == [SAMPLE_DATA] and not os.path.exists(SAMPLE_DATA):  # else it is a file or folder of one's own
        flags["ppo"]["gold_fn"] = SAMPLE_JUDGE
    return flags
