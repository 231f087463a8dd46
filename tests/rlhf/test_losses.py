"""Every loss against literal numbers and slow float64 loops over tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.losses import (
    aggregate,
    causal_lm_loss,
    masked_mean,
    pair_loss,
    pair_token_loss,
    policy_loss,
    sampler_weights,
    single_loss,
    units,
    value_loss,
)

JUNK = [float("nan"), float("inf"), 1e30]


# -- reward model ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gap", "expected"), [(-100.0, 100.0), (0.0, 0.693147), (100.0, 0.0), (-1e4, 1e4)])
def test_pair_loss_does_not_overflow(gap, expected):
    chosen = torch.tensor([gap], requires_grad=True)
    loss = pair_loss(chosen, torch.zeros(1))
    loss.backward()
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert torch.isfinite(chosen.grad).all()


def test_pair_loss_is_the_mean_over_pairs_and_fp32():
    chosen, rejected = torch.tensor([1.0, -2.0]).bfloat16(), torch.tensor([0.0, 1.0]).bfloat16()
    loss = pair_loss(chosen, rejected)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx((math.log1p(math.exp(-1)) + math.log1p(math.exp(3))) / 2, abs=1e-6)


def test_pair_loss_of_no_pair_is_zero_with_a_graph():
    scores = torch.zeros(0, requires_grad=True)
    loss = pair_loss(scores, scores)
    loss.backward()
    assert loss.item() == 0


def nls(gap: float) -> float:
    return math.log1p(math.exp(-gap)) if gap > -30 else -gap


def slow_pair_token_loss(values_c, values_r, rows_c, rows_r) -> float:
    total = 0.0
    for values_a, values_b, a, b in zip(values_c, values_r, rows_c, rows_r, strict=True):
        longest = max(len(a), len(b))
        start = next((t for t in range(longest) if a[t : t + 1] != b[t : t + 1]), longest - 1)
        terms = [
            nls(values_a[min(t, len(a) - 1)] - values_b[min(t, len(b) - 1)]) for t in range(start, longest)
        ]
        total += sum(terms) / len(terms)
    return total / len(rows_c)


def test_pair_token_loss_literal():
    # equal up to position 1; the chosen text ends at 2, the rejected one at 3
    values_c = torch.tensor([[9.0, 1.0, 2.0, 77.0]])
    values_r = torch.tensor([[5.0, 0.0, 1.0, -1.0]])
    ids_c, ids_r = torch.tensor([[7, 3, 2, 2]]), torch.tensor([[7, 4, 5, 2]])
    mask_c = torch.tensor([[True, True, True, False]])
    mask_r = torch.ones(1, 4, dtype=torch.bool)
    loss = pair_token_loss(values_c, values_r, ids_c, ids_r, mask_c, mask_r)
    # gaps 1 (tokens differ), 1, and 2 - (-1): the chosen side's end score stands in, not the 77 on its padding
    assert loss.item() == pytest.approx((2 * nls(1.0) + nls(3.0)) / 3, abs=1e-6)


def test_pair_token_loss_of_equal_texts_is_log_2():
    ids, mask, values = torch.tensor([[3, 4, 2]]), torch.ones(1, 3, dtype=torch.bool), torch.tensor([[1.0, 2.0, 3.0]])
    assert pair_token_loss(values, values, ids, ids, mask, mask).item() == pytest.approx(0.693147, abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), side=st.sampled_from(["left", "right"]))
def test_pair_token_loss_equals_a_slow_loop(seed, side):
    generator = torch.Generator().manual_seed(seed)
    count, width = 3, 8
    lengths = torch.randint(1, width + 1, (2, count), generator=generator).tolist()
    rows = [[torch.randint(0, 3, (n,), generator=generator).tolist() for n in side_] for side_ in lengths]
    values = [[torch.randn(n, generator=generator).tolist() for n in side_] for side_ in lengths]
    ids, mask = torch.zeros(2, count, width, dtype=torch.long), torch.zeros(2, count, width, dtype=torch.bool)
    heads = 50 * torch.randn(2, count, width, generator=generator)
    for s in range(2):
        for i in range(count):
            n = lengths[s][i]
            place = slice(width - n, width) if side == "left" else slice(0, n)
            ids[s, i, place], mask[s, i, place] = torch.tensor(rows[s][i]), True
            heads[s, i, place] = torch.tensor(values[s][i])
    loss = pair_token_loss(heads[0], heads[1], ids[0], ids[1], mask[0], mask[1])
    assert loss.item() == pytest.approx(slow_pair_token_loss(*values, *rows), abs=1e-5)


# -- supervised fine-tuning ---------------------------------------------------------------------------------


def test_causal_lm_loss_literal():
    # uniform over 4 tokens: log 4 a token, two of them supervised (the first label predicts nothing)
    loss, count = causal_lm_loss(torch.zeros(1, 4, 4), torch.tensor([[1, -100, 2, 3]]))
    assert count == 2 and loss.item() == pytest.approx(1.386294, abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), padding=st.sampled_from([0, 5, 50]))
def test_causal_lm_loss_equals_transformers_and_ignores_padding(seed, padding):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 6, 9, generator=generator, dtype=torch.float32)
    labels = torch.randint(0, 9, (2, 6), generator=generator)
    labels[torch.rand(2, 6, generator=generator) < 0.4] = -100
    labels[0, -1] = 2  # an end token: supervised once, at the last place
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    logits = torch.cat([logits, 100 * torch.randn(2, padding, 9, generator=generator)], 1)
    labels = torch.cat([labels, torch.full((2, padding), -100)], 1)
    loss, count = causal_lm_loss(logits, labels)
    assert count == int((labels[:, 1:] != -100).sum())
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)


def test_causal_lm_loss_of_no_token_is_zero_with_a_graph():
    logits = torch.randn(1, 3, 4, requires_grad=True)
    loss, count = causal_lm_loss(logits, torch.full((1, 3), -100))
    loss.backward()
    assert count == 0 and loss.item() == 0 and logits.grad.abs().sum() == 0


# -- PPO -----------------------------------------------------------------------------------------------------


def test_policy_loss_literal():
    log_ratio = torch.tensor([[0.0, 0.5, -0.5, 0.1]])
    advantages = torch.tensor([[1.0, 2.0, -1.0, -2.0]])
    loss, diagnostics = policy_loss(log_ratio, torch.zeros(1, 4), advantages, torch.ones(1, 4, dtype=torch.bool), 0.2)
    # -1, clipped -2 * 1.2, clipped 1 * 0.8, plain 2 * 1.105171
    assert loss.item() == pytest.approx((-1.0 - 2.4 + 0.8 + 2.210342) / 4, abs=1e-6)
    ratios = [1.0, 1.648721, 0.606531, 1.105171]
    expected = {
        "ratio_mean": sum(ratios) / 4,
        "ratio_max": 1.648721,
        "ratio_min": 0.606531,
        "clip_fraction": 0.5,
        "clip_fraction_high": 0.25,
        "clip_fraction_low": 0.25,
        "approx_kl": (sum(ratios) - 4 - 0.1) / 4,
        "approx_kl_k1": -0.1 / 4,
        "tokens": 4.0,
    }
    assert {key: value.item() for key, value in diagnostics.items()} == pytest.approx(expected, abs=1e-5)


def test_policy_loss_before_any_update():
    logprobs = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    mask = torch.ones(3, 5, dtype=torch.bool)
    _, diagnostics = policy_loss(logprobs, logprobs.detach(), torch.randn(3, 5), mask, 0.2)
    assert diagnostics["ratio_mean"] == diagnostics["ratio_max"] == diagnostics["ratio_min"] == 1
    assert diagnostics["approx_kl"] == diagnostics["approx_kl_k1"] == diagnostics["clip_fraction"] == 0


def test_losses_stay_finite_at_absurd_ratios():
    logprobs = torch.tensor([[0.0, -1e4]], requires_grad=True)
    loss, diagnostics = policy_loss(
        logprobs, torch.tensor([[-1e4, 0.0]]), -torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool), 0.2
    )
    loss.backward()
    assert torch.isfinite(loss) and all(torch.isfinite(x) for x in diagnostics.values())
    assert torch.isfinite(logprobs.grad).all()


def test_value_loss_literal():
    values, old = torch.tensor([[0.5, 1.0, -1.0]]), torch.tensor([[0.0, 1.1, 0.0]])
    returns, mask = torch.tensor([[1.0, 0.0, -2.0]]), torch.ones(1, 3, dtype=torch.bool)
    loss, diagnostics = value_loss(values, old, returns, mask, 0.2)
    # clipped values 0.2, 1.0, -0.2: squared errors max(0.25, 0.64), max(1, 1), max(1, 3.24)
    assert loss.item() == pytest.approx(0.5 * (0.64 + 1.0 + 3.24) / 3, abs=1e-6)
    assert diagnostics["value_clip_fraction"].item() == pytest.approx(2 / 3)
    assert diagnostics["value_mean"].item() == pytest.approx(0.5 / 3)
    plain, _ = value_loss(values, old, returns, mask, None)
    assert plain.item() == pytest.approx(0.5 * (0.25 + 1.0 + 1.0) / 3, abs=1e-6)


def slow_ppo(lp, old, adv, v, v_old, ret, mask, c, c_v):
    policy = value = 0.0
    count = 0
    for i in range(len(mask)):
        for t in range(len(mask[i])):
            if mask[i][t]:
                ratio = math.exp(lp[i][t] - old[i][t])
                policy += max(-adv[i][t] * ratio, -adv[i][t] * min(max(ratio, 1 - c), 1 + c))
                near = v_old[i][t] + min(max(v[i][t] - v_old[i][t], -c_v), c_v)
                value += 0.5 * max((v[i][t] - ret[i][t]) ** 2, (near - ret[i][t]) ** 2)
                count += 1
    return policy / max(count, 1), value / max(count, 1)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), junk=st.sampled_from(JUNK), density=st.sampled_from([0.0, 0.3, 1.0]))
def test_ppo_losses_equal_slow_loops_and_ignore_masked_slots(seed, junk, density):
    generator = torch.Generator().manual_seed(seed)
    lp, old, adv, v, v_old, ret = torch.randn(6, 3, 4, generator=generator)
    mask = torch.rand(3, 4, generator=generator) < density
    expected = slow_ppo(*(x.tolist() for x in (lp, old, adv, v, v_old, ret, mask)), 0.2, 0.3)
    lp, old, adv, v, v_old, ret = (torch.where(mask, x, junk) for x in (lp, old, adv, v, v_old, ret))
    lp.requires_grad_(), v.requires_grad_()
    policy, policy_figures = policy_loss(lp, old, adv, mask, 0.2)
    value, value_figures = value_loss(v, v_old, ret, mask, 0.3)
    (policy + value).backward()
    assert (policy.item(), value.item()) == pytest.approx(expected, abs=1e-5)
    assert all(torch.isfinite(x) for x in (*policy_figures.values(), *value_figures.values()))
    for grad in (lp.grad, v.grad):
        assert torch.isfinite(grad).all() and (grad[~mask] == 0).all()


def test_micro_batches_weighted_by_tokens_give_the_whole_batch():
    generator = torch.Generator().manual_seed(3)
    lp, old, adv = torch.randn(3, 6, 5, generator=generator)
    mask = torch.rand(6, 5, generator=generator) < 0.5
    whole, _ = policy_loss(lp, old, adv, mask, 0.2)
    parts = [policy_loss(lp[i : i + 2], old[i : i + 2], adv[i : i + 2], mask[i : i + 2], 0.2) for i in (0, 2, 4)]
    joined = sum(loss * figures["tokens"] for loss, figures in parts) / mask.sum()
    torch.testing.assert_close(joined, whole)


def test_masked_mean_of_nothing_is_zero():
    assert masked_mean(torch.tensor([float("nan")]), torch.tensor([False])).item() == 0


def test_a_margin_is_taken_off_the_gap():
    chosen, rejected, margins = torch.tensor([1.0, 0.0]), torch.tensor([0.5, 2.0]), torch.tensor([1.0, 0.0])
    expected = [-math.log(1 / (1 + math.exp(-gap))) for gap in (1.0 - 0.5 - 1.0, -2.0)]
    assert pair_loss(chosen, rejected, margins).item() == pytest.approx(sum(expected) / 2, abs=1e-6)
    ids, mask = torch.tensor([[1], [2]]), torch.ones(2, 1, dtype=torch.bool)
    sides = (chosen[:, None], rejected[:, None], ids, ids + 3, mask, mask)
    assert pair_token_loss(*sides, margins).item() == pytest.approx(sum(expected) / 2, abs=1e-6)


def test_single_answers_by_hand():
    scores = torch.tensor([2.0, -1.0, 0.3, 4.0], requires_grad=True)
    targets, is_label = torch.tensor([1.0, 0.0, 0.25, 1.0]), torch.tensor([True, True, True, False])
    loss = single_loss(scores, targets, is_label)
    p = [1 / (1 + math.exp(-score)) for score in (2.0, -1.0, 0.3)]
    expected = [-math.log(p[0]), -math.log(1 - p[1]), -0.25 * math.log(p[2]) - 0.75 * math.log(1 - p[2]), 9.0]
    assert loss.item() == pytest.approx(sum(expected) / 4, abs=1e-6)
    loss.backward()
    gradient = [(p[0] - 1) / 4, p[1] / 4, (p[2] - 0.25) / 4, 2 * 3.0 / 4]
    assert scores.grad.tolist() == pytest.approx(gradient, abs=1e-6)
    empty = torch.zeros(0, requires_grad=True)
    assert single_loss(empty, empty.detach(), empty.detach() > 0).item() == 0.0


def test_policy_loss_with_two_clips_dual_clip_and_weights_literal():
    log_ratio = torch.tensor([[0.3, -0.3, 1.0, 1.0]]).requires_grad_()
    advantages, mask = torch.tensor([[1.0, -1.0, -1.0, -2.0]]), torch.ones(1, 4, dtype=torch.bool)
    options = {"cliprange_high": 0.4, "dual_clip": 2.0, "weights": torch.tensor([[1.0, 0.5, 1.0, 2.0]])}
    loss, figures = policy_loss(log_ratio, torch.zeros(1, 4), advantages, mask, 0.2, **options)
    # e^0.3 is below 1.4; e^-0.3 clipped at 0.8, halved; e bounded by 2; 2e bounded by 4, doubled
    assert loss.item() == pytest.approx((-math.exp(0.3) + 0.4 + 2.0 + 8.0) / 4, abs=1e-6)
    assert figures["clip_fraction"].item() == 0.75
    assert figures["clip_fraction_high"].item() == 0.5 and figures["clip_fraction_low"].item() == 0.25
    loss.backward()
    assert log_ratio.grad[0, 0] != 0 and not log_ratio.grad[0, 1:].any()


@pytest.mark.parametrize(
    ("how", "expected", "count"),
    [("token-mean", 10 / 4, 4), ("seq-mean-token-mean", (2 + 4) / 2, 2), ("seq-mean-token-sum", (6 + 4) / 2, 2)],
)
def test_aggregations_literal_and_over_micro_batches(how, expected, count):
    terms = torch.tensor([[1.0, 2.0, 3.0], [4.0, 99.0, 99.0], [99.0, 99.0, 99.0]])
    mask = torch.tensor([[True] * 3, [True, False, False], [False] * 3])
    assert aggregate(terms, mask, how).item() == pytest.approx(expected) and units(mask, how) == count
    parts = [(aggregate(terms[i : i + 1], mask[i : i + 1], how), units(mask[i : i + 1], how)) for i in range(3)]
    assert sum(float(loss) * weight for loss, weight in parts) / count == pytest.approx(expected)


def test_sampler_weights_literal():
    weights = sampler_weights(torch.tensor([[-1.0, -1.0, -3.0]]), torch.tensor([[-1.0, -3.0, -1.0]]), cap=2.0)
    torch.testing.assert_close(weights, torch.tensor([[1.0, 2.0, math.exp(-2)]]))
