"""Adapters: which layers a pattern means, what trains, and that the base is never written to."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import engine
from engine.adapters import adapters_off
from engine.optimizers import parameter_groups
from rlhf.lora import Lora, WithoutAdapters, add_adapters, matching_layers
from rlhf.models import load_actor, new_score_model
from tests.rlhf import tiny_models

BLOCKS = "decoder.layers."
PER_LAYER = {"llama": 7, "qwen2": 7, "opt": 6, "gpt2": 4, "gpt_neox": 4, "bloom": 4}


def lora(**changes):
    return Lora(**{"dim": 4, "module_name": BLOCKS, "learning_rate": 1e-2, "only_optimize_lora": True, **changes})


@pytest.mark.parametrize("family", PER_LAYER)
def test_the_default_means_the_linear_layers_of_all_blocks(family):
    layers = matching_layers(tiny_models.causal_model(family), BLOCKS)
    assert len(layers) == 2 * PER_LAYER[family]
    assert not any("head" in name or "project" in name or "embed" in name for name in layers)


def test_a_part_of_the_name_or_several():
    model = tiny_models.causal_model("llama")
    assert matching_layers(model, "layers.1.mlp.up") == ["model.layers.1.mlp.up_proj"]
    assert len(matching_layers(model, "q_proj,v_proj")) == 4
    assert len(matching_layers(model, "model.")) == 14  # heads never


@pytest.mark.parametrize("pattern", ["nothing", "lm_head", "embed_tokens", "", ","])
def test_a_pattern_that_matches_nothing_shows_what_could(pattern):
    with pytest.raises(ValueError) as refusal:
        matching_layers(tiny_models.causal_model("gpt2"), pattern, "--actor_lora_module_name")
    line = str(refusal.value)
    assert f"--actor_lora_module_name {pattern!r}" in line and "\n" not in line
    assert "transformer.h.*.attn.c_attn, transformer.h.*.attn.c_proj, transformer.h.*.mlp.c_fc" in line


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2"])
def test_new_adapters_change_nothing_and_start_as_deepspeed_chats(family):
    model = load_actor(tiny_models.folder(family))
    ids = torch.arange(3, 23).reshape(2, 10)
    before = model(ids).logits
    torch.manual_seed(0)
    add_adapters(model, lora(), tiny_models.folder(family))
    assert torch.equal(model(ids).logits, before)
    a = torch.cat([p.detach().flatten() for name, p in model.named_parameters() if ".lora_A." in name])
    # uniform in +-1/sqrt(4), whose variance is 1/12
    assert float(a.abs().max()) <= 0.5 and float(a.var()) == pytest.approx(1 / 12, rel=0.1)
    layer = model.get_submodule(matching_layers(model, ".base_layer")[0].removesuffix(".base_layer"))
    with torch.no_grad():
        layer.lora_B["default"].weight.fill_(1.0)
    x = torch.randn(3, layer.in_features)
    difference = layer(x) - layer.base_layer(x)
    torch.testing.assert_close(difference, (x @ layer.lora_A["default"].weight.T).sum(-1, keepdim=True).expand_as(
        difference) / 4)  # fmt: skip


def test_the_score_head_trains_in_any_case():
    model = new_score_model(tiny_models.folder(), tiny_models.tokenizer(), seed=0)
    add_adapters(model, lora(), tiny_models.folder())
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert "model.score.weight" in trained
    assert all(".lora_" in name for name in trained - {"model.score.weight"})
    assert isinstance(model.head, nn.Linear)


def test_without_only_optimize_lora_all_but_the_adapted_weights_trains():
    model = load_actor(tiny_models.folder("opt"))
    add_adapters(model, lora(only_optimize_lora=False, module_name="q_proj"), tiny_models.folder("opt"))
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {f"model.decoder.layers.{i}.self_attn.q_proj.base_layer.weight" for i in (0, 1)}


def hybrid(**changes):
    model = load_actor(tiny_models.folder())
    add_adapters(model, lora(), tiny_models.folder())
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, **changes}},
        "hybrid_engine": {"enabled": True, "max_out_tokens": 24},
    }
    groups = parameter_groups(model, 0.0, changes.get("lr", 0.0))
    return engine.initialize(model, config, model_parameters=groups)


def rounds(eng, count):
    ids = torch.arange(3, 23).reshape(2, 10)
    for _ in range(count):
        eng.eval()
        answers = eng.generate(ids, torch.ones_like(ids).bool(), max_new_tokens=6, do_sample=False)
        eng.train()
        eng.backward(eng(input_ids=answers, labels=answers).loss)
        eng.step()
    return answers


def test_rounds_of_generation_and_training_leave_the_base_bit_equal():
    """At rate 0 nothing moves at all; at another the adapters do, and the base still does not."""
    for rate in (0.0, 0.1):
        eng = hybrid(lr=rate)
        before = {name: p.detach().clone() for name, p in eng.module.named_parameters()}
        rounds(eng, 5)
        for name, parameter in eng.module.named_parameters():
            assert torch.equal(parameter, before[name]) or (rate and ".lora_" in name), name
        assert any(not torch.equal(p, before[name]) for name, p in eng.module.named_parameters()) == (rate > 0)


def test_the_reference_drops_nothing_out_while_the_policy_trains():
    eng = hybrid(lr=0.0)
    for child in eng.module.modules():
        if hasattr(child, "attention_dropout"):
            child.attention_dropout = 0.5
    eng.train()
    ids = torch.arange(3, 23).reshape(2, 10)
    with torch.no_grad():
        wanted = load_actor(tiny_models.folder())(ids).logits
        assert (eng(input_ids=ids).logits - wanted).abs().max() > 1e-3  # the policy does
        torch.testing.assert_close(WithoutAdapters(eng)(input_ids=ids).logits, wanted)
    assert all(child.training for child in eng.module.modules())


def test_the_reference_is_the_model_before_its_adapters():
    eng = hybrid(lr=0.1)
    ids = torch.arange(3, 23).reshape(2, 10)
    plain = load_actor(tiny_models.folder())
    greedy = plain.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(rounds(eng, 1), greedy)
    rounds(eng, 3)
    reference = WithoutAdapters(eng).eval()
    with torch.no_grad():
        torch.testing.assert_close(reference(input_ids=ids).logits, plain(ids).logits)
        assert (eng(input_ids=ids).logits - plain(ids).logits).abs().max() > 1e-2
    with pytest.raises(ValueError, match="no gradients"):
        reference(input_ids=ids)
    with adapters_off(eng.module):
        pass
    trained = [p for name, p in eng.module.named_parameters() if ".lora_" in name]
    assert all(p.requires_grad for p in trained)
