"""Sampling follows the distribution, with and without cuts, and a request's draws are its own."""

from __future__ import annotations

import math

import pytest
import torch

from engine.hybrid import Generator
from engine.hybrid.sampling import Sampling, choose, mix, uniforms
from tests.engine.hybrid import tiny

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -4.0])
DRAWS = 20000


def draw(sampling: Sampling, too_early=None, logits=LOGITS):
    rows = logits.expand(DRAWS, -1).clone()
    uniform = uniforms([mix(11, i) for i in range(DRAWS)], 1, rows.device)[:, 0]
    return choose(rows, uniform, sampling, too_early)


def expected(temperature=1.0, keep=range(8)):
    weights = [math.exp(float(x) / temperature) if i in keep else 0.0 for i, x in enumerate(LOGITS)]
    return [w / sum(weights) for w in weights]


@pytest.mark.parametrize(
    "settings, keep, temperature",
    [
        ({}, range(8), 1.0),
        ({"temperature": 0.7}, range(8), 0.7),
        ({"top_k": 3}, range(3), 1.0),
        # shares 0.532, 0.196, 0.119, ...: the third is the first to reach 0.8
        ({"top_p": 0.8}, range(3), 1.0),
        ({"top_p": 0.5}, range(1), 1.0),
        # of the five kept by k, renormalised to 0.553, 0.203, 0.123, ..., three reach 0.85; of all, four would
        ({"top_k": 5, "top_p": 0.85}, range(3), 1.0),
    ],
)
def test_counts_follow_the_distribution(settings, keep, temperature):
    tokens, logprobs = draw(Sampling(do_sample=True, **settings))
    counts = torch.bincount(tokens, minlength=8).tolist()
    chi_square = 0.0
    for count, share in zip(counts, expected(temperature, keep), strict=True):
        if share == 0:
            assert count == 0
        else:
            chi_square += (count - DRAWS * share) ** 2 / (DRAWS * share)
    # 99.9% quantile of chi-square with 7 degrees of freedom
    assert chi_square < 24.3
    # log-probabilities are those of the whole distribution, cut or not
    whole = torch.tensor(expected(temperature)).log()
    assert torch.allclose(logprobs, whole[tokens], atol=1e-5)


def test_end_tokens_wait_for_the_minimum():
    sampling = Sampling(do_sample=True, stop=(0, 2), min_new_tokens=1)
    tokens, logprobs = draw(sampling, torch.ones(DRAWS, dtype=torch.bool))
    assert not set(tokens.tolist()) & {0, 2}
    assert torch.allclose(logprobs, torch.tensor(expected()).log()[tokens], atol=1e-5)
    tokens, _ = draw(Sampling(stop=(0,), min_new_tokens=1), torch.arange(DRAWS) % 2 == 0)
    assert tokens[:4].tolist() == [1, 0, 1, 0]


def test_a_forbidden_end_token_may_hold_all_the_probability():
    """At temperature 0.01 what is left would round to 0 beside it; it is drawn from all the same."""
    logits = torch.tensor([9.0, 2.0, 1.99, 1.98])
    sampling = Sampling(do_sample=True, temperature=0.01, stop=(0,), min_new_tokens=1)
    tokens, logprobs = draw(sampling, torch.ones(DRAWS, dtype=torch.bool), logits)
    weights = [math.exp(-x) for x in range(3)]
    for token, weight in enumerate(weights, start=1):
        assert abs((tokens == token).float().mean() - weight / sum(weights)) < 0.02
    # of the whole distribution: (2.00 - 9) / 0.01 and so on, the sum over all tokens being the end token's
    assert torch.allclose(logprobs, -700.0 - (tokens - 1), atol=1e-2)


@pytest.mark.parametrize("do_sample", [True, False])
def test_end_tokens_outside_the_vocabulary_forbid_nothing(do_sample):
    """-1 is no index from behind, and 8 no error: some configs name end tokens that the model has not."""
    rows = torch.zeros(4, 8)
    rows[:, 7] = 50.0
    sampling = Sampling(do_sample, stop=(-1, 8), min_new_tokens=1)
    tokens, _ = choose(rows, torch.full((4,), 0.5), sampling, torch.ones(4, dtype=torch.bool))
    assert tokens.tolist() == [7] * 4


