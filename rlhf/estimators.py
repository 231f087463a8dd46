"""Advantage estimators: what a token was worth beyond what was to be expected.

gae asks a critic what was to be expected. The others need none: grpo and rloo ask the other answers to the same
prompt, remax the greedy answer to it, and reinforce++ the whole batch.

Answers to one prompt lie side by side: `[B]` is prompts times `group_size`. `[B, T]` as in `rlhf.advantage`.
"""

from __future__ import annotations

import torch

from rlhf.advantage import gae
from rlhf.choices import GROUPED

STD_FLOOR = 1e-6


def estimate_advantages(
    estimator: str,
    rewards: torch.Tensor,
    mask: torch.Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    values: torch.Tensor | None = None,
    group_size: int = 1,
    scale_by_std: bool = True,
    baseline: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Advantages of every response token by one of `rlhf.choices.ESTIMATORS`, not yet whitened.

    Args:
        rewards: `[B, T]`, KL penalty and score in them. mask: `[B, T]` bool.
        gamma, lam: of gae; gamma also of the sums of later rewards in reinforce++ and remax.
        values: `[B, T]`, the critic's (gae).
        group_size: answers a prompt (grpo, rloo).
        scale_by_std: grpo divides by the group's standard deviation.
        baseline: `[B]`, the score of the greedy answer to the same prompt (remax).

    Returns:
        (advantages, returns for the critic or None), `[B, T]` fp32, without gradient, 0 where masked.
    """
    if estimator == "gae":
        return gae(rewards, values, mask, gamma, lam)
    if estimator in GROUPED:
        totals = torch.where(mask, rewards.detach().double(), 0.0).sum(1)
        worth = grpo(totals, group_size, scale_by_std) if estimator == "grpo" else rloo(totals, group_size)
        advantages = worth.unsqueeze(1).expand(mask.shape)
    else:
        advantages = rewards_to_go(rewards, mask, gamma)
        if estimator == "remax":
            advantages = advantages - baseline.detach().float().unsqueeze(1)
    return torch.where(mask, advantages.float(), 0.0), None


def grpo(totals: torch.Tensor, group_size: int, scale_by_std: bool = True) -> torch.Tensor:
    """`(R - mean) / std` within each group (Shao et al. 2024), `[B] -> [B]`; the sample's standard deviation.

    Without the division (Dr. GRPO, Liu et al. 2025) a group of nearly equal answers counts as little as it tells.
    A group whose totals are all equal tells nothing: 0.
    """
    groups = totals.double().view(-1, group_size)
    centred = _centred(groups)
    if scale_by_std:
        centred = centred / (groups.std(1, keepdim=True) + STD_FLOOR)
    return centred.flatten().to(totals.dtype)


def rloo(totals: torch.Tensor, group_size: int) -> torch.Tensor:
    """`R` minus the mean of the group's others, leave-one-out (Ahmadian et al. 2024), `[B] -> [B]`."""
    groups = totals.double().view(-1, group_size)
    return (_centred(groups) * group_size / (group_size - 1)).flatten().to(totals.dtype)


def _centred(groups: torch.Tensor) -> torch.Tensor:
    """Groups minus their means; exactly 0 where all are equal, which the mean's rounding would spoil."""
    alike = groups.amax(1, keepdim=True) == groups.amin(1, keepdim=True)
    return torch.where(alike, 0.0, groups - groups.mean(1, keepdim=True))


def rewards_to_go(rewards: torch.Tensor, mask: torch.Tensor, gamma: float) -> torch.Tensor:
    """`G_t = r_t + gamma G_{t+1}` over the response tokens, `[B, T]` fp32, 0 where masked."""
    total = torch.zeros_like(rewards, dtype=torch.float32)
    following = total.new_zeros(len(total))
    for t in reversed(range(rewards.shape[1])):
        following = torch.where(mask[:, t], rewards[:, t].detach().float() + gamma * following, following)
        total[:, t] = torch.where(mask[:, t], following, 0.0)
    return total
