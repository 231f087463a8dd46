"""The engines' configs of PPO's four models, as its flags ask for them."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from rlhf.training import inference_config, train_config


def actor_config(args: Namespace, total_steps: int) -> dict[str, Any]:
    """The actor trains and generates."""
    return train_config(
        args,
        zero_stage=args.actor_zero_stage,
        micro_batch=args.per_device_training_batch_size,
        learning_rate=args.actor_learning_rate,
        weight_decay=args.actor_weight_decay,
        total_steps=total_steps,
        hybrid_engine={
            "enabled": True,
            "max_out_tokens": args.max_prompt_seq_len + args.max_answer_seq_len,
            "inference_tp_size": args.inference_tp_size,
            "release_inference_cache": args.release_inference_cache,
            "pin_parameters": not args.unpin_actor_parameters,
            "tp_gather_partition_size": args.tp_gather_partition_size,
        },
        offload=args.offload or args.actor_offload,
    )


def critic_config(args: Namespace, total_steps: int) -> dict[str, Any]:
    return train_config(
        args,
        zero_stage=args.critic_zero_stage,
        micro_batch=args.per_device_training_batch_size,
        learning_rate=args.critic_learning_rate,
        weight_decay=args.critic_weight_decay,
        total_steps=total_steps,
        offload=args.offload or args.critic_offload,
    )


def reference_config(args: Namespace) -> dict[str, Any]:
    return inference_config(
        args,
        zero_stage=args.actor_zero_stage,
        micro_batch=args.per_device_training_batch_size,
        offload=args.offload_reference_model,
    )


def reward_config(args: Namespace) -> dict[str, Any]:
    return inference_config(
        args,
        zero_stage=args.critic_zero_stage,
        micro_batch=args.per_device_training_batch_size,
        offload=args.offload_reward_model,
    )
