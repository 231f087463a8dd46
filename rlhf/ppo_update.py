"""One micro-batch of a PPO update: the losses of actor and critic, and a step of both engines."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

from engine.distributed import all_reduce_sums
from rlhf.activations import activation_bytes
from rlhf.experience import Experience, response_logprobs, response_logprobs_and_entropy
from rlhf.kl import kl_loss_terms
from rlhf.losses import aggregate, masked_mean, policy_loss, sampler_weights, units, value_loss
from rlhf.micro_batches import Part
from rlhf.models import critic_values
from rlhf.ppo_metrics import UpdateFigures
from rlhf.ptx import PTX
from rlhf.rollout import Models


def update(models: Models, part: Part, args: Namespace, *, kl_ctl: float, ptx: PTX | None) -> UpdateFigures:
    """One micro-batch of both losses, and a step of both engines; returns the figures for the metrics. Collective.

    Both losses are means over the whole minibatch, over micro-batches and ranks, and so is the PTX loss, of one text
    block an answer.
    """
    actor, critic, batch = models.actor, models.critic, part.batch
    if part.is_last is not None:
        for engine in (actor, critic):
            if engine is not None:
                engine.set_gradient_accumulation_boundary(part.is_last)
    weight = units(batch.loss_mask, args.loss_aggregation)
    tokens = int(batch.loss_mask.sum())

    actor.train()
    with activation_bytes(actor.module) as kept:
        loss, figures = actor_loss(actor, batch, args, kl_ctl)
        ptx_loss = ptx.loss(actor, len(batch)) if ptx else None
    if ptx is None:
        actor.backward(loss, weight=weight)
    else:
        actor.backward(*with_ptx(loss, weight, args.unsup_coef * ptx_loss, part, args.loss_aggregation))
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
    sizes = {"tokens": tokens, "units": weight, "blocks": len(batch), "activations": max(kept)}
    return UpdateFigures(loss.detach(), critic_loss, ptx_loss.detach() if ptx else None, figures, **sizes)


def with_ptx(
    loss: torch.Tensor, weight: int, ptx_term: torch.Tensor, part: Part, aggregation: str
) -> tuple[torch.Tensor, float]:
    """The sum of a policy loss, a mean over `weight` units, and a PTX term, a mean over as many blocks as the part has
    answers; and what the sum weighs in its update. Collective.

    Each is to be a mean over the update by its own count. So the sum weighs as its blocks do, and the policy loss has
    its share of the units times that of all blocks over its own. In an update that reaches over iterations, whose units
    are not known before its end, the blocks weigh as the units beside them.
    """
    if part.update is None:
        return loss + ptx_term, weight
    blocks = len(part.batch)
    mask = part.update.loss_mask
    all_units, all_blocks = all_reduce_sums([units(mask, aggregation), len(mask)])
    share = weight / all_units if all_units else 0.0
    return loss * (share * all_blocks / blocks) + ptx_term, blocks


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
