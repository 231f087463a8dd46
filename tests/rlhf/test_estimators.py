"""Advantage estimators against literal numbers; loops from the formulas are in tests/stages/test_ppo_reference.py."""

from __future__ import annotations

import pytest
import torch

from rlhf.advantage import shape_scores, whiten
from rlhf.choices import CRITIC_FREE, ESTIMATORS, WHITENED
from rlhf.estimators import estimate_advantages, grpo, rewards_to_go, rloo

TOTALS = torch.tensor([1.0, 2.0, 3.0, 5.0, 5.0, 5.0])  # two prompts of three answers


def test_grpo_literal():
    # the first group's sample standard deviation is 1; the second tells nothing
    torch.testing.assert_close(grpo(TOTALS, 3), torch.tensor([-1.0, 0, 1, 0, 0, 0]), atol=1e-5, rtol=0)
    assert grpo(2 * TOTALS, 3, scale_by_std=False).tolist() == [-2.0, 0, 2, 0, 0, 0]


def test_rloo_literal():
    # 1 - 5/2, 2 - 4/2, 3 - 3/2
    torch.testing.assert_close(rloo(TOTALS, 3), torch.tensor([-1.5, 0, 1.5, 0, 0, 0]))


@pytest.mark.parametrize("constant", [0.1, 1 / 3, -7.7, 1e6])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_a_group_of_equals_is_exactly_zero(constant, size):
    totals = torch.full((size * 2,), constant)
    assert not grpo(totals, size).any() and not rloo(totals, size).any()


REWARDS = torch.tensor([[0.5, -0.5, 1.0], [0.25, 2.0, 99.0]])
MASK = torch.tensor([[True, True, True], [True, True, False]])


def test_rewards_to_go_literal():
    assert rewards_to_go(REWARDS, MASK, 1.0).tolist() == [[1.0, 0.5, 1.0], [2.25, 2.0, 0.0]]
    assert rewards_to_go(REWARDS, MASK, 0.5).tolist() == [[0.5, 0.0, 1.0], [1.25, 2.0, 0.0]]


def test_every_estimator_on_one_batch():
    values = torch.zeros(2, 3)
    options = {"values": values, "group_size": 2, "lam": 1.0, "baseline": torch.tensor([0.5, -1.0])}
    got = {name: estimate_advantages(name, REWARDS, MASK, **options) for name in ESTIMATORS}
    to_go = [[1.0, 0.5, 1.0], [2.25, 2.0, 0.0]]
    assert got["gae"][0].tolist() == to_go and got["gae"][1].tolist() == to_go
    assert got["reinforce++"][0].tolist() == to_go
    assert got["remax"][0].tolist() == [[0.5, 0.0, 0.5], [3.25, 3.0, 0.0]]
    # totals 1 and 2.25
    assert got["rloo"][0].tolist() == [[-1.25] * 3, [1.25, 1.25, 0.0]]
    torch.testing.assert_close(got["grpo"][0], torch.tensor([[-1.0] * 3, [1.0, 1.0, 0]]) * 0.5**0.5, atol=1e-5, rtol=0)
    assert all(got[name][1] is None for name in CRITIC_FREE)


@pytest.mark.parametrize("name", CRITIC_FREE)
def test_a_constant_score_gives_no_advantage_at_all(name):
    rewards = torch.tensor([[0.0, 0.0, 0.3], [0.0, 0.3, 99.0]])
    baseline = torch.full((2,), 0.3)
    advantages, _ = estimate_advantages(name, rewards, MASK, group_size=2, baseline=baseline)
    if name in WHITENED:
        advantages = whiten(advantages, MASK)
    assert not advantages.any()


def test_shape_scores_literal():
    scores, lengths = torch.tensor([9.0, -9.0, 1.0, 1.0]), torch.tensor([10, 8, 7, 6])
    finished = torch.tensor([False, True, True, False])
    plain = shape_scores(scores, lengths, finished, clip=5.0)
    assert plain.tolist() == [5.0, -5.0, 1.0, 1.0]
    # 1.5 for being cut off; 2 x (4, 2, 1, 0) / 4 for the last four tokens of ten
    options = {"missing_eos_penalty": 1.5, "max_length": 10, "overlong_buffer": 4, "overlong_penalty": 2.0}
    assert shape_scores(scores, lengths, finished, clip=5.0, **options).tolist() == [1.5, -6.0, 0.5, -0.5]
    assert shape_scores(scores, lengths, finished, clip=None).tolist() == scores.tolist()
