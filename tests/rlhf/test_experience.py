"""Response log-probabilities against loops over tokens; the index rule, padding, splitting."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlhf.experience import (
    Experience,
    positions,
    response_logprobs,
    response_logprobs_and_entropy,
    response_mask_from,
)
from rlhf.losses import policy_loss
from tests.rlhf.tiny_models import FAMILIES, VOCABULARY, causal_model, padded

# prompts of unequal length with responses of at most 4 tokens; 2 is the end token
PROMPTS = [[1, 30, 31, 32, 33], [1, 40], [1, 50, 51]]
RESPONSES = [[60, 61, 62, 2], [70, 2], [80, 81, 2]]


def batch(extra: int = 0, pad: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded prompts, right-padded responses."""
    ids, mask = padded(PROMPTS, pad, "left", extra)
    more_ids, more_mask = padded(RESPONSES, pad, "right")
    return torch.cat([ids, more_ids], 1), torch.cat([mask, more_mask], 1)


def slow_logprobs(model, temperature: float) -> torch.Tensor:
    """One text at a time, without padding, one token at a time, in float64."""
    out = torch.zeros(3, 4, dtype=torch.float64)
    for b, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        row = prompt + response
        logits = model(input_ids=torch.tensor([row])).logits[0].double() / temperature
        for t, token in enumerate(response):
            out[b, t] = torch.log_softmax(logits[len(prompt) + t - 1], -1)[token]
    return out


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("extra", [0, 7])
def test_logprobs_equal_a_loop_at_any_padding(family, extra):
    model = causal_model(family)
    ids, mask = batch(extra)
    with torch.no_grad():
        ours = response_logprobs(model, ids, mask, 4, temperature=1.3)
        expected = slow_logprobs(model, 1.3)
    assert ours.dtype == torch.float32 and ours.shape == (3, 4)
    torch.testing.assert_close(ours.double(), expected, atol=2e-5, rtol=0)


def test_padding_with_the_end_token_changes_nothing():
    model = causal_model()
    with torch.no_grad():
        own, shared = (response_logprobs(model, *batch(pad=pad), 4) for pad in (0, 2))
    torch.testing.assert_close(own, shared, atol=1e-6, rtol=0)
    assert (shared[1, :2] < 0).all(), "the end token has a probability of its own"


def test_entropy_comes_with_the_same_logprobs():
    model = causal_model()
    ids, mask = batch()
    with torch.no_grad():
        logprobs, entropy = response_logprobs_and_entropy(model, ids, mask, 4, temperature=0.7)
        assert torch.equal(logprobs, response_logprobs(model, ids, mask, 4, temperature=0.7))
        logits = model(input_ids=torch.tensor([PROMPTS[1] + RESPONSES[1]])).logits[0].double() / 0.7
    p = torch.softmax(logits[1:3], -1)
    torch.testing.assert_close(entropy[1, :2].double(), -(p * p.log()).sum(-1), atol=1e-5, rtol=0)
    assert entropy[1, 2:].tolist() == [0, 0]


def test_logits_are_asked_for_on_response_positions_only():
    asked = []

    def model(**inputs):
        asked.append(inputs["logits_to_keep"])
        return SimpleNamespace(logits=torch.zeros(3, inputs["logits_to_keep"], VOCABULARY))

    response_logprobs(model, *batch(), 4)
    assert asked == [5]  # one more than the response: the first token is scored by the last of the prompt


