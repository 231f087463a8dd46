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
from rlhf.ppo_configs import actor_config, critic_config, reference_config, reward_config
from rlhf.ppo_options import shares_reference, uses_reward_model
from rlhf.retokenize import Retokenizer, same_tokens
from rlhf.rollout import Models
from rlhf.scoring import Scorer, function_source, http_source
from rlhf.training import checkpoint_folder, save_model, training_engine


def load_models(args: Namespace, total_steps: int, tokenizer: Any) -> Models:
    """Actor and critic to train, reference and reward model to ask; each on an engine of its own.

    Dropout is off in all of them unless asked for by flag: with it the first ratio would not be 1.
    """
    actor_path = args.actor_model_name_or_path
    actor = training_engine(
        load_actor(actor_path, dropout=args.actor_dropout or 0.0),
        actor_config(args, total_steps),
        path=actor_path,
        gradient_checkpointing=args.actor_gradient_checkpointing,
        lora=actor_lora(args),
    )
    if shares_reference(args):
        reference = WithoutAdapters(actor)
    else:
        reference = engine.initialize(load_actor(actor_path, dropout=0.0), reference_config(args))
    models = Models(actor=actor, reference=reference, critic=None, scorer=load_scorer(args, tokenizer))
    if args.advantage_estimator not in CRITIC_FREE:
        models.critic_tokenizer = load_tokenizer(args.critic_model_name_or_path)
        models.critic = load_critic(args, total_steps, models.critic_tokenizer)
        if not same_tokens(tokenizer, models.critic_tokenizer):
            models.critic_words = Retokenizer(tokenizer, models.critic_tokenizer)
    return models


def load_critic(args: Namespace, total_steps: int, tokenizer: Any) -> engine.Engine:
    """The critic: a reward model, or any model's backbone with a head of zeros, which expects nothing of any state.

    `tokenizer` is the critic's, and gets a padding token of its own if a new head is put on. Settles
    `args.critic_head` where it is open.
    """
    path, dropout = args.critic_model_name_or_path, args.critic_dropout or 0.0
    if is_score_model(path):
        args.critic_head = args.critic_head or "keep"
        module = load_score_model(path, dropout=dropout)
    else:
        if args.critic_head == "keep":
            raise ValueError(
                f"--critic_head keep: {path} is no reward model and has no score head; leave the flag out, or give one"
            )
        args.critic_head = "zero"
        module = new_score_model(path, tokenizer, seed=args.seed, dropout=dropout)
    if args.critic_head == "zero":
        torch.nn.init.zeros_(module.head.weight)
    return training_engine(
        module,
        critic_config(args, total_steps),
        path=path,
        gradient_checkpointing=args.critic_gradient_checkpointing,
        lora=critic_lora(args),
    )


def load_scorer(args: Namespace, tokenizer: Any) -> Scorer:
    """The reward sources that the flags name."""
    scorer = Scorer(tokenizer, model_weight=args.reward_model_weight)
    if uses_reward_model(args):
        path = args.reward_model_name_or_path
        scorer.model = engine.initialize(load_score_model(path, dropout=0.0), reward_config(args))
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


def last_checkpoints(args: Namespace) -> Path:
    """The folder whose `latest` names a tag that all engines have: `save` writes it last."""
    return checkpoint_folder(args, "actor" if args.advantage_estimator in CRITIC_FREE else "critic")


def resume(args: Namespace, models: Models, kept: dict[str, Any]) -> int:
    """Load the last checkpoint that all engines have, and the states of `kept`; returns its iteration."""
    trained = _trained(models)
    last = list(trained)[-1]
    path, state = trained[last].load_checkpoint(checkpoint_folder(args, last))
    for name, model in trained.items():
        if name != last:
            model.load_checkpoint(checkpoint_folder(args, name), tag=path.name)
    for name, part in kept.items():
        if name not in state:
            raise ValueError(
                f"{path} has no state of {name!r}: resume with the flags of the run that wrote it, or start anew"
            )
        part.load_state_dict(state[name])
    return state["iteration"]


def _trained(models: Models) -> dict[str, Any]:
    trained = {"actor": models.actor, "critic": models.critic}
    return {name: model for name, model in trained.items() if model is not None}
