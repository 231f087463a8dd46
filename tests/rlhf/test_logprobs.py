"""Token log-probabilities and entropies against float64 softmax and autograd."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf import logprobs as module
from rlhf.logprobs import token_logprobs, token_logprobs_and_entropy


def test_literal_numbers():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0]])
    tokens, mask = torch.tensor([3, 0]), torch.tensor([True, True])
    logprobs, entropy = token_logprobs_and_entropy(logits, tokens, mask)
    # log(1/4); 2 - log(e^2 + 3); entropies log 4 and log(e^2 + 3) - 2 e^2 / (e^2 + 3)
    torch.testing.assert_close(logprobs, torch.tensor([-1.386294, -0.340753]))
    torch.testing.assert_close(entropy, torch.tensor([1.386294, 0.918283]), atol=1e-5, rtol=0)
    # at temperature 2 the second row's logits are [1, 0, 0, 0]
    torch.testing.assert_close(token_logprobs(logits, tokens, mask, 2.0)[1], torch.tensor(-0.743668))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), temperature=st.sampled_from([0.5, 1.0, 1.7]), chunk=st.sampled_from([1, 40, 9999]))
def test_values_and_gradients_equal_plain_float64(seed, temperature, chunk):
    generator = torch.Generator().manual_seed(seed)
    logits = (4 * torch.randn(3, 5, 11, generator=generator)).requires_grad_()
    tokens = torch.randint(0, 11, (3, 5), generator=generator)
    mask = torch.rand(3, 5, generator=generator) < 0.6
    weights = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)

    exact = logits.detach().double().requires_grad_()
    logp = torch.log_softmax(exact / temperature, -1)
    chosen = torch.where(mask, logp.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), 0.0)
    spread = torch.where(mask, -(logp.exp() * logp).sum(-1), 0.0)
    (chosen * weights[0] + spread * weights[1]).sum().backward()

    original, module.CHUNK_ELEMENTS = module.CHUNK_ELEMENTS, chunk
    try:
        logprobs, entropy = token_logprobs_and_entropy(logits, tokens, mask, temperature)
        (logprobs * weights[0] + entropy * weights[1]).sum().backward()
    finally:
        module.CHUNK_ELEMENTS = original
    torch.testing.assert_close(logprobs.double(), chosen, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), spread, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(logits.grad.double(), exact.grad, atol=5e-6, rtol=1e-5)


def test_bf16_logits_are_summed_in_fp32():
    logits = torch.randn(2, 3, 1000, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    tokens, mask = torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.bool)
    logprobs = token_logprobs(logits, tokens, mask)
    exact = torch.log_softmax(logits.detach().double(), -1)[..., 0]
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), exact, atol=1e-5, rtol=0)
    logprobs.sum().backward()
    assert logits.grad.dtype == torch.bfloat16


def test_masked_rows_do_not_count_whatever_they_hold():
    logits = torch.zeros(1, 3, 4)
    logits[0, 1] = float("nan")
    logits.requires_grad_()
    tokens, mask = torch.tensor([[1, -100, 2]]), torch.tensor([[True, False, True]])
    logprobs, entropy = token_logprobs_and_entropy(logits, tokens, mask)
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs[0, 1] == entropy[0, 1] == 0 and logits.grad[0, 1].abs().sum() == 0
    assert torch.isfinite(logits.grad).all()


def test_an_impossible_token_keeps_the_entropy_finite():
    logits = torch.tensor([[0.0, 0.0, float("-inf")]], requires_grad=True)
    logprobs, entropy = token_logprobs_and_entropy(logits, torch.tensor([0]), torch.tensor([True]))
    (logprobs + entropy).sum().backward()
    assert entropy.item() == pytest.approx(0.693147, abs=1e-6) and torch.isfinite(logits.grad).all()


def test_no_token_at_all_still_has_a_graph():
    logits = torch.randn(2, 3, 4, requires_grad=True)
    token_logprobs(logits, torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3, dtype=torch.bool)).sum().backward()
    assert logits.grad.abs().sum() == 0


def test_temperature_must_be_positive():
    with pytest.raises(ValueError, match="temperature must be positive, not 0"):
        token_logprobs(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long), torch.ones(1, dtype=torch.bool), 0)
