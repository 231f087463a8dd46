"""One PPO update: an experience cut into micro-batches, and the step of actor and critic on each."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

import torch

from rlhf.experience import Experience, response_logprobs
from rlhf.losses import policy_loss, value_loss
from rlhf.models import response_values
from rlhf.ppo_metrics import update_sums
from rlhf.ptx import PTX
from rlhf.rollout import Models


def micro_batches(experience: Experience, args: Namespace, iteration: int) -> Iterator[Experience]:
    """The experience in micro-batches, `--ppo_epochs` times, each time in a fresh order."""
    generator = torch.Generator().manual_seed(args.seed + iteration)
    size, window = args.per_device_training_batch_size, args.gradient_accumulation_steps
    if -(-len(experience) // size) % window:
        window = 1  # updates reach over the end of an epoch: sorted rows would give each other lengths, not a fair mix
    for _ in range(args.ppo_epochs):
        for batch in experience.micro_batches(size, generator, window):
            yield batch.trimmed()


def update(models: Models, batch: Experience, args: Namespace, ptx: PTX | None):
    """One micro-batch of both losses, and a step of both engines; returns the figures for the metrics.

    Both losses are means over the response tokens of the whole minibatch, over micro-batches and ranks. A PTX
    batch comes with each micro-batch, in its weight.
    """
    actor, critic = models.actor, models.critic
    ids, mask, length = batch.input_ids, batch.attention_mask, batch.response_length
    tokens = int(batch.response_mask.sum())

    actor.train()
    logprobs = response_logprobs(actor, ids, mask, length, args.temperature)
    actor_loss, actor_figures = policy_loss(
        logprobs, batch.logprobs, batch.advantages, batch.response_mask, args.cliprange
    )
    ptx_loss = ptx.loss(actor) if ptx else None
    actor.backward(actor_loss + args.unsup_coef * ptx_loss if ptx else actor_loss, weight=tokens)
    actor.step()

    critic.train()
    new_values = response_values(critic, ids, mask, length)
    critic_loss, critic_figures = value_loss(
        new_values, batch.values, batch.returns, batch.response_mask, args.cliprange_value
    )
    critic_loss = critic.backward(critic_loss, weight=tokens)
    critic.step()
    return update_sums(actor_loss.detach(), critic_loss, ptx_loss, {**actor_figures, **critic_figures}, batch)
