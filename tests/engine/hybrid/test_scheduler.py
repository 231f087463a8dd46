"""Continuous batching: how requests share slots changes nothing about their answers."""

from __future__ import annotations

import pytest
import torch

from engine.hybrid import Generator, scheduler
from tests.engine.hybrid import tiny


def many(rows: int = 13):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, tiny.VOCABULARY, (rows, 11), generator=generator)
    mask = (torch.arange(11) >= torch.randint(0, 10, (rows, 1), generator=generator)).long()
    return ids * mask, mask


def stop_somewhere(model, ids, mask, new):
    """End tokens that let greedy answers end at many different lengths."""
    free = tiny.reference(model, ids, mask, new, eos_token_id=None)[:, ids.shape[1] :]
    return sorted({int(row[index % new]) for index, row in enumerate(free)})[::2]


@pytest.mark.parametrize("slots", [1, 3, 128])
def test_slots_do_not_matter(slots, monkeypatch):
    model = tiny.build(tiny.llama())
    ids, mask = many()
    new = 12
    stop = stop_somewhere(model, ids, mask, new)
    expected = tiny.reference(model, ids, mask, new, eos_token_id=stop, pad_token_id=0)
    monkeypatch.setattr(scheduler, "MAX_SLOTS", slots)
    output = Generator(model).generate(ids, mask, max_new_tokens=new, eos_token_id=stop, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    answers = expected[:, 11:]
    ended = torch.isin(answers, torch.tensor(stop))
    lengths = torch.where(ended.any(1), ended.int().argmax(1) + 1, new)
    assert torch.equal(output.lengths, lengths)
    assert torch.equal(output.finished, ended.any(1))
    assert len(set(lengths.tolist())) > 3


def test_finished_sequences_cost_nothing(monkeypatch):
    """Rows computed are the tokens that came out, not rows times the longest answer."""
    model = tiny.build(tiny.llama())
    ids, mask = many()
    stop = stop_somewhere(model, ids, mask, 12)
    generator = Generator(model)
    rows = []
    step = generator.core.model.step
    monkeypatch.setattr(generator.core.model, "step", lambda t, *rest: rows.append(len(t)) or step(t, *rest))
    output = generator.generate(ids, mask, max_new_tokens=12, eos_token_id=stop, return_dict_in_generate=True)
    # the first token of each answer comes with its prompt
    assert sum(rows) == int(output.lengths.sum()) - len(ids)


LIMITS = [5, 1, 12, 3, 7]


@pytest.mark.parametrize("slots", [2, 128])
def test_each_prompt_may_have_a_limit_of_its_own(slots, monkeypatch):
    """Each answer is what it is with that limit for all, seeds included."""
    monkeypatch.setattr(scheduler, "MAX_SLOTS", slots)
    generator = Generator(tiny.build(tiny.llama()))
    ids, mask = tiny.batch()
    settings = dict(do_sample=True, seed=list(range(5)), eos_token_id=[], return_dict_in_generate=True)
    whole = generator.generate(ids, mask, max_new_tokens=12, **settings)
    output = generator.generate(ids, mask, max_new_tokens=LIMITS, **settings)
    assert output.lengths.tolist() == LIMITS
    for row, limit in enumerate(LIMITS):
        end = ids.shape[1] + limit
        assert torch.equal(output.sequences[row, :end], whole.sequences[row, :end])
        torch.testing.assert_close(output.logprobs[row, :limit], whole.logprobs[row, :limit], atol=1e-5, rtol=0)
        assert not output.logprobs[row, limit:].any()
    twice = generator.generate(ids, mask, max_new_tokens=LIMITS, num_return_sequences=2, **settings)
    assert twice.lengths.tolist() == [limit for limit in LIMITS for _ in range(2)]
    with pytest.raises(ValueError, match="max_new_tokens has 2 entries for 5 prompts"):
        generator.generate(ids, mask, max_new_tokens=[3, 4])
    with pytest.raises(ValueError, match="max_new_tokens=0 must be at least 1"):
        generator.generate(ids, mask, max_new_tokens=[3, 4, 0, 1, 1])


def test_samples_of_one_prompt_share_its_reading(monkeypatch):
    model = tiny.build(tiny.llama())
    ids, mask = tiny.batch()
    generator = Generator(model)
    read = []
    prompts = generator.core.model.prompts
    monkeypatch.setattr(generator.core.model, "prompts", lambda t, *rest: read.append(len(t)) or prompts(t, *rest))
    settings = {"max_new_tokens": 7, "do_sample": True, "eos_token_id": [], "return_dict_in_generate": True}
    three = generator.generate(ids, mask, num_return_sequences=3, seed=1, **settings)
    assert read == [int(mask.sum())]
    assert three.sequences.shape == (15, 16)
    assert torch.equal(three.sequences[:, :9], ids.repeat_interleave(3, 0))
    table = tiny.forward_logprobs(model, three.sequences, mask.repeat_interleave(3, 0), 9)
    assert torch.allclose(three.logprobs, table.gather(2, three.sequences[:, 9:, None]).squeeze(2), atol=1e-5)
    assert len({tuple(row) for row in three.sequences.tolist()}) == 15


def test_batches_grow_and_shrink_between_calls():
    model = tiny.build(tiny.llama())
    generator = Generator(model)
    for rows, new in ((2, 3), (13, 20), (1, 40), (7, 5), (0, 4)):
        ids, mask = many(rows)
        output = generator.generate(ids, mask, max_new_tokens=new, eos_token_id=[])
        if rows:
            assert torch.equal(output, tiny.reference(model, ids, mask, new, eos_token_id=None))
        else:
            assert output.shape == (0, 11)


def test_tokens_are_streamed_as_they_come():
    generator = Generator(tiny.build(tiny.llama()))
    ids, mask = tiny.batch()
    heard: dict[int, list[int]] = {}
    output = generator.generate(
        ids,
        mask,
        max_new_tokens=5,
        return_dict_in_generate=True,
        on_token=lambda row, token: heard.setdefault(row, []).append(token),
    )
    for row in range(5):
        assert heard[row] == output.sequences[row, 9 : 9 + output.lengths[row]].tolist()


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "seed": 1}])
@pytest.mark.parametrize("family", [tiny.llama(), tiny.NO_ADAPTER])
def test_nan_weights_are_refused_and_leave_nothing_behind(family, settings):
    """Masked or not, a NaN in the workspace would reach the next answers: 0 times NaN is NaN."""
    model = tiny.build(family)
    generator = Generator(model)
    weight = model.model.layers[0].self_attn.v_proj.weight
    good = weight.detach().clone()
    ids, mask = tiny.batch()
    with torch.no_grad():
        weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="logits are not finite"):
        generator.generate(ids, mask, max_new_tokens=20, eos_token_id=[], **settings)
    with torch.no_grad():
        weight.copy_(good)
    assert torch.equal(generator.generate(ids, mask, max_new_tokens=6), tiny.reference(model, ids, mask, 6))


