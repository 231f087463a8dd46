"""Judging a rollout: sorted micro-batches without padding say what each model says of each text alone."""

from __future__ import annotations

import pytest
import torch

from rlhf.experience import response_logprobs_and_entropy, response_mask_from
from rlhf.micro_batches import Cut
from rlhf.models import new_score_model, response_values, scores
from rlhf.rollout import Models, Rollout, judge
from rlhf.scoring import Scorer
from tests.rlhf.tiny_models import VOCABULARY, causal_model, folder, tokenizer

PROMPTS, ANSWERS = torch.tensor([6, 2, 9, 4, 3]), torch.tensor([2, 5, 1, 3, 5])
P, T = 10, 5


def rollout() -> Rollout:
    """Five answers of unequal length to five left-padded prompts; one column is padding everywhere."""
    ids = torch.randint(3, VOCABULARY, (len(PROMPTS), P + T), generator=torch.Generator().manual_seed(1))
    prompt_mask = torch.arange(P) >= P - PROMPTS[:, None]
    response_mask = response_mask_from(ANSWERS, T)
    return Rollout(
        input_ids=ids,
        attention_mask=torch.cat([prompt_mask, response_mask], 1),
        response_mask=response_mask,
        gen_logprobs=-torch.rand(len(PROMPTS), T),
        lengths=ANSWERS,
        finished=ANSWERS < T,
    )


@pytest.mark.parametrize("cut", [Cut(1), Cut(2), Cut(64), Cut(1, max_tokens=15), Cut(64, max_tokens=60)])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_what_is_said_of_an_answer_is_what_is_said_of_it_alone(family, cut):
    actor, reference = causal_model(family), causal_model(family, seed=1)
    critic, reward = (new_score_model(folder(family, seed=seed), tokenizer(), seed=seed).eval() for seed in (2, 3))
    sampled = rollout()
    models = Models(actor, reference, critic, Scorer(None, reward))
    experience = judge(sampled, models, cut=cut, temperature=0.7)

    assert torch.equal(experience.gen_logprobs, sampled.gen_logprobs)
    for b, (prompt, answer) in enumerate(zip(PROMPTS.tolist(), ANSWERS.tolist(), strict=True)):
        ids = sampled.input_ids[b : b + 1, P - prompt : P + answer]
        mask = torch.ones_like(ids, dtype=torch.bool)
        with torch.no_grad():
            logprobs, entropy = response_logprobs_and_entropy(actor, ids, mask, answer, 0.7)
            ref_logprobs, _ = response_logprobs_and_entropy(reference, ids, mask, answer, 0.7)
            values = response_values(critic, ids, mask, answer)
            score = scores(reward, ids, mask)
        expected = {"logprobs": logprobs, "entropy": entropy, "ref_logprobs": ref_logprobs, "values": values}
        for name, tensor in expected.items():
            torch.testing.assert_close(getattr(experience, name)[b, :answer], tensor[0], atol=1e-4, rtol=1e-4)
            assert name == "values" or not getattr(experience, name)[b, answer:].any()
        torch.testing.assert_close(experience.scores[b : b + 1], score, atol=1e-4, rtol=1e-4)