def test_gradients_reach_the_model():
    model = causal_model()
    ids, mask = batch()
    response_logprobs(model, ids, mask, 4).sum().backward()
    ours = model.get_input_embeddings().weight.grad.clone()
    model.zero_grad()
    logits = model(input_ids=ids, attention_mask=mask.long(), position_ids=positions(mask)).logits
    logp = torch.log_softmax(logits[:, -5:-1].float(), -1).gather(-1, ids[:, -4:].unsqueeze(-1)).squeeze(-1)
    logp[mask[:, -4:]].sum().backward()
    torch.testing.assert_close(ours, model.get_input_embeddings().weight.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2"])
def test_the_first_ratio_is_one_with_dropout_in_the_config(family):
    model = causal_model(family, attention_dropout=0.3, dropout=0.3, resid_pdrop=0.3, attn_pdrop=0.3)
    model.eval()
    ids, mask = batch()
    with torch.no_grad():
        old = response_logprobs(model, ids, mask, 4)
    # the reference is another copy of the same weights, the batch another width
    reference = causal_model(family)
    with torch.no_grad():
        wide = batch(extra=5)
        ref = response_logprobs(reference, *wide, 4)
    new = response_logprobs(model, ids, mask, 4)
    _, figures = policy_loss(new, old, torch.randn(3, 4), mask[:, -4:], 0.2)
    assert abs(figures["ratio_max"].item() - 1) < 1e-5 and abs(figures["ratio_min"].item() - 1) < 1e-5
    assert figures["clip_fraction"] == 0 and abs(figures["approx_kl"].item()) < 1e-6
    torch.testing.assert_close(old, ref, atol=1e-5, rtol=0)


@pytest.mark.parametrize("length", [0, 9])
def test_a_response_needs_a_prompt(length):
    ids, mask = batch()
    with pytest.raises(ValueError, match=f"response_length {length} must lie between 1 and 8"):
        response_logprobs(causal_model(), ids, mask, length)


def test_positions_and_response_masks():
    mask = torch.tensor([[False, False, True, True], [True, True, True, False]])
    assert positions(mask).tolist() == [[0, 0, 0, 1], [0, 1, 2, 2]]
    assert response_mask_from(torch.tensor([1, 0, 3]), 3).tolist() == [[True, False, False], [False] * 3, [True] * 3]


def experience(rows: int = 5, prompt: int = 4, response: int = 3) -> Experience:
    lengths = torch.arange(rows) % response + 1
    mask = torch.ones(rows, prompt, dtype=torch.bool)
    mask[:, 0] = False
    response_mask = response_mask_from(lengths.clamp(max=2), response)
    numbers = torch.arange(rows * response).view(rows, response).float()
    return Experience(
        input_ids=torch.arange(rows * (prompt + response)).view(rows, -1),
        attention_mask=torch.cat([mask, response_mask], 1),
        response_mask=response_mask,
        logprobs=numbers,
        scores=torch.arange(rows).float(),
    )


def test_trimming_cuts_padding_columns_only():
    whole = experience()
    cut = whole.trimmed()
    assert cut.input_ids.shape == (5, 5) and cut.response_length == 2
    assert torch.equal(cut.input_ids, whole.input_ids[:, 1:6])
    assert torch.equal(cut.logprobs, whole.logprobs[:, :2]) and torch.equal(cut.scores, whole.scores)
    assert cut.attention_mask.sum() == whole.attention_mask.sum()
    empty = Experience(
        input_ids=torch.zeros(1, 5, dtype=torch.long),
        attention_mask=torch.zeros(1, 5, dtype=torch.bool),
        response_mask=torch.zeros(1, 2, dtype=torch.bool),
    ).trimmed()
    assert empty.input_ids.shape == (1, 2) and empty.response_length == 1


def test_trimmed_logprobs_are_the_same():
    model = causal_model()
    ids, mask = batch(extra=3)
    ids, mask = torch.nn.functional.pad(ids, (0, 2)), torch.nn.functional.pad(mask, (0, 2))
    whole = Experience(input_ids=ids, attention_mask=mask, response_mask=mask[:, -6:])
    cut = whole.trimmed()
    assert cut.input_ids.shape[1] == 9 and cut.response_length == 4
    with torch.no_grad():
        a = response_logprobs(model, ids, mask, 6)[:, :4]
        b = response_logprobs(model, cut.input_ids, cut.attention_mask, 4)
    torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_wrong_shapes_are_named():
    with pytest.raises(ValueError, match=r"experience values has shape \[5, 2\], not \[5, 3\]"):
        whole = experience()
        Experience(**{**whole.tensors(), "values": torch.zeros(5, 2)})
    with pytest.raises(ValueError, match="masks are bool"):
        whole = experience()
        Experience(**{**whole.tensors(), "response_mask": whole.response_mask.long()})
