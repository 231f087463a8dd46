"""PPO's four models, each on an engine of its own, and their common checkpoints."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

import engine
from rlhf.choices import CRITIC_FREE
from rlhf.lora import WithoutAdapters, actor_lora, critic_lora
from rlhf.models import is_score_model, load_actor, load_score_model, load_tokenizer, new_score_model
from rlhf.ppo_options import uses_reward_model
from rlhf.retokenize import Retokenizer, same_tokens
from rlhf.rollout import Models
from rlhf.scoring import Scorer, function_source, http_source
from rlhf.training import checkpoint_folder, inference_config, save_model, train_config, training_engine


def load_models(args: Namespace, total_steps: int, tokenizer: Any) -> Models:
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
    actor_path = args.actor_model_name_or_path
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
            offload=args.offload or args.actor_offload,
        ),
        path=actor_path,
        gradient_checkpointing=args.actor_gradient_checkpointing,
        lora=actor_lora(args),
    )
    if args.actor_lora_dim and args.only_optimize_lora:
        reference = WithoutAdapters(actor)
    else:
        reference_config = inference_config(
            args, zero_stage=args.actor_zero_stage, micro_batch=micro_batch, offload=args.offload_reference_model
        )
        reference = engine.initialize(load_actor(actor_path, dropout=0.0), reference_config)
    models = Models(actor=actor, reference=reference, critic=None, scorer=load_scorer(args, tokenizer))
    if args.advantage_estimator not in CRITIC_FREE:
        models.critic_tokenizer = load_tokenizer(args.critic_model_name_or_path)
        models.critic = load_critic(args, total_steps, models.critic_tokenizer)
        if not same_tokens(tokenizer, models.critic_tokenizer):
            models.critic_words = Retokenizer(tokenizer, models.critic_tokenizer)
    return models


def load_critic(args: Namespace, total_steps: int, tokenizer: Any) -> engine.Engine:
    """The critic: a reward model, or any model's backbone with a head of zeros, which expects nothing of any state.

    `tokenizer` is the critic's, and gets a padding token of its own if a new head is put on.
    """
    path, dropout = args.critic_model_name_or_path, args.critic_dropout or 0.0
    if is_score_model(path):
        module = load_score_model(path, dropout=dropout)
        fresh = args.critic_head == "zero"
    else:
        module = new_score_model(path, tokenizer, seed=args.seed, dropout=dropout)
        fresh = True
    if fresh:
        torch.nn.init.zeros_(module.head.weight)
    return training_engine(
        module,
        train_config(
            args,
            zero_stage=args.critic_zero_stage,
            micro_batch=args.per_device_training_batch_size,
            learning_rate=args.critic_learning_rate,
            weight_decay=args.critic_weight_decay,
            total_steps=total_steps,
            offload=args.offload or args.critic_offload,
        ),
        path=path,
        gradient_checkpointing=args.critic_gradient_checkpointing,
        lora=critic_lora(args),
    )


def load_scorer(args: Namespace, tokenizer: Any) -> Scorer:
    """The reward sources that the flags name."""
    scorer = Scorer(tokenizer, model_weight=args.reward_model_weight)
    if uses_reward_model(args):
        path = args.reward_model_name_or_path
        config = inference_config(
            args,
            zero_stage=args.critic_zero_stage,
            micro_batch=args.per_device_training_batch_size,
            offload=args.offload_reward_model,
        )
        scorer.model = engine.initialize(load_score_model(path, dropout=0.0), config)
        own = load_tokenizer(path)
        scorer.words = None if same_tokens(tokenizer, own) else Retokenizer(tokenizer, own)
    sources = []
    if args.reward_fn:
        sources.append((function_source(args.reward_fn), args.reward_fn_weight))
    if args.reward_url:
        sources.append((http_source(args.reward_url, args.reward_timeout), args.reward_url_weight))
    scorer.sources = sources
    return scorer


def save_models(args: Namespace, models: Models, tokenizer: Any) -> None:
    """The Hugging Face folders `actor`, `critic` and `actor_ema` of the output. Collective."""
    output = Path(args.output_dir)
    save_model(models.actor, tokenizer, output / "actor")
    if models.critic is not None:
        # its own tokenizer: the stock classes find a text's end by its padding token, which the actor's may lack
        save_model(models.critic, models.critic_tokenizer, output / "critic")
    if args.enable_ema:
        save_model(models.actor, tokenizer, output / "actor_ema", ema=True)


def save(args: Namespace, models: Models, kept: dict[str, Any], iteration: int) -> None:
    """All engines under one tag, and with each the states of `kept`: the last one's `latest` names a tag all have."""
    state = {"iteration": iteration, **{name: part.state_dict() for name, part in kept.items()}}
    for name, trained in _trained(models).items():
        trained.save_checkpoint(checkpoint_folder(args, name), tag=f"iteration{iteration}", client_state=state)


def resume(args: Namespace, models: Models, kept: dict[str, Any]) -> int:
    """Load the last checkpoint that all engines have, and the states of `kept`; returns its iteration."""
    trained = _trained(models)
    last = list(trained)[-1]
    path, state = trained[last].load_checkpoint(checkpoint_folder(args, last))
    for name, model in trained.items():
        if name != last:
            model.load_checkpoint(checkpoint_folder(args, name), tag=path.name)
    for name, part in kept.items():
        part.load_state_dict(state[name])
    return state["iteration"]


def _trained(models: Models) -> dict[str, Any]:
    trained = {"actor": models.actor, "critic": models.critic}
    return {name: model for name, model in trained.items() if model is not None}
