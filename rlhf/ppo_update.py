"""One micro-batch of a PPO update: the losses of actor and critic, and a step of both engines."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

from rlhf.activations import activation_bytes
from rlhf.experience import Experience, response_logprobs, response_logprobs_and_entropy
from rlhf.kl import kl_loss_terms
from rlhf.losses import aggregate, masked_mean, policy_loss, sampler_weights, units, value_loss
from rlhf.models import critic_values
from rlhf.ppo_metrics import UpdateFigures
from rlhf.ptx import PTX
from rlhf.rollout import Models


def update(
    models: Models, batch: Experience, args: Namespace, *, kl_ctl: float, ptx: PTX | None, is_last: bool | None
) -> UpdateFigures:
    """One micro-batch of both losses, and a step of both engines; returns the figures for the metrics. Collective.

    Both losses are means over the whole minibatch, over micro-batches and ranks. A PTX batch comes with each
    micro-batch, in its weight. `is_last`: whether the micro-batch closes its update; None: the engines count.
    """
    actor, critic = models.actor, models.critic
    if is_last is not None:
        for engine in (actor, critic):
            if engine is not None:
                engine.set_gradient_accumulation_boundary(is_last)
    weight = units(batch.loss_mask, args.loss_aggregation)
    tokens = int(batch.loss_mask.sum())

    actor.train()
    with activation_bytes(actor.module) as kept:
        loss, figures = actor_loss(actor, batch, args, kl_ctl)
        ptx_loss = ptx.loss(actor) if ptx else None
    actor.backward(loss + args.unsup_coef * ptx_loss if ptx else loss, weight=weight)
    aligned = args.align_overflow and critic is not None
    if not aligned:
        actor.step()

    critic_loss = None
    if critic is not None:
        critic.train()
        with activation_bytes(critic.module) as kept_by_critic:
            new_values = critic_values(critic, batch)
        critic_loss, critic_figures = value_loss(
            new_values, batch.values, batch.returns, batch.loss_mask, args.cliprange_value
        )
        kept += kept_by_critic
        critic_loss = critic.backward(critic_loss, weight=tokens)
        figures |= critic_figures
        if aligned:
            step_together(actor, critic)
        else:
            critic.step()
    sizes = {"tokens": tokens, "units": weight, "activations": max(kept)}
    return UpdateFigures(loss.detach(), critic_loss, ptx_loss, figures, **sizes)


def actor_loss(
    actor: Any, batch: Experience, args: Namespace, kl_ctl: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped policy loss, with the KL to the reference and an entropy bonus in it where asked for."""
    ids, attention, mask = batch.input_ids, batch.attention_mask, batch.loss_mask
    entropy = None
    if args.entropy_coef:
        logprobs, entropy = response_logprobs_and_entropy(
            actor, ids, attention, batch.response_length, args.temperature
        )
    else:
        logprobs = response_logprobs(actor, ids, attention, batch.response_length, args.temperature)
    weights = sampler_weights(batch.logprobs, batch.gen_logprobs, args.tis_cap) if args.tis_cap else None
    loss, figures = policy_loss(
        logprobs,
        batch.logprobs,
        batch.advantages,
        mask,
        args.cliprange,
        cliprange_high=args.cliprange_high,
        dual_clip=args.dual_clip,
        weights=weights,
        aggregation=args.loss_aggregation,
    )
    if weights is not None:
        figures["tis_weight_mean"] = masked_mean(weights, mask)
    if args.kl_in == "loss":
        terms = kl_loss_terms(logprobs, batch.ref_logprobs, args.kl_estimator)
        loss = loss + kl_ctl * aggregate(terms, mask, args.loss_aggregation)
        figures["kl_loss"] = masked_mean(terms.detach(), mask)
    if entropy is not None:
        loss = loss - args.entropy_coef * aggregate(entropy, mask, args.loss_aggregation)
    return loss, figures


def step_together(actor: Any, critic: Any) -> None:
    """Both engines' steps; at a boundary where one gradient is not finite, neither model changes (--align_overflow)."""
    if not actor.is_gradient_accumulation_boundary():
        actor.step()
        critic.step()
        return
    in_actor, in_critic = actor.has_overflow(), critic.has_overflow()
    actor.step(skip=in_critic)
    critic.step(skip=in_actor)