def test_prompts_that_cannot_be_are_refused():
    generator = Generator(tiny.build(tiny.FAMILIES["gpt2"]))
    ids, mask = tiny.batch()
    with pytest.raises(ValueError, match=r"prompt \(9\) \+ max_new_tokens \(56\) = 65 tokens exceed the 64 positions"):
        generator.generate(ids, mask, max_new_tokens=56)
    assert generator.generate(ids, mask, max_new_tokens=55, eos_token_id=[]).shape == (5, 64)
    empty = mask.clone()
    empty[2] = 0
    with pytest.raises(ValueError, match="row 2 of attention_mask has no token"):
        generator.generate(ids, empty, max_new_tokens=2)
    for token in (-1, 97):
        with pytest.raises(ValueError, match=f"has token {token}, and the model's vocabulary ends at 96"):
            generator.generate(torch.tensor([[5, token]]), max_new_tokens=2)
    hidden = ids.masked_fill(mask == 0, -100)  # what padding holds does not matter
    assert torch.equal(
        generator.generate(hidden, mask, max_new_tokens=2)[:, 9:],
        generator.generate(ids, mask, max_new_tokens=2)[:, 9:],
    )
    with pytest.raises(ValueError, match="input_ids must be integers"):
        generator.generate(ids.float(), mask, max_new_tokens=2)
    with pytest.raises(ValueError, match="does not match"):
        generator.generate(ids, mask[:, 1:], max_new_tokens=2)
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        generator.generate(ids, mask, max_new_tokens=0)
