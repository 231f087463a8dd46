"""Rewards, advantages and whitening against literal numbers, float64 loops, and two ranks against one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.advantage import explained_variance, gae, last_token, shape_rewards, whiten
from tests.helpers import run_ranks

JUNK = [float("nan"), float("inf"), -1e30]
FOUR_OF_EIGHT = torch.tensor([[True] * 4 + [False] * 4])


def beside_junk(values: list[float], junk: float) -> torch.Tensor:
    return torch.tensor([values + [junk] * 4])


@pytest.mark.parametrize("junk", JUNK)
def test_gae_literal(junk):
    rewards = beside_junk([-0.01, 0.02, -0.03, 0.98], junk)
    values = beside_junk([0.1, 0.2, 0.3, 0.4], junk)
    advantages, returns = gae(rewards, values, FOUR_OF_EIGHT, 1.0, 0.95)
    expected = torch.tensor([[0.764452, 0.709950, 0.621000, 0.580000, 0, 0, 0, 0]])
    torch.testing.assert_close(advantages, expected, atol=1e-6, rtol=0)
    expected = torch.tensor([[0.864452, 0.909950, 0.921000, 0.980000, 0, 0, 0, 0]])
    torch.testing.assert_close(returns, expected, atol=1e-6, rtol=0)


def test_one_reward_at_the_end_reaches_every_token():
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    advantages, _ = gae(rewards, torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool), 1.0, 1.0)
    assert advantages.tolist() == [[1.0, 1.0, 1.0]]


@pytest.mark.parametrize("junk", JUNK)
def test_whiten_literal(junk):
    whitened = whiten(beside_junk([1.0, 2.0, 3.0, 6.0], junk), FOUR_OF_EIGHT)
    expected = torch.tensor([[-1.069045, -0.534522, 0.0, 1.603567, 0, 0, 0, 0]])
    torch.testing.assert_close(whitened, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("values", [[5.0], [], [2.0, 2.0, 2.0]])
def test_whitening_without_spread_is_finite(values):
    mask = torch.tensor([[True] * len(values) + [False] * 2])
    whitened = whiten(torch.tensor([values + [9.0] * 2]), mask)
    assert torch.equal(whitened, torch.zeros_like(whitened))


def test_whitening_of_a_far_off_batch_keeps_its_spread():
    x = torch.tensor([[1e6, 1e6 + 1, 1e6 + 2]])
    torch.testing.assert_close(
        whiten(x, torch.ones(1, 3, dtype=torch.bool)), torch.tensor([[-1.224745, 0.0, 1.224745]]), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("junk", JUNK)
def test_shape_rewards_literal(junk):
    logprobs = torch.tensor([[-1.0, -2.0, junk], [-1.0, -1.0, -1.0]])
    reference = torch.tensor([[-1.5, -1.0, junk], [-1.0, -1.0, -3.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    rewards = shape_rewards(logprobs, reference, torch.tensor([9.0, -2.0]), mask, 0.1, 5.0)
    # penalties -0.05, +0.1 and 0, 0, -0.2; the score, cut to 5, once, on the last real token
    torch.testing.assert_close(rewards, torch.tensor([[-0.05, 5.1, 0.0], [0.0, 0.0, -2.2]]))


def test_shape_rewards_without_clip_and_without_tokens():
    mask = torch.tensor([[True, False], [False, False]])
    zeros = torch.zeros(2, 2)
    assert shape_rewards(zeros, zeros, torch.tensor([9.0, 9.0]), mask, 0.1, None).tolist() == [[9.0, 0.0], [0.0, 0.0]]


def test_rewards_and_advantages_carry_no_gradient():
    x = torch.randn(1, 3, requires_grad=True)
    mask = torch.ones(1, 3, dtype=torch.bool)
    rewards = shape_rewards(x, x.detach() - 1, x.sum(1), mask, 0.1, 5.0)
    advantages, returns = gae(rewards, x, mask, 1.0, 0.95)
    assert not (rewards.requires_grad or advantages.requires_grad or returns.requires_grad)


def test_last_token():
    mask = torch.tensor([[True, True, False], [True, False, True], [False, False, False]])
    expected = [[False, True, False], [False, False, True], [False, False, False]]
    assert last_token(mask).tolist() == expected


def slow_gae(rewards, values, mask, gamma, lam):
    """From the definition: a sum over all later real tokens of (gamma lam)^k delta."""
    advantages = [[0.0] * len(row) for row in mask]
    for i, row in enumerate(mask):
        real = [t for t, m in enumerate(row) if m]
        for n, t in enumerate(real):
            total = 0.0
            for k, s in enumerate(real[n:]):
                following = values[i][real[n + k + 1]] if n + k + 1 < len(real) else 0.0
                total += (gamma * lam) ** k * (rewards[i][s] + gamma * following - values[i][s])
            advantages[i][t] = total
    returns = [
        [a + v if m else 0.0 for a, v, m in zip(*rows, strict=True)]
        for rows in zip(advantages, values, mask, strict=True)
    ]
    return advantages, returns


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    gamma=st.floats(0.5, 1.0),
    lam=st.floats(0.0, 1.0),
    junk=st.sampled_from(JUNK),
    holes=st.booleans(),
)
def test_gae_equals_its_definition(seed, gamma, lam, junk, holes):
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 3, 6, generator=generator)
    lengths = torch.randint(0, 7, (3, 1), generator=generator)
    mask = torch.arange(6) < lengths
    if holes:  # several assistant turns in one row
        mask = torch.rand(3, 6, generator=generator) < 0.6
    expected = slow_gae(rewards.double().tolist(), values.double().tolist(), mask.tolist(), gamma, lam)
    rewards, values = torch.where(mask, rewards, junk), torch.where(mask, values, junk)
    for ours, slow in zip(gae(rewards, values, mask, gamma, lam), expected, strict=True):
        torch.testing.assert_close(ours.double(), torch.tensor(slow).double(), atol=1e-5, rtol=1e-5)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), junk=st.sampled_from(JUNK))
def test_whiten_and_explained_variance_equal_float64_loops(seed, junk):
    generator = torch.Generator().manual_seed(seed)
    x, returns = torch.randn(2, 3, 6, generator=generator)
    mask = torch.rand(3, 6, generator=generator) < 0.5
    mask[0, :2] = True
    picked, goals = x[mask].tolist(), returns[mask].tolist()
    mean = sum(picked) / len(picked)
    std = math.sqrt(sum((p - mean) ** 2 for p in picked) / len(picked))
    torch.testing.assert_close(
        whiten(torch.where(mask, x, junk), mask)[mask], torch.tensor([(p - mean) / std for p in picked]),
        atol=1e-4, rtol=1e-4,
    )  # fmt: skip

    def variance(numbers):
        center = sum(numbers) / len(numbers)
        return sum((n - center) ** 2 for n in numbers) / len(numbers)

    expected = 1 - variance([g - p for g, p in zip(goals, picked, strict=True)]) / variance(goals)
    ours = explained_variance(torch.where(mask, x, junk), torch.where(mask, returns, junk), mask)
    assert ours == pytest.approx(expected, abs=1e-5)


def test_explained_variance_marks():
    returns, mask = torch.tensor([[1.0, 2.0, 3.0]]), torch.ones(1, 3, dtype=torch.bool)
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(torch.zeros(1, 3), returns, mask) == pytest.approx(0.0)
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3.0)
    assert explained_variance(returns, torch.ones(1, 3), mask) == 0.0


def _whiten_share(rank, world_size):
    x, mask = torch.tensor([[1.0, 2.0, 3.0, 6.0]]), torch.ones(1, 4, dtype=torch.bool)
    share = slice(0, 1) if rank == 0 else slice(1, 4)  # unequal shares: a mean of means would differ
    empty = whiten(torch.full((1, 2), 7.0), torch.tensor([[rank == 1, False]]))
    explained = explained_variance(0.5 * x[:, share], x[:, share], mask[:, share])
    return whiten(x[:, share], mask[:, share]).tolist(), explained, empty.tolist()


def test_two_ranks_whiten_as_one():
    (first, explained, alone), (second, also, _) = run_ranks(_whiten_share, 2)
    assert first[0] + second[0] == pytest.approx([-1.069045, -0.534522, 0.0, 1.603567], abs=1e-6)
    assert explained == also == pytest.approx(0.75)
    assert alone == [[0.0, 0.0]]
