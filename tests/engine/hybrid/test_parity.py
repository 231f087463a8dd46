"""The decoder against transformers: the same greedy tokens and the same probabilities, for every family."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPTNeoConfig

from engine.hybrid import Generator, decoder, scheduler
from engine.hybrid.attention import Prompts
from tests.engine.hybrid import tiny

NEW = 14


def check_same(config, batches=(1, 3, 5)):
    model = tiny.build(config)
    generator = Generator(model)
    assert generator.core.model is not None
    ids, mask = tiny.batch()
    for size in batches:
        part, part_mask = ids[-size:], mask[-size:]
        expected = tiny.reference(tiny.build(config), part, part_mask, NEW)
        output = generator.generate(part, part_mask, max_new_tokens=NEW, return_dict_in_generate=True)
        assert torch.equal(output.sequences, expected)
    return model, output


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_greedy_tokens_and_their_probabilities(name):
    model, output = check_same(tiny.FAMILIES[name])
    mask = tiny.batch()[1]
    table = tiny.forward_logprobs(model, output.sequences, mask, 9)
    expected = table.gather(2, output.sequences[:, 9:, None]).squeeze(2)
    inside = torch.arange(expected.shape[1]) < output.lengths[:, None]
    assert (expected - output.logprobs)[inside].abs().max() < 1e-5
    assert (output.logprobs[~inside] == 0).all()


@pytest.mark.parametrize("name", tiny.ROTARY)
def test_rotary_scalings_past_the_trained_length(name):
    check_same(tiny.ROTARY[name])


@pytest.mark.parametrize("name", {**tiny.FAMILIES, **tiny.ROTARY})
def test_logits_after_every_token_of_a_prompt(name):
    """Not only the last, from which answers go on."""
    model = tiny.build({**tiny.FAMILIES, **tiny.ROTARY}[name])
    ids, mask = tiny.batch()
    core = Generator(model).core
    core.sync()
    core.model.workspace.open(len(ids), 16, 0)
    core.model.workspace.widen(9, 0)
    plan = Prompts(core.model.heads, mask.sum(1).tolist(), 0, 0, core.device)
    with torch.no_grad():
        got = core.model._run(ids[mask.bool()], plan.positions, 9, plan, None)
        positions = {} if model.config.model_type == "bloom" else {"position_ids": (mask.cumsum(1) - 1).clamp(0)}
        expected = model(ids, attention_mask=mask, **positions).logits[mask.bool()]
    assert got.shape == (29, tiny.VOCABULARY)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_padding_side_and_amount_do_not_matter():
    model = tiny.build(tiny.llama())
    generator = Generator(model)
    ids, mask = tiny.batch()
    answers = generator.generate(ids, mask, max_new_tokens=6)[:, 9:]
    wide = torch.nn.functional.pad(ids, (4, 0)), torch.nn.functional.pad(mask, (4, 0))
    assert torch.equal(generator.generate(*wide, max_new_tokens=6)[:, 13:], answers)
    for row in range(5):
        alone = ids[row : row + 1][:, mask[row] == 1]
        assert torch.equal(generator.generate(alone, max_new_tokens=6)[0, -6:], answers[row])


@pytest.mark.parametrize("name", ["gemma2", "llama tied, biases, one head each", "opt"])
def test_bf16_without_kernels_for_it_is_fp32_of_the_same_weights(name, monkeypatch):
    monkeypatch.setattr(decoder, "lacks_bf16", lambda: True)
    ids, mask = tiny.batch()
    model = tiny.build(tiny.FAMILIES[name]).bfloat16()
    answers = Generator(model).generate(ids, mask, max_new_tokens=NEW)
    assert torch.equal(answers, tiny.reference(model.float(), ids, mask, NEW))


def test_bf16_stays_near_the_models_own_bf16():
    model = tiny.build(tiny.llama()).bfloat16()
    ids, mask = tiny.batch()
    output = Generator(model).generate(
        ids, mask, max_new_tokens=8, do_sample=True, seed=5, eos_token_id=[], return_dict_in_generate=True
    )
    table = tiny.forward_logprobs(model, output.sequences, mask, 9)
    expected = table.gather(2, output.sequences[:, 9:, None]).squeeze(2)
    assert (expected - output.logprobs).abs().mean() < 0.02


IN_PASSES = {name: tiny.FAMILIES[name] for name in ("llama", "mistral", "gemma2", "gpt2", "bloom")}
# frequencies that depend on the length take the whole prompt's in every pass
IN_PASSES |= {name: tiny.ROTARY[name] for name in ("dynamic", "longrope")}


@pytest.mark.parametrize("name", IN_PASSES)
def test_a_prompt_longer_than_one_pass(name, monkeypatch):
    model = tiny.build(IN_PASSES[name])
    ids = torch.randint(3, tiny.VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    ids[1, :9] = mask[1, :9] = ids[2, :35] = mask[2, :35] = 0
    if name in tiny.ROTARY:  # what follows a row would otherwise depend on how long the others are
        ids, mask = ids[:1], mask[:1]
    passes = []
    generator = Generator(model)
    read = generator.core.model.prompts
    monkeypatch.setattr(generator.core.model, "prompts", lambda *a: passes.append(a[1]) or read(*a))
    monkeypatch.setattr(scheduler, "PREFILL_TOKENS", 7)
    answers = generator.generate(ids, mask, max_new_tokens=6, return_dict_in_generate=True)
    assert torch.equal(answers.sequences, tiny.reference(model, ids, mask, 6))
    assert passes.count([7]) >= 5
    if name not in tiny.ROTARY:
        table = tiny.forward_logprobs(model, answers.sequences, mask, 40)
        inside = torch.arange(answers.logprobs.shape[1]) < answers.lengths[:, None]
        expected = table.gather(2, answers.sequences[:, 40:, None]).squeeze(2)
        assert (expected - answers.logprobs)[inside].abs().max() < 1e-4


@pytest.mark.parametrize("config", [tiny.llama(), tiny.FAMILIES["bloom"], tiny.NO_ADAPTER])
def test_autocast_and_the_default_type_change_nothing(config):
    """Neither what is laid out under them (with adapters merged) nor what is computed."""
    ids, mask = tiny.batch()
    settings = {"max_new_tokens": 6, "do_sample": True, "seed": 3, "return_dict_in_generate": True}
    outputs = []
    for autocast, default in ((False, torch.float32), (True, torch.float32), (False, torch.bfloat16)):
        names = [name for name, child in tiny.build(config).named_modules() if isinstance(child, torch.nn.Linear)]
        model = get_peft_model(tiny.build(config), LoraConfig(r=2, target_modules=[names[0]], init_lora_weights=False))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            torch.set_default_dtype(default)
            try:
                outputs.append(Generator(model).generate(ids, mask, **settings))
            finally:
                torch.set_default_dtype(torch.float32)
    for output in outputs[1:]:
        assert torch.equal(output.sequences, outputs[0].sequences)
        assert torch.equal(output.logprobs, outputs[0].logprobs)


def test_new_weights_are_used_at_once():
    model = tiny.build(tiny.llama())
    generator = Generator(model)
    ids, mask = tiny.batch()
    generator.generate(ids, mask, max_new_tokens=6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.7)
    assert torch.equal(generator.generate(ids, mask, max_new_tokens=6), tiny.reference(model, ids, mask, 6))


def test_a_wrong_layout_would_be_seen():
    """The comparison has teeth: gate and up exchanged give other tokens."""
    model = tiny.build(tiny.llama())
    ids, mask = tiny.batch()
    generator = Generator(model)
    for target in generator.core.swap.targets:
        if target.name.endswith("up.weight"):
            target.pieces.reverse()
            target.pieces[:] = [type(p)(p.source, p.rows, p.cols, (48 - p.at[0], 0)) for p in target.pieces]
    assert not torch.equal(generator.generate(ids, mask, max_new_tokens=6), tiny.reference(model, ids, mask, 6))


def test_limits_of_their_own_stay_within_learned_positions():
    """Each row fits its 20 positions; the longest limit behind the longest prompt would not."""
    config = GPTNeoConfig(
        vocab_size=tiny.VOCABULARY, hidden_size=32, num_layers=2, attention_types=[[["global"], 2]], num_heads=4,
        max_position_embeddings=20, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = tiny.build(config)
    ids = torch.arange(3, 21)[None].repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[1, :15] = 0
    output = Generator(model).generate(ids, mask, max_new_tokens=[2, 17], eos_token_id=[], return_dict_in_generate=True)
    assert output.lengths.tolist() == [2, 17]
    for row, new in enumerate((2, 17)):
        real = ids[row][mask[row].bool()][None]
        alone = tiny.reference(model, real, torch.ones_like(real), new, eos_token_id=None)[0, real.shape[1] :]
        assert torch.equal(output.sequences[row, 18 : 18 + new], alone)


def test_a_family_without_an_adapter_runs_its_own_forward(caplog):
    model = tiny.build(tiny.NO_ADAPTER).train()
    ids, mask = tiny.batch()
    with caplog.at_level("WARNING", logger="engine.hybrid"):
        generator = Generator(model)
        output = generator.generate(ids, mask, max_new_tokens=6, return_dict_in_generate=True)
        generator.generate(ids, mask, max_new_tokens=6)
    assert len([r for r in caplog.records if "its own forward" in r.message]) == 1
    assert model.training
    assert torch.equal(output.sequences, tiny.reference(model.eval(), ids, mask, 6))
    sampled = generator.generate(ids, mask, max_new_tokens=4, do_sample=True, seed=1, return_dict_in_generate=True)
    again = generator.generate(ids, mask, max_new_tokens=4, do_sample=True, seed=1)
    assert torch.equal(sampled.sequences, again)
    limited = generator.generate(
        ids, mask, max_new_tokens=[4, 1, 3, 2, 4], eos_token_id=[], return_dict_in_generate=True
    )
    assert limited.lengths.tolist() == [4, 1, 3, 2, 4]
    table = tiny.forward_logprobs(model, sampled.sequences, mask, 9)
    expected = table.gather(2, sampled.sequences[:, 9:, None]).squeeze(2)
    inside = torch.arange(expected.shape[1]) < sampled.lengths[:, None]
    assert (expected - sampled.logprobs)[inside].abs().max() < 1e-4
