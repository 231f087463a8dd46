"""PPO's four models, each on an engine of its own, and their common checkpoints."""

from __future__ import annotations

from argparse import Namespace

import engine
from rlhf.feed import Feed
from rlhf.lora import WithoutAdapters, actor_lora, critic_lora
from rlhf.models import load_actor, load_score_model
from rlhf.rollout import Models
from rlhf.score_scale import ScoreScale
from rlhf.training import checkpoint_folder, inference_config, train_config, training_engine


def load_models(args: Namespace, total_steps: int) -> Models:
    """Actor and critic to train, reference and reward model to ask; each on an engine of its own.

    Dropout is off in all of them unless asked for by flag: with it the first ratio would not be 1.
    """
    micro_batch = args.per_device_training_batch_size
    hybrid = {
        "enabled": True,
        "max_out_tokens": args.max_prompt_seq_len + args.max_answer_seq_len,
        "inference_tp_size": args.inference_tp_size,
        "release_inference_cache": args.release_inference_cache,
        "pin_parameters": not args.unpin_actor_parameters,
        "tp_gather_partition_size": args.tp_gather_partition_size,
    }
    actor_path, critic_path = args.actor_model_name_or_path, args.critic_model_name_or_path
    reward_path = args.reward_model_name_or_path or critic_path
    actor = training_engine(
        load_actor(actor_path, dropout=args.actor_dropout or 0.0),
        train_config(
            args,
            zero_stage=args.actor_zero_stage,
            micro_batch=micro_batch,
            learning_rate=args.actor_learning_rate,
            weight_decay=args.actor_weight_decay,
            total_steps=total_steps,
            hybrid_engine=hybrid,
        ),
        path=actor_path,
        gradient_checkpointing=args.actor_gradient_checkpointing,
        lora=actor_lora(args),
    )
    critic = training_engine(
        load_score_model(critic_path, dropout=args.critic_dropout or 0.0),
        train_config(
            args,
            zero_stage=args.critic_zero_stage,
            micro_batch=micro_batch,
            learning_rate=args.critic_learning_rate,
            weight_decay=args.critic_weight_decay,
            total_steps=total_steps,
        ),
        path=critic_path,
        gradient_checkpointing=args.critic_gradient_checkpointing,
        lora=critic_lora(args),
    )
    if args.actor_lora_dim and args.only_optimize_lora:
        reference = WithoutAdapters(actor)
    else:
        offload = args.offload_reference_model
        reference_config = inference_config(
            args, zero_stage=args.actor_zero_stage, micro_batch=micro_batch, offload=offload
        )
        reference = engine.initialize(load_actor(actor_path, dropout=0.0), reference_config)
    reward_config = inference_config(
        args, zero_stage=args.critic_zero_stage, micro_batch=micro_batch, offload=args.offload_reward_model
    )
    return Models(
        actor=actor,
        reference=reference,
        critic=critic,
        reward=engine.initialize(load_score_model(reward_path, dropout=0.0), reward_config),
    )


def save(args: Namespace, models: Models, scale: ScoreScale, kl, prompts: Feed, iteration: int) -> None:
    """Both engines under one tag, the critic last: its `latest` names a tag that both have."""
    state = {
        "iteration": iteration,
        "score_scale": scale.state_dict(),
        "kl": kl.state_dict(),
        "data": prompts.state_dict(),
    }
    tag = f"iteration{iteration}"
    models.actor.save_checkpoint(checkpoint_folder(args, "actor"), tag=tag, client_state=state)
    models.critic.save_checkpoint(checkpoint_folder(args, "critic"), tag=tag, client_state=state)


def resume(args: Namespace, models: Models, scale: ScoreScale, kl, prompts: Feed) -> int:
    """Load the last checkpoint that both engines have; returns the iteration to go on after."""
    path, state = models.critic.load_checkpoint(checkpoint_folder(args, "critic"))
    models.actor.load_checkpoint(checkpoint_folder(args, "actor"), tag=path.name)
    scale.load_state_dict(state["score_scale"])
    kl.load_state_dict(state["kl"])
    prompts.load_state_dict(state["data"])
    return state["iteration"]
