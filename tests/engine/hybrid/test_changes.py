"""Answers follow whatever changed the weights, and what one rank cannot do is refused on all of them."""

from __future__ import annotations

import tempfile

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, StableLmConfig

import engine
from engine.adapters import adapters_off
from engine.hybrid import Generator
from tests.engine.hybrid import tiny
from tests.engine.hybrid.test_hybrid_engine import adapted, config, rank_batch, same_tokens, train
from tests.helpers import run_ranks

TIED = tiny.FAMILIES["llama tied, biases, one head each"]
TIED_NO_ADAPTER = StableLmConfig(**{**tiny.NO_ADAPTER.to_dict(), "tie_word_embeddings": True})


def with_lora(base, targets, **options):
    model = get_peft_model(tiny.build(base), LoraConfig(r=2, lora_alpha=4, target_modules=targets, **options))
    torch.manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    return model.eval()


def changed_by_hand(rank, world, stage, tp):
    """Parameters written to outside the engine, as sharded tensors and as their rows."""
    ids, mask = rank_batch(rank)
    same = []
    for as_rows in (False, True):
        eng = engine.initialize(tiny.build(tiny.llama()), config(stage, tp))
        eng.generate(ids, mask, max_new_tokens=6)
        plain = tiny.build(tiny.llama())
        with torch.no_grad():
            for parameter in eng.module.parameters():
                (parameter.to_local() if as_rows and stage else parameter).mul_(0.7)
            for parameter in plain.parameters():
                parameter.mul_(0.7)
        got = eng.generate(ids, mask, max_new_tokens=6)
        same.append(not len(ids) or torch.equal(got, tiny.reference(plain, ids, mask, 6)))
    eng = engine.initialize(adapted(tiny.build(tiny.llama())), config(stage, tp))
    first = eng.generate(ids, mask, max_new_tokens=6)
    with adapters_off(eng.module):
        base = eng.generate(ids, mask, max_new_tokens=6)
    same.append(not len(ids) or torch.equal(base, tiny.reference(tiny.build(tiny.llama()), ids, mask, 6)))
    same.append(torch.equal(eng.generate(ids, mask, max_new_tokens=6), first))
    return same


def in_inference_mode(rank, world, stage, tp):
    eng = engine.initialize(tiny.build(tiny.llama()), config(stage, tp))
    with torch.inference_mode():
        eng.generate(*rank_batch(rank), max_new_tokens=2)
    train(eng, rank)
    return [same_tokens(eng, tiny.llama(), rank)]


def tied_head(rank, world, stage, tp):
    """An adapter on the head is the head's alone, also where the head is the embedding."""
    ids, mask = tiny.batch()
    same = []
    for base in (TIED, TIED_NO_ADAPTER) if tp == 1 else (TIED,):
        eng = engine.initialize(with_lora(base, ["lm_head", "q_proj"]), config(stage, tp))
        expected = tiny.reference(with_lora(base, ["lm_head", "q_proj"]), ids, mask, 6)
        same.append(torch.equal(eng.generate(ids, mask, max_new_tokens=6), expected))
        with tempfile.TemporaryDirectory() as folder:
            eng.save_pretrained(folder)
            if rank == 0:
                saved = AutoModelForCausalLM.from_pretrained(folder)
                same.append(torch.equal(tiny.reference(saved, ids, mask, 6), expected))
    return same


def refusals(rank):
    """Only rank 1's call cannot be; both ranks say so, and go on together."""
    eng = engine.initialize(tiny.build(tiny.llama()), config(3, 2))
    lines = []
    for ids, settings in ((torch.tensor([[5, 97 if rank else 7]]), {}), (torch.tensor([[5]]), {"top_k": rank})):
        try:
            eng.generate(ids, max_new_tokens=2, **settings)
        except ValueError as error:
            lines.append(str(error))
    return lines, same_tokens(eng, tiny.llama(), rank)


def two_ranks(rank, world):
    layouts = [(0, 2), (2, 1), (3, 2)]
    same = [f(rank, world, *layout) for layout in layouts for f in (changed_by_hand, in_inference_mode, tied_head)]
    return same, refusals(rank)


def test_two_ranks():
    results = run_ranks(two_ranks, 2, timeout=240)
    for same, ((unknown, differ), goes_on) in results:
        assert all(all(part) for part in same)
        assert "has token 97, and the model's vocabulary ends at 96" in unknown
        assert "ranks 0 and 1 generate together, and their settings differ" in differ
        assert goes_on
    assert results[0][1][0][0].startswith("rank 1: ")


@pytest.mark.parametrize(
    "targets, options, words",
    [
        (["embed_tokens"], {}, "model.embed_tokens has LoRA on an embedding"),
        (["q_proj"], {"use_dora": True}, "use_dora"),
        (["q_proj"], {"lora_bias": True}, "lora_bias"),
        (["q_proj"], {"modules_to_save": ["lm_head"]}, "lm_head has a copy of its own"),
    ],
)
def test_adapters_that_cannot_be_merged_are_refused(targets, options, words, tmp_path):
    model = with_lora(tiny.llama(attention_bias=True), targets, **options)
    with pytest.raises(ValueError, match=words):
        Generator(model)
    eng = engine.initialize(model, {"train_micro_batch_size_per_gpu": 1})
    with pytest.raises(ValueError, match=words):
        eng.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
