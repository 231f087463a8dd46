"""KL estimators and controllers."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf.kl import AdaptiveKL, FixedKL, kl_estimate, kl_loss_terms, make_controller


def test_estimators_literal():
    d = torch.tensor([0.5, -0.5])
    zero = torch.zeros(2)
    torch.testing.assert_close(kl_estimate(d, zero, "k1"), d)
    torch.testing.assert_close(kl_estimate(d, zero, "k2"), torch.tensor([0.125, 0.125]))
    torch.testing.assert_close(kl_estimate(d, zero, "k3"), torch.tensor([0.106531, 0.148721]), atol=1e-6, rtol=0)


def test_estimators_agree_on_the_true_divergence():
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.4, 0.4, 0.2]).double()
    true = (p * (p / q).log()).sum()
    for kind in ("k1", "k3"):  # unbiased: their expectation under p is the divergence
        torch.testing.assert_close((p * kl_estimate(p.log(), q.log(), kind).double()).sum(), true, atol=1e-6, rtol=0)


def test_k3_is_never_negative_nor_infinite():
    d = torch.tensor([-1e4, -1e-4, 0.0, 1e-4, 1e4])
    k3 = kl_estimate(d, torch.zeros(5), "k3")
    assert (k3 >= 0).all() and torch.isfinite(k3).all()


def test_unknown_estimator():
    with pytest.raises(ValueError, match="unknown KL estimator 'k4': choose one of k1, k2, k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


def test_fixed_controller_stays():
    controller = make_controller(0.1)
    controller.update(100.0, 64)
    assert type(controller) is FixedKL and controller.value == 0.1


@pytest.mark.parametrize(
    ("kl", "expected"), [(6.0, 0.2), (12.0, 0.2 * (1 + 0.2 * 0.5)), (0.0, 0.2 * (1 - 0.2 * 0.5)), (6.6, 0.2 * 1.05)]
)
def test_adaptive_controller_literal(kl, expected):
    controller = make_controller(0.2, target_kl=6.0, kl_horizon=100)
    controller.update(kl, 50)
    assert controller.value == pytest.approx(expected)


def test_adaptive_controller_state_and_limits():
    controller = AdaptiveKL(0.2, 6.0, 10)
    controller.update(0.0, 1000)
    assert controller.value == 0.0
    other = AdaptiveKL(0.5, 6.0, 10)
    other.load_state_dict({"value": 0.3})
    assert other.state_dict() == {"value": 0.3}
    with pytest.raises(ValueError, match="positive target and horizon, not 6.0 and 0"):
        AdaptiveKL(0.1, 6.0, 0)


def test_k3_is_bounded_where_a_token_has_collapsed():
    assert kl_estimate(torch.tensor([-90.0, -2.0]), torch.tensor([-1.0, -1.0]), "k3").tolist() == pytest.approx(
        [10.0, math.e - 2], abs=1e-5
    )


@pytest.mark.parametrize(
    ("kind", "value", "gradient"),
    [("k1", 0.5, 0.5), ("k2", 0.125, 0.5), ("k3", math.exp(-0.5) - 0.5, 1 - math.exp(-0.5)),
     ("k3+", math.exp(-0.5) - 0.5, 0.5)],
)  # fmt: skip
def test_kl_in_the_loss_has_the_value_and_the_gradient_it_says(kind, value, gradient):
    logprobs = torch.tensor([[-1.0]], requires_grad=True)
    terms = kl_loss_terms(logprobs, torch.tensor([[-1.5]]), kind)
    terms.sum().backward()
    assert terms.item() == pytest.approx(value, abs=1e-6) and logprobs.grad.item() == pytest.approx(gradient, abs=1e-6)


def test_k2_has_the_gradient_of_the_kl_itself():
    """In expectation over the policy's own tokens; k3's is another."""
    logits = torch.tensor([0.3, -0.2, 0.9, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.0, 0.5, -0.5, 0.2], dtype=torch.float64), 0)
    logp = torch.log_softmax(logits, 0)
    exact = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits, retain_graph=True)[0]
    expected = {
        kind: torch.autograd.grad(
            (logp.exp().detach() * kl_loss_terms(logp, reference, kind)).sum(), logits, retain_graph=True
        )[0]
        for kind in ("k1", "k2", "k3", "k3+")
    }
    for kind in ("k1", "k2", "k3+"):
        torch.testing.assert_close(expected[kind], exact, atol=1e-6, rtol=0)
    assert (expected["k3"] - exact).abs().max() > 0.01