@pytest.mark.parametrize("settings, keep", [({}, 97), ({"top_k": 6}, 6), ({"top_p": 0.6}, None)])
def test_a_models_own_distribution(settings, keep):
    """First tokens of 4000 samples against a forward pass's probabilities, cut by hand."""
    model = tiny.build(tiny.llama())
    ids = torch.tensor([[5, 17, 40]])
    output = Generator(model).generate(
        ids, max_new_tokens=1, do_sample=True, temperature=1.5, num_return_sequences=4000, seed=1, **settings
    )
    with torch.no_grad():
        shares = (model(ids).logits[0, -1].double() / 1.5).softmax(-1)
    order = shares.argsort(descending=True).tolist()
    if keep is None:
        keep = next(n for n in range(1, 98) if shares[order[:n]].sum() >= 0.6)
    counts = torch.bincount(output[:, 3], minlength=97)
    assert counts[order[keep:]].sum() == 0
    expected = 4000 * shares[order[:keep]] / shares[order[:keep]].sum()
    # tokens too rare for chi-square's approximation count as one
    common = expected >= 8
    seen = torch.cat([counts[order[:keep]][common], counts[order[:keep]][~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    seen, expected = seen[expected > 0], expected[expected > 0]
    chi_square = float(((seen - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    # the 99.9% quantile, by Wilson and Hilferty's cube
    assert freedom > 2
    assert chi_square < freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


def test_a_zero_probability_is_never_drawn():
    logits = torch.full((3, 5), -torch.inf)
    logits[:, 2] = 0.0
    for value in (2.0**-25, 0.5, 1 - 2.0**-24):
        tokens, _ = choose(logits.clone(), torch.full((3,), value), Sampling(do_sample=True), None)
        assert tokens.tolist() == [2, 2, 2]


def test_uniforms_are_splitmix_of_key_and_step():
    def splitmix(state):
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        return state ^ state >> 31

    keys = [0, 1, 2**63 + 5, 2**64 - 1]
    got = uniforms(keys, 3, torch.device("cpu"))
    for row, key in enumerate(keys):
        for step in range(3):
            word = splitmix((key + (step + 1) * 0x9E3779B97F4A7C15) % 2**64)
            assert abs(float(got[row, step]) - ((word >> 40) + 0.5) / 2**24) < 2**-24
    many = uniforms([mix(1, i) for i in range(2000)], 10, torch.device("cpu"))
    assert abs(float(many.mean()) - 0.5) < 0.01 and 0 < float(many.min()) and float(many.max()) < 1


def test_a_request_does_not_notice_its_batch():
    generator = Generator(tiny.build(tiny.llama()))
    ids, mask = tiny.batch()
    settings = {"max_new_tokens": 8, "do_sample": True, "temperature": 1.3}
    seeds = [5, 6, 7, 8, 9]
    together = generator.generate(ids, mask, seed=seeds, eos_token_id=[], **settings)
    for row in range(5):
        alone = generator.generate(
            ids[row : row + 1], mask[row : row + 1], seed=[seeds[row]], eos_token_id=[], **settings
        )
        assert torch.equal(alone[0], together[row])
    one = generator.generate(ids, mask, seed=3, **settings)
    assert torch.equal(one, generator.generate(ids, mask, seed=3, **settings))
    assert not torch.equal(one, generator.generate(ids, mask, seed=4, **settings))
    same = generator.generate(ids[:1].repeat(4, 1), seed=3, eos_token_id=[], **settings)
    assert len({tuple(row) for row in same.tolist()}) == 4


def test_greedy_answers_leave_torchs_generator_alone():
    generator = Generator(tiny.build(tiny.llama()))
    before = torch.get_rng_state()
    generator.generate(*tiny.batch(), max_new_tokens=2)
    assert torch.equal(torch.get_rng_state(), before)
    first = generator.generate(*tiny.batch(), max_new_tokens=4, do_sample=True)
    assert not torch.equal(generator.generate(*tiny.batch(), max_new_tokens=4, do_sample=True), first)
    torch.set_rng_state(before)
    assert torch.equal(generator.generate(*tiny.batch(), max_new_tokens=4, do_sample=True), first)


def test_numbers_may_come_in_tensors_and_nones_from_transformers_configs():
    generator = Generator(tiny.build(tiny.llama()))
    settings = {"do_sample": True, "return_dict_in_generate": True}
    first = generator.generate(*tiny.batch(), max_new_tokens=4, seed=3, eos_token_id=9, **settings)
    again = generator.generate(
        *tiny.batch(),
        max_new_tokens=torch.tensor(4),
        seed=torch.tensor(3).numpy()[()],
        eos_token_id=torch.tensor(9),
        temperature=torch.tensor(1.0),
        top_k=None,
        top_p=None,
        min_new_tokens=None,
        **settings,
    )
    assert torch.equal(first.sequences, again.sequences)
    # and what comes back takes part in training
    weight = torch.ones(1, requires_grad=True)
    (weight * again.logprobs * again.lengths[:, None]).sum().backward()
    assert weight.grad.isfinite()


def test_logprobs_are_the_forward_passes():
    model = tiny.build(tiny.llama())
    ids, mask = tiny.batch()
    output = Generator(model).generate(
        ids,
        mask,
        max_new_tokens=10,
        do_sample=True,
        temperature=0.8,
        top_k=20,
        seed=2,
        eos_token_id=[],
        return_dict_in_generate=True,
    )
    table = tiny.forward_logprobs(model, output.sequences, mask, 9, temperature=0.8)
    assert torch.allclose(output.logprobs, table.gather(2, output.sequences[:, 9:, None]).squeeze(2), atol=1e-5)


@pytest.mark.parametrize(
    "settings, word",
    [
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"num_return_sequences": 0}, "num_return_sequences=0"),
        ({"seed": [1, 2]}, "2 entries for 5 prompts"),
        ({"temperature": 1e-40}, "temperature=1e-40"),
        ({"top_p": "1"}, "top_p='1' must be a number"),
        ({"pad_token_id": 0.5}, "pad_token_id=0.5 must be a whole number"),
        ({"top_k": 5.0}, "top_k=5.0 must be a whole number"),
        ({"max_new_tokens": [2, 2.5, 2, 2, 2]}, "max_new_tokens=2.5 must be a whole number"),
        ({"num_return_sequences": 2.0}, "num_return_sequences=2.0 must be a whole number"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, word):
    with pytest.raises(ValueError, match=word):
        Generator(tiny.build(tiny.llama())).generate(*tiny.batch(), **{"max_new_tokens": 2, **settings})
