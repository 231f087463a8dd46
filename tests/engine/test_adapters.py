"""Adapters in the engine: exports against peft's own merging, for its wrapper and for layers put in place."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from transformers import AutoModelForCausalLM

import engine
from engine.adapters import active_factors, adapters_off
from tests.engine.hybrid import tiny

TARGETS = {"llama": ["q_proj", "down_proj"], "gpt2": ["c_attn"]}


def config(stage=0):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
    }


def base_model(family):
    return tiny.build(tiny.llama() if family == "llama" else tiny.FAMILIES[family])


def lora(family, **changes):
    targets = {"target_modules": TARGETS[family], "fan_in_fan_out": family == "gpt2", "task_type": "CAUSAL_LM"}
    return LoraConfig(r=2, lora_alpha=6, **{**targets, **changes})


def fill(model):
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.3)


def logits(model):
    with torch.no_grad():
        return model.eval()(torch.arange(3, 21).reshape(2, 9)).logits


def adapted(family, wrapped):
    model = base_model(family)
    model = get_peft_model(model, lora(family)) if wrapped else inject_adapter_in_model(lora(family), model)
    fill(model)
    return model


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("family", TARGETS)
def test_an_export_is_pefts_own_merge_and_its_adapter(tmp_path, family, wrapped):
    expected = adapted(family, wrapped=True).merge_and_unload()
    assert (logits(expected) - logits(base_model(family))).abs().max() > 0.1
    engine.initialize(adapted(family, wrapped), config()).save_pretrained(tmp_path)
    merged, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(merged.get_parameter(name), parameter, atol=1e-6, rtol=1e-6)
    alone = PeftModel.from_pretrained(base_model(family), tmp_path / "adapter")
    torch.testing.assert_close(logits(alone), logits(expected), atol=1e-5, rtol=1e-5)


def test_what_forward_does_not_add_is_not_merged(tmp_path):
    """Of two adapters the inactive one stays out, and so do all while they are off."""
    model = get_peft_model(base_model("llama"), lora("llama"))
    model.add_adapter("other", lora("llama", target_modules=["q_proj", "up_proj"]))
    fill(model)
    eng = engine.initialize(model, config())
    for active in ("default", "other"):
        model.set_adapter(active)
        eng.save_pretrained(tmp_path / active)
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / active)
        torch.testing.assert_close(logits(saved), logits(model), atol=1e-5, rtol=1e-5)
    with adapters_off(model):
        assert active_factors(model) == {}
        eng.save_pretrained(tmp_path / "off")
        off = logits(model)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "off")), off)
    torch.testing.assert_close(off, logits(base_model("llama")))
    assert active_factors(model)


def test_no_adapter_folder_where_more_was_trained(tmp_path):
    model = adapted("llama", wrapped=False)
    model.model.norm.weight.requires_grad_(True)
    engine.initialize(model, config()).save_pretrained(tmp_path)
    assert not (tmp_path / "adapter").exists()


@pytest.mark.filterwarnings("ignore:Model w")  # peft's own merge would change the embedding too, and says so
@pytest.mark.parametrize("family, body", [("llama tied, biases, one head each", "q_proj"), ("gpt2", "c_attn")])
def test_an_adapter_on_a_tied_head_is_exported_beside_the_embedding(tmp_path, family, body):
    model = get_peft_model(tiny.build(tiny.FAMILIES[family]), LoraConfig(r=2, target_modules=["lm_head", body]))
    fill(model)
    expected, base = logits(model), logits(tiny.build(tiny.FAMILIES[family]))
    engine.initialize(model, config()).save_pretrained(tmp_path)
    merged, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    torch.testing.assert_close(logits(merged), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(merged.get_input_embeddings().weight, model.get_input_embeddings().weight)
    assert model.config.tie_word_embeddings
    alone = PeftModel.from_pretrained(tiny.build(tiny.FAMILIES[family]), tmp_path / "adapter")
    torch.testing.assert_close(logits(alone), expected, atol=1e-5, rtol=1e-5)
    assert (expected - base).abs().max() > 0.1
