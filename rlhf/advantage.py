"""From scores to advantages: rewards with the KL penalty, generalised advantage estimation, whitening.

`[B, T]` is batch by response positions; masks are boolean, True on response tokens with their end token.
Whatever stands in masked slots (NaN included) has no influence, and results are 0 there.
"""

from __future__ import annotations

import torch

from engine.distributed import all_reduce_sums
from rlhf.kl import kl_estimate

VARIANCE_FLOOR = 1e-8  # keeps a batch of nearly equal advantages finite
ROUNDING = 1e-7  # relative spread below which fp32 numbers are all the same


def shape_rewards(
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    scores: torch.Tensor,
    mask: torch.Tensor,
    kl_ctl: float,
    clip_reward_value: float | None,
    kl_estimator: str = "k1",
) -> torch.Tensor:
    """A reward for every token: the KL penalty on each, and the clipped score once, on the last one.

    Args:
        logprobs, ref_logprobs: `[B, T]` of the sampled tokens under the sampling policy and the reference.
        scores: `[B]`, one a response.
        mask: `[B, T]` bool.
        kl_ctl: weight of the penalty, `-kl_ctl * (logprobs - ref_logprobs)` with the estimator k1.
        clip_reward_value: scores are cut to +- this; None leaves them.

    Returns:
        `[B, T]` fp32, without gradient. A response without any token gets no score.
    """
    penalty = kl_estimate(logprobs.detach(), ref_logprobs.detach(), kl_estimator)
    rewards = torch.where(mask, -kl_ctl * penalty, 0.0)
    scores = scores.detach().float()
    if clip_reward_value is not None:
        scores = scores.clamp(-clip_reward_value, clip_reward_value)
    return rewards + torch.where(last_token(mask), scores.unsqueeze(1), 0.0)


def shape_scores(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    finished: torch.Tensor,
    *,
    clip: float | None,
    missing_eos_penalty: float = 0.0,
    max_length: int = 0,
    overlong_buffer: int = 0,
    overlong_penalty: float = 0.0,
) -> torch.Tensor:
    """Scores clipped to +-`clip`, less what an answer pays for being cut off and for being overlong, `[B]`.

    Overlong (DAPO, Yu et al. 2025): within the last `overlong_buffer` tokens before `max_length` the penalty grows in
    proportion from 0 to `overlong_penalty`. Penalties come after the clip, so that they always count.

    Args:
        lengths: `[B]` tokens of each answer. finished: `[B]` bool, ended by an end token.
    """
    shaped = scores.detach().float()
    if clip is not None:
        shaped = shaped.clamp(-clip, clip)
    shaped = shaped - missing_eos_penalty * (~finished)
    if overlong_buffer:
        over = (lengths - (max_length - overlong_buffer)).clamp(min=0) / overlong_buffer
        shaped = shaped - overlong_penalty * over
    return shaped


def last_token(mask: torch.Tensor) -> torch.Tensor:
    """`[B, T]` bool: True on the last True of each row of `mask`."""
    after = mask.flip(1).cumsum(1).flip(1)  # True slots from here on
    return mask & (after == 1)


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016), from the last response token backwards.

    `delta_t = r_t + gamma V_{t+1} - V_t`, `A_t = delta_t + gamma lam A_{t+1}`, with V and A beyond the last
    response token 0, cut-off responses included. A masked slot between response tokens is stepped over.

    Args:
        rewards, values: `[B, T]`; mask: `[B, T]` bool.

    Returns:
        (advantages, returns = advantages + values), `[B, T]` fp32 each, without gradient.
    """
    rewards, values = rewards.detach().float(), values.detach().float()
    advantages = torch.zeros_like(values)
    next_value = next_advantage = values.new_zeros(values.shape[0])
    for t in reversed(range(values.shape[1])):
        real = mask[:, t]
        advantage = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * next_advantage
        next_advantage = torch.where(real, advantage, next_advantage)
        next_value = torch.where(real, values[:, t], next_value)
        advantages[:, t] = torch.where(real, advantage, 0.0)
    return advantages, advantages + torch.where(mask, values, 0.0)


def whiten(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`x` shifted and scaled to mean 0 and (population) standard deviation 1 over the masked tokens of all ranks.

    Collective when torch.distributed is up: every rank must call it, one without any token too. `[B, T]` fp32,
    0 where masked. One single token, or all tokens alike, give 0.
    """
    mean, variance, _ = global_moments(x, mask)
    if variance <= (ROUNDING * mean) ** 2:
        return torch.zeros_like(x, dtype=torch.float32)  # all alike: what is left is rounding
    whitened = (x.double() - mean) / (variance + VARIANCE_FLOOR) ** 0.5
    return torch.where(mask, whitened, 0.0).float()


def global_moments(x: torch.Tensor, mask: torch.Tensor) -> tuple[float, float, int]:
    """Mean, population variance and number of the masked entries of all ranks. Collective; 0, 0, 0 without any.

    In two passes of float64: a difference of large sums would lose the variance of a near constant batch.
    """
    entries = x.detach()[mask].double()
    total, count = all_reduce_sums([float(entries.sum()), entries.numel()])
    mean = total / max(count, 1.0)
    squares = all_reduce_sums([float((entries - mean).square().sum())])[0]
    return mean, squares / max(count, 1.0), int(count)


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
    """`1 - Var(returns - values) / Var(returns)` over the masked tokens of all ranks; 0 where returns do not vary.

    1: the critic foresees every return; 0: no better than a constant; negative: worse. Collective.
    """
    returns = returns.detach().double()
    _, residual, _ = global_moments(returns - values.detach().double(), mask)
    _, total, _ = global_moments(returns, mask)
    return 1.0 - residual / total if total > 0 else 0.0
