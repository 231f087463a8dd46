"""The figures of one PPO step: sums over tokens and answers of all ranks, then means, once a step.

No mean is taken before everything has been added up, so that the figures do not depend on how a batch was cut
into micro-batches or ranks; no padding enters any of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.distributed import all_reduce_sums
from rlhf.experience import Experience
from rlhf.metrics import MetricAccumulator
from rlhf.rollout import Rollout

Sums = dict[str, tuple[float, float]]  # name -> (sum, count)


@dataclass
class UpdateFigures:
    """What one micro-batch gave: losses (None: there is no such model or data) and diagnostics, means over tokens.

    `actor_loss` is a mean over `units` (tokens or answers), `ptx_loss` over `blocks` of text, the rest over `tokens`.
    `activations`: bytes kept for the backward pass, by the actor or by the critic, whichever keeps more.
    """

    actor_loss: torch.Tensor
    critic_loss: torch.Tensor | None
    ptx_loss: torch.Tensor | None
    figures: dict[str, torch.Tensor]
    tokens: int
    units: int
    blocks: int = 0
    activations: int = 0

    def sums(self) -> tuple[Sums, dict[str, float]]:
        """(sum, count) pairs and maxima."""
        means = {name: value for name, value in self.figures.items() if name in UPDATE_MEANS}
        means |= {"critic_loss": self.critic_loss} if self.critic_loss is not None else {}
        sums = {k: (float(v.detach()) * self.tokens, float(self.tokens)) for k, v in means.items()}
        sums["actor_loss"] = (float(self.actor_loss) * self.units, float(self.units))
        if self.ptx_loss is not None:
            sums["ptx_loss"] = (float(self.ptx_loss) * self.blocks, float(self.blocks))
        return sums, {"ratio_max": float(self.figures["ratio_max"]), "activation_bytes": float(self.activations)}


class StepMetrics:
    """Collects what one optimizer step saw; `flush` gives its line of metrics and starts the next."""

    def __init__(self) -> None:
        self.last_kl = 0.0
        self._rollout_line: dict[str, float] = {}
        self._means = MetricAccumulator()
        self._start()

    def _start(self) -> None:
        self._tokens = self._generated = 0.0
        self._seconds = {"generate_seconds": 0.0, "score_seconds": 0.0, "train_seconds": 0.0}

    def add(self, sums: Sums, maxima: dict[str, float] | None = None) -> None:
        """Add (sum, count) pairs and maxima of this rank."""
        for name, (total, count) in sums.items():
            self._means.add(name, total, count)
        for name, value in (maxima or {}).items():
            self._means.add_max(name, value)

    def add_generated(self, tokens: float) -> None:
        """Tokens that were generated beside the rollout's."""
        self._generated += tokens

    def add_rollout(
        self, rollout: Rollout, experience: Experience, kl_coef: float, generate_seconds: float, score_seconds: float
    ) -> None:
        """Add one rollout. Collective: `last_kl` becomes its mean KL to the reference over all ranks' answers."""
        sums, maxima = rollout_sums(rollout, experience, kl_coef)
        self.add(sums, maxima)
        self._tokens += float(experience.attention_mask.sum())
        self._generated += float(experience.response_mask.sum())
        self.add_seconds("generate_seconds", generate_seconds)
        self.add_seconds("score_seconds", score_seconds)
        total, count = all_reduce_sums(sums["kl_ref"])
        self.last_kl = total / count

    def add_seconds(self, name: str, seconds: float) -> None:
        self._seconds[name] += seconds

    def flush(self, actor: Any, critic: Any, epoch: int, lr: float) -> dict[str, float]:
        """The step's line: means and maxima over all ranks, times of this rank. Collective.

        `loss` is the sum of both losses, `grad_norm` the actor's; a critic's figures are None without one. A step
        without a rollout of its own (a second one on the same experience) repeats the last rollout's figures, but
        neither its times nor its tokens.
        """
        line = self._means.reduce()
        tokens, generated = all_reduce_sums([self._tokens, self._generated])
        if "score_mean" in line:
            _finish_rollout(line)
            self._rollout_line = {key: line.get(key) for key in ROLLOUT_KEYS}
        seconds, step_seconds = self._seconds, sum(self._seconds.values())
        self._start()
        return {
            **self._rollout_line,
            **line,
            **seconds,
            "loss": line["actor_loss"] + line.get("critic_loss", 0.0),
            "critic_loss": line.get("critic_loss"),
            "ptx_loss": line.get("ptx_loss"),
            "epoch": epoch,
            "lr": lr,
            "grad_norm": actor.get_global_grad_norm(),
            "critic_grad_norm": critic.get_global_grad_norm() if critic is not None else None,
            "skipped": actor.skipped_steps + (critic.skipped_steps if critic is not None else 0),
            "tokens": int(tokens),
            "step_seconds": step_seconds,
            "tokens_per_second": tokens / step_seconds if step_seconds else 0.0,
            "generate_tokens_per_second": generated / seconds["generate_seconds"] if generated else 0.0,
        }


