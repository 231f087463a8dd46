"""Estimators of the KL divergence from samples, and the controllers of its coefficient in the reward.

With `d = log p(a) - log q(a)` for an action `a` sampled from p, three estimators of KL(p, q) in nats, none of
which needs the whole distribution: k1 = d (unbiased, may be negative), k2 = d^2 / 2 (biased, low variance),
k3 = exp(-d) - 1 + d (unbiased, never negative).

In the reward an estimate is a number; in the loss its gradient counts. That of k2, d * grad log p, is the gradient
of the KL itself on answers sampled from p. That of k1 has mean zero, so k1 in the loss borrows k2's; that of k3 is
biased (GRPO uses it as it is), and k3+ is k3's value with k2's gradient.
"""

from __future__ import annotations

import torch

MAX_LOG_DIFFERENCE = 20.0  # keeps exp finite; a token this improbable is far outside any trust region
ROUNDING = 1e-5  # by which fp32 log-probabilities of the same weights may differ in another batch
MAX_K3 = 10.0  # one token whose probability has collapsed must not outweigh all others


def kl_k1(difference: torch.Tensor) -> torch.Tensor:
    return difference.float()


def kl_k2(difference: torch.Tensor) -> torch.Tensor:
    return 0.5 * difference.float().square()


def kl_k3(difference: torch.Tensor) -> torch.Tensor:
    difference = difference.float().clamp(-MAX_LOG_DIFFERENCE, MAX_LOG_DIFFERENCE)
    return (torch.expm1(-difference) + difference).clamp(max=MAX_K3)


ESTIMATORS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def kl_estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, kind: str = "k1") -> torch.Tensor:
    """A token's estimate of KL(policy, reference), in nats, of the shape of its arguments.

    Raises:
        ValueError: `kind` is not k1, k2 or k3.
    """
    if kind not in ESTIMATORS:
        raise ValueError(f"unknown KL estimator {kind!r}: choose one of {', '.join(ESTIMATORS)}")
    return ESTIMATORS[kind](logprobs.float() - ref_logprobs.float())


def kl_loss_terms(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, kind: str) -> torch.Tensor:
    """A token's KL term in the loss: the estimate as its value, with the gradient that the module's docstring names.

    Args:
        logprobs, ref_logprobs: `[B, T]`; the gradient flows through `logprobs` alone.
        kind: one of `rlhf.choices.LOSS_ESTIMATORS`.
    """
    ref_logprobs = ref_logprobs.detach()
    # of equal weights: only rounding tells them apart, and Adam would blow its gradient up to a whole step
    is_rounding = (logprobs.detach() - ref_logprobs).abs() < ROUNDING
    logprobs = torch.where(is_rounding, ref_logprobs, logprobs)
    estimate = kl_estimate(logprobs, ref_logprobs, kind.removesuffix("+"))
    if kind not in ("k1", "k3+"):
        return estimate
    gradient = kl_k2(logprobs.float() - ref_logprobs.float())
    return estimate.detach() + gradient - gradient.detach()


class FixedKL:
    """A KL coefficient that stays: `value`."""

    def __init__(self, value: float):
        self.value = value

    def update(self, kl: float, sequences: int) -> None:
        pass

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


class AdaptiveKL(FixedKL):
    """A KL coefficient steered towards a target KL (Ziegler et al. 2019, section 2.2).

    `value *= 1 + clip(kl / target - 1, -0.2, 0.2) * sequences / horizon`. `target` and the `kl` of `update`
    are nats a sequence: the sum over a response's tokens, averaged over responses; `horizon` counts sequences.
    """

    def __init__(self, value: float, target: float, horizon: float):
        if target <= 0 or horizon <= 0:
            raise ValueError(f"adaptive KL needs a positive target and horizon, not {target} and {horizon}")
        super().__init__(value)
        self.target, self.horizon = target, horizon

    def update(self, kl: float, sequences: int) -> None:
        """Take in the mean KL of `sequences` responses (all ranks' together, so that ranks agree)."""
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        # A batch beyond five horizons would turn the coefficient negative: a reward for leaving the reference.
        self.value *= max(0.0, 1.0 + error * sequences / self.horizon)


def make_controller(kl_ctl: float, target_kl: float | None = None, kl_horizon: float | None = None) -> FixedKL:
    """Adaptive where a target is given (then with a horizon), else fixed at `kl_ctl`."""
    if target_kl is None:
        return FixedKL(kl_ctl)
    return AdaptiveKL(kl_ctl, target_kl, kl_horizon or 0.0)
