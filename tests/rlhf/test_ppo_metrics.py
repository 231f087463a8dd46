"""The PPO line of metrics against means taken by hand on a crafted batch."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf.experience import Experience
from rlhf.losses import policy_loss, value_loss
from rlhf.ppo_metrics import StepMetrics, UpdateFigures, rollout_sums
from rlhf.rollout import Rollout


class FakeEngine:
    skipped_steps = 1

    def get_global_grad_norm(self):
        return 2.5


def crafted() -> tuple[Rollout, Experience]:
    """Two answers of 2 and 1 tokens after prompts of 1 and 2; whatever stands in masked slots is 99."""
    mask = torch.tensor([[True, True], [True, False]])
    lengths = torch.tensor([2, 1])
    whole = torch.cat([torch.tensor([[False, True], [True, True]]), mask], dim=1)

    def grid(*values):
        return torch.tensor([[values[0], values[1]], [values[2], 99.0]])

    ids = torch.zeros(2, 4, dtype=torch.long)
    rollout = Rollout(ids, whole, mask, grid(-1.0, -2.0, -3.0), lengths, torch.tensor([True, False]))
    experience = Experience(
        ids,
        whole,
        mask,
        logprobs=grid(-1.1, -2.0, -3.2),
        ref_logprobs=grid(-1.5, -2.2, -3.0),
        gen_logprobs=rollout.gen_logprobs,
        values=grid(0.5, 1.0, -1.0),
        entropy=grid(1.0, 2.0, 0.0),
        scores=torch.tensor([3.0, 1.0]),
        rewards=grid(0.0, 2.0, 1.0),
        raw_advantages=grid(1.0, 2.0, 3.0),
        advantages=grid(0.0, 0.0, 0.0),
        returns=grid(1.5, 3.0, 2.0),
    )
    return rollout, experience


def test_rollout_figures():
    rollout, experience = crafted()
    metrics = StepMetrics()
    metrics.add_rollout(rollout, experience, 0.3, generate_seconds=2.0, score_seconds=1.0)
    # per answer: (0.4 + 0.2) and -0.2
    assert metrics.last_kl == pytest.approx(0.2)
    metrics.add({"actor_loss": (0.5, 1.0), "critic_loss": (0.25, 1.0)})
    line = metrics.flush(FakeEngine(), FakeEngine(), epoch=4, lr=0.1)
    expected = {
        "kl_ref": 0.2,
        "kl_coef": 0.3,
        "score_mean": 2.0,
        "score_std": 1.0,
        "reward_mean": 1.0,
        "advantage_mean": 2.0,
        "advantage_std": (2 / 3) ** 0.5,
        "value_mean": 0.5 / 3,
        # residuals 1, 2, 3 have variance 2/3; returns 1.5, 3, 2 have variance 7/18
        "explained_variance": 1 - (2 / 3) / (7 / 18),
        "entropy": 1.0,
        "response_length_mean": 1.5,
        "response_length_max": 2.0,
        "truncated_fraction": 0.5,
        "rollout_logprob_gap": 0.1,
        "generate_seconds": 2.0,
        "score_seconds": 1.0,
        "train_seconds": 0.0,
        "generate_tokens_per_second": 1.5,
        "step_seconds": 3.0,
        "tokens_per_second": 2.0,
        "loss": 0.75,
        "epoch": 4,
        "lr": 0.1,
        "grad_norm": 2.5,
        "skipped": 2,
        "tokens": 6,
    }
    for name, value in expected.items():
        assert line[name] == pytest.approx(value, abs=1e-6), name


def test_update_figures_are_means_over_what_they_are_means_of():
    """Two micro-batches of 2 and 1 tokens, 1 and 3 answers (the actor loss weighs by these), 1 and 2 text blocks."""
    figures = {"ratio_mean": 1.0, "ratio_max": 1.5, "clip_fraction": 0.5, "approx_kl": 0.1, "kl_loss": 3.0}
    other = {**figures, "ratio_mean": 2.0, "ratio_max": 3.0, "clip_fraction": 0.0, "kl_loss": 0.0}
    figures, other = ({name: torch.tensor(value) for name, value in one.items()} for one in (figures, other))
    metrics, zero = StepMetrics(), torch.tensor(0.0)
    metrics.add(*UpdateFigures(torch.tensor(4.0), zero, torch.tensor(2.0), figures, tokens=2, units=1, blocks=1).sums())
    metrics.add(*UpdateFigures(zero, torch.tensor(6.0), torch.tensor(0.5), other, tokens=1, units=3, blocks=2).sums())
    line = metrics.flush(FakeEngine(), FakeEngine(), epoch=0, lr=0.0)
    assert line["actor_loss"] == pytest.approx(1.0)
    assert line["critic_loss"] == pytest.approx(2.0) and line["loss"] == pytest.approx(3.0)
    assert line["ptx_loss"] == pytest.approx(1.0)
    assert line["ratio_mean"] == pytest.approx(4 / 3) and line["ratio_max"] == 3.0
    assert line["clip_fraction"] == pytest.approx(1 / 3) and line["kl_loss"] == pytest.approx(2.0)


# What a line of PPO's metrics.jsonl holds, beside `stage` and `step`, which the writer adds.
WRITTEN = (
    "epoch loss lr grad_norm tokens skipped step_seconds tokens_per_second actor_loss critic_loss ptx_loss ratio_mean "
    "ratio_max clip_fraction approx_kl kl_ref kl_coef score_mean score_std reward_mean advantage_mean advantage_std "
    "value_mean explained_variance entropy response_length_mean response_length_max truncated_fraction "
    "rollout_logprob_gap generate_seconds score_seconds train_seconds generate_tokens_per_second"
).split()


def test_the_figures_of_an_update_by_hand():
    """Three tokens; the ratios are 1.5, 0.5 and 1, the advantages 1, -2 and 4, the new values 1, 0.9 and -1."""
    rollout, experience = crafted()
    experience.advantages = torch.tensor([[1.0, -2.0], [4.0, 99.0]])
    new = experience.logprobs + torch.tensor([[math.log(1.5), math.log(0.5)], [0.0, 7.0]])
    new_values = torch.tensor([[1.0, 0.9], [-1.0, 7.0]])
    metrics = StepMetrics()
    metrics.add_rollout(rollout, experience, 0.3, generate_seconds=2.0, score_seconds=1.0)
    for rows in ([0], [1]):  # micro-batches of 2 tokens and 1
        part = experience.select(rows)
        loss, figures = policy_loss(new[rows], part.logprobs, part.advantages, part.response_mask, 0.2)
        critic, more = value_loss(new_values[rows], part.values, part.returns, part.response_mask, 0.2)
        tokens = 2 if rows == [0] else 1
        metrics.add(*UpdateFigures(loss, critic, torch.tensor(0.6), figures | more, tokens, tokens, 1).sums())
    metrics.add_seconds("train_seconds", 3.0)
    line = metrics.flush(FakeEngine(), FakeEngine(), epoch=4, lr=0.1)
    # -min(1.5, 1.2), -min(-1, -1.6), -4
    actor = (-1.2 + 1.6 - 4.0) / 3
    # returns 1.5, 3 and 2: the clipped values are 0.7, 0.9 and -1
    critic = 0.5 * (0.8**2 + 2.1**2 + 3.0**2) / 3
    expected = {
        "actor_loss": actor, "critic_loss": critic, "loss": actor + critic, "ptx_loss": 0.6,
        "ratio_mean": 1.0, "ratio_max": 1.5, "clip_fraction": 2 / 3,
        "clip_fraction_high": 1 / 3, "clip_fraction_low": 1 / 3, "value_clip_fraction": 1 / 3,
        "approx_kl": (0.5 - math.log(1.5) - 0.5 - math.log(0.5)) / 3,
        "train_seconds": 3.0, "step_seconds": 6.0, "tokens_per_second": 1.0,
    }  # fmt: skip
    for name, value in expected.items():
        assert line[name] == pytest.approx(value, abs=1e-6), name
    assert set(WRITTEN) <= line.keys()


def test_without_a_critic_its_figures_are_none():
    rollout, experience = crafted()
    experience.values = experience.returns = None
    metrics = StepMetrics()
    metrics.add_rollout(rollout, experience, 0.3, 2.0, 1.0)
    metrics.add({"actor_loss": (1.0, 1.0)})
    line = metrics.flush(FakeEngine(), None, 0, 0.0)
    assert line["loss"] == 1.0 and line["skipped"] == 1 and line["advantage_mean"] == pytest.approx(2.0)
    for name in ("critic_loss", "critic_grad_norm", "value_mean", "explained_variance"):
        assert line[name] is None, name


def test_a_second_step_on_one_rollout_repeats_its_figures_but_not_its_times():
    rollout, experience = crafted()
    metrics = StepMetrics()
    metrics.add_rollout(rollout, experience, 0.3, 2.0, 1.0)
    metrics.add({"actor_loss": (1.0, 1.0), "critic_loss": (1.0, 1.0)})
    first = metrics.flush(FakeEngine(), FakeEngine(), 0, 0.0)
    metrics.add({"actor_loss": (2.0, 1.0), "critic_loss": (1.0, 1.0)})
    second = metrics.flush(FakeEngine(), FakeEngine(), 0, 0.0)
    assert second["kl_ref"] == first["kl_ref"] and second["score_std"] == first["score_std"]
    assert second["actor_loss"] == 2.0
    assert second["generate_seconds"] == 0.0 and second["tokens"] == 0


def test_masked_slots_do_not_count():
    rollout, experience = crafted()
    sums, _ = rollout_sums(rollout, experience, 0.0)
    assert all(abs(total) < 50 for total, _ in sums.values())