ROLLOUT_KEYS = (
    "kl_ref", "kl_coef", "score_mean", "score_std", "reward_mean", "advantage_mean", "advantage_std", "value_mean",
    "explained_variance", "entropy", "response_length_mean", "response_length_max", "truncated_fraction",
    "rollout_logprob_gap",
)  # fmt: skip
UPDATE_MEANS = (
    "ratio_mean", "clip_fraction", "clip_fraction_high", "clip_fraction_low", "approx_kl", "value_clip_fraction",
    "kl_loss", "tis_weight_mean",
)  # fmt: skip


def rollout_sums(rollout: Rollout, experience: Experience, kl_coef: float) -> tuple[Sums, dict[str, float]]:
    """Sums and maxima of one rollout on this rank.

    Per answer: kl_ref (nats, summed over the answer's tokens, `logprobs - ref_logprobs`), score (as the reward
    model gave it), length, cut-off. Per token: shaped reward, value, advantage (before whitening), entropy, and
    the gap between the sampler's log-probabilities and the training engine's.
    """
    mask = experience.response_mask
    answers, tokens = float(len(mask)), float(mask.sum())

    def per_token(values: torch.Tensor) -> tuple[float, float]:
        return float(values.double()[mask].sum()), tokens

    kl = ((experience.logprobs - experience.ref_logprobs) * mask).sum()
    sums: Sums = {
        "kl_ref": (float(kl), answers),
        "kl_coef": (kl_coef, 1.0),
        "score_mean": (float(experience.scores.double().sum()), answers),
        "score_square": (float(experience.scores.double().square().sum()), answers),
        "reward_mean": per_token(experience.rewards),
        "advantage_mean": per_token(experience.raw_advantages),
        "advantage_square": per_token(experience.raw_advantages.double().square()),
        "entropy": per_token(experience.entropy),
        "response_length_mean": (tokens, answers),
        "truncated_fraction": (float((~rollout.finished).sum()), answers),
        "rollout_logprob_gap": per_token((experience.logprobs - experience.gen_logprobs).abs()),
    }
    if experience.values is not None:
        residual = experience.returns - experience.values
        sums |= {
            "value_mean": per_token(experience.values),
            "return_mean": per_token(experience.returns),
            "return_square": per_token(experience.returns.double().square()),
            "residual_mean": per_token(residual),
            "residual_square": per_token(residual.double().square()),
        }
    return sums, {"response_length_max": float(rollout.lengths.max())}


def _finish_rollout(line: dict[str, float]) -> None:
    """Turn the squares into standard deviations (population), and returns and residuals into explained variance."""
    line["score_std"] = _variance(line["score_mean"], line.pop("score_square")) ** 0.5
    line["advantage_std"] = _variance(line["advantage_mean"], line.pop("advantage_square")) ** 0.5
    if "value_mean" not in line:
        return
    returns = _variance(line.pop("return_mean"), line.pop("return_square"))
    residuals = _variance(line.pop("residual_mean"), line.pop("residual_square"))
    line["explained_variance"] = 1.0 - residuals / returns if returns > 0 else 0.0


def _variance(mean: float, mean_square: float) -> float:
    return max(0.0, mean_square - mean * mean)
