"""LoRA through the stages: what trains and at which rate, what is saved, resuming, ranks, the free reference."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf import ppo_models as module
from stages import dpo
from tests.helpers import run_ranks
from tests.rlhf import tiny_models
from tests.stages.kit import PPO_SMALL, ppo_models, run, trained, write_rows

LORA = {"lora_dim": 4, "lora_learning_rate": 2e-2, "only_optimize_lora": True}
SMALL = {"per_device_train_batch_size": 4, "max_steps": 3, "learning_rate": 1e-3}
PPO_LORA = {
    "actor_lora_dim": 4,
    "critic_lora_dim": 4,
    "actor_lora_module_name": "q_proj,v_proj",
    "actor_lora_learning_rate": 2e-2,
    "critic_lora_learning_rate": 2e-2,
    "only_optimize_lora": True,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl")


@pytest.fixture(scope="module")
def chain(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("chain")
    all_stages(0, 1, folder, data, 0, tiny_models.folder())
    return folder


def all_stages(rank, world, folder, data, zero, model, batch=4, checkpointing=False, tp=1):
    """SFT, reward model, DPO and PPO, all under LoRA; `batch` rows a rank."""
    small = {**SMALL, **LORA, "zero_stage": zero, "per_device_train_batch_size": batch}
    small["gradient_checkpointing"] = checkpointing
    run("sft", folder / "sft", data, **small, model_name_or_path=model)
    run("reward", folder / "reward", data, **{**small, "model_name_or_path": folder / "sft"})
    stages = {"actor_zero_stage": zero, "critic_zero_stage": zero, "enable_ema": True}
    stages |= {"per_device_generation_batch_size": batch, "per_device_training_batch_size": batch}
    stages |= {"actor_gradient_checkpointing": checkpointing, "critic_gradient_checkpointing": checkpointing}
    stages["inference_tp_size"] = tp
    flags = {**PPO_SMALL, **PPO_LORA, **ppo_models(folder / "sft", folder / "reward"), **stages}
    run("dpo", folder / "dpo", data, **{**small, "model_name_or_path": folder / "sft"})
    run("ppo", folder / "ppo", data, **flags)


def weights(folder):
    return load_file(folder / "model.safetensors")


def logits(model):
    with torch.no_grad():
        return model.eval()(torch.arange(3, 23).reshape(2, 10)).logits


def is_adapted(name):
    return "layers." in name and name.endswith("proj.weight")


def test_only_adapters_move_and_both_folders_hold_them(chain):
    base, sft = weights(tiny_models.folder()), chain / "sft"
    merged = weights(sft)
    assert {name for name in base if not torch.equal(base[name], merged[name])} == set(filter(is_adapted, base))
    stock = logits(AutoModelForCausalLM.from_pretrained(sft))
    plain = AutoModelForCausalLM.from_pretrained(tiny_models.folder())
    assert (stock - logits(plain)).abs().max() > 1e-2
    adapted = PeftModel.from_pretrained(plain, sft / "adapter")
    torch.testing.assert_close(logits(adapted), stock, atol=1e-5, rtol=1e-5)
    record = json.loads((sft / "adapter" / "adapter_config.json").read_text())
    assert record["base_model_name_or_path"] == str(tiny_models.folder()) and record["r"] == 4


def test_the_score_head_trains_and_is_in_the_adapter(chain):
    merged, start = weights(chain / "reward"), weights(chain / "sft")
    changed = {name for name in start if name in merged and not torch.equal(start[name], merged[name])}
    assert changed == set(filter(is_adapted, start))
    base = AutoModelForSequenceClassification.from_pretrained(chain / "sft", num_labels=1)
    base.config.pad_token_id = AutoTokenizer.from_pretrained(chain / "reward").pad_token_id
    fresh = base.score.weight.detach().clone()
    adapted = PeftModel.from_pretrained(base, chain / "reward" / "adapter")
    stock = AutoModelForSequenceClassification.from_pretrained(chain / "reward")
    torch.testing.assert_close(logits(adapted), logits(stock), atol=1e-5, rtol=1e-5)
    assert not torch.equal(fresh, stock.score.weight)
    metrics = [json.loads(line) for line in (chain / "reward/metrics.jsonl").read_text().splitlines()]
    assert trained(metrics)[0]["lr"] == pytest.approx(1e-3)  # the head's; the adapters have their own


def test_ppo_moves_and_saves_the_adapters_alone(chain):
    lines = trained([json.loads(line) for line in (chain / "ppo/metrics.jsonl").read_text().splitlines()])
    assert lines[0]["kl_ref"] == 0 and lines[0]["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert abs(lines[-1]["kl_ref"]) > 1e-4
    start = weights(chain / "sft")
    for name in ("actor", "actor_ema"):
        end = weights(chain / "ppo" / name)
        moved = {key for key in start if not torch.equal(start[key], end[key])}
        assert moved == {key for key in start if "q_proj" in key or "v_proj" in key}, name
    plain = AutoModelForCausalLM.from_pretrained(chain / "sft")
    adapted = PeftModel.from_pretrained(plain, chain / "ppo" / "actor" / "adapter")
    stock = AutoModelForCausalLM.from_pretrained(chain / "ppo" / "actor")
    torch.testing.assert_close(logits(adapted), logits(stock), atol=1e-5, rtol=1e-5)
    AutoModelForSequenceClassification.from_pretrained(chain / "ppo" / "critic")


def test_a_reference_of_its_own_gives_the_same_figures(monkeypatch, tmp_path, chain, data):
    flags = {**PPO_SMALL, **PPO_LORA, **ppo_models(chain / "sft", chain / "reward")}
    loaded = []
    load = module.load_actor
    monkeypatch.setattr(module, "load_actor", lambda *args, **options: loaded.append(1) or load(*args, **options))
    shared = trained(run("ppo", tmp_path / "shared", data, **flags))
    assert len(loaded) == 1  # no second model in memory
    monkeypatch.setattr(module, "WithoutAdapters", lambda actor: load(chain / "sft", dropout=0.0))
    own = trained(run("ppo", tmp_path / "own", data, **flags))
    assert abs(own[-1]["kl_ref"]) > 1e-4
    for left, right in zip(shared, own, strict=True):
        assert left["kl_ref"] == pytest.approx(right["kl_ref"], abs=1e-6)
    # where more than adapters trains, the actor without them is not its start
    loaded.clear()
    run("ppo", tmp_path / "all", data, **{**flags, "only_optimize_lora": False})
    assert len(loaded) == 2


def test_dpo_shares_its_reference_too(monkeypatch, tmp_path, data):
    flags = {**SMALL, **LORA}
    shared = trained(run("dpo", tmp_path / "shared", data, **flags))
    load = dpo.load_actor
    monkeypatch.setattr(dpo, "WithoutAdapters", lambda eng: load(tiny_models.folder(), dropout=0.0))
    own = trained(run("dpo", tmp_path / "own", data, **flags))
    assert shared[0]["loss"] == pytest.approx(math.log(2), abs=1e-6) and shared[-1]["loss"] < 0.69
    for left, right in zip(shared, own, strict=True):
        assert left["loss"] == pytest.approx(right["loss"], abs=1e-6)
        assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-4)
    assert (tmp_path / "shared" / "adapter" / "adapter_model.safetensors").exists()


def every_zero_stage(rank, world, folder, data, model):
    for zero in (0, 1, 2, 3):
        more = {"checkpointing": True, "tp": 2} if zero == 3 else {"checkpointing": zero == 1}
        all_stages(rank, world, folder / str(zero), data, zero, model, batch=2, **more)


def test_two_ranks_train_the_adapters_of_one_in_every_zero_stage(tmp_path, chain, data):
    """With activation checkpointing or without, and generating alone or together: all the same model."""
    run_ranks(every_zero_stage, 2, tmp_path, data, tiny_models.folder(), timeout=240)
    for zero in "0123":
        for name in ("sft", "reward", "dpo", "ppo/actor", "ppo/actor_ema", "ppo/critic"):
            one, two = weights(chain / name), weights(tmp_path / zero / name)
            assert one.keys() == two.keys()
            for key in one:
                torch.testing.assert_close(two[key], one[key], atol=2e-4, rtol=0, msg=f"{zero} {name} {key}")
        for name in ("sft", "reward", "ppo/actor", "ppo/critic"):
            assert (tmp_path / zero / name / "adapter" / "adapter_model.safetensors").exists()


def test_without_only_optimize_lora_the_rest_trains_at_the_stage_rate(tmp_path, data):
    flags = {**SMALL, "lora_dim": 2, "lora_module_name": "q_proj", "max_steps": 2}
    run("sft", tmp_path / "sft", data, **flags)
    base, merged = weights(tiny_models.folder()), weights(tmp_path / "sft")
    assert all(not torch.equal(base[name], merged[name]) for name in base)
    assert not (tmp_path / "sft" / "adapter").exists()  # adapters alone would not be this model
    # at rate 0 of the stage only the adapters move, at rate 0 of the adapters only the rest
    run("sft", tmp_path / "adapters", data, **{**flags, "learning_rate": 0})
    run("sft", tmp_path / "rest", data, **{**flags, "lora_learning_rate": 0})
    for folder, moved in (("adapters", True), ("rest", False)):
        end = weights(tmp_path / folder)
        assert all((not torch.equal(base[n], end[n])) == (moved == ("q_proj" in n)) for n in base), folder


def test_checkpointing_keeps_the_gradients(tmp_path, data):
    flags = {**SMALL, **LORA, "max_steps": 2, "model_name_or_path": tiny_models.folder("opt")}
    plain = trained(run("sft", tmp_path / "plain", data, **flags))
    saved = trained(run("sft", tmp_path / "saved", data, **flags, gradient_checkpointing=True))
    assert plain[0]["grad_norm"] > 1e-3
    for left, right in zip(plain, saved, strict=True):
        assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-5)


def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path, data):
    flags = {**SMALL, **LORA, "max_steps": 4, "save_interval": 2}
    run("sft", tmp_path / "whole", data, **flags)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    (tmp_path / "cut/checkpoints/latest").write_text("global_step2")
    (tmp_path / "cut/model.safetensors").unlink()
    run("sft", tmp_path / "cut", data, **flags, resume=True)
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        left, right = load_file(tmp_path / "whole" / file), load_file(tmp_path / "cut" / file)
        assert all(torch.equal(left[name], right[name]) for name in left), file


def test_a_resumed_ppo_run_is_the_run_that_never_stopped(tmp_path, chain, data):
    flags = {**PPO_SMALL, **PPO_LORA, **ppo_models(chain / "sft", chain / "reward"), "save_interval": 1}
    flags["enable_ema"] = True
    whole = trained(run("ppo", tmp_path / "whole", data, **flags))
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for name in ("actor", "critic"):
        (tmp_path / "cut/checkpoints" / name / "latest").write_text("iteration1")
    resumed = trained(run("ppo", tmp_path / "cut", data, **flags, resume=True))
    assert len(whole) == 4 and [line["kl_ref"] for line in resumed] == [line["kl_ref"] for line in whole]
    for file in ("actor/adapter/adapter_model.safetensors", "actor_ema/model.safetensors", "critic/model.safetensors"):
        left, right = load_file(tmp_path / "whole" / file), load_file(tmp_path / "cut" / file)
        assert all(torch.equal(left[name], right[name]) for name in left), file


def test_a_pattern_that_matches_nothing_shows_what_could(tmp_path, data):
    with pytest.raises(ValueError) as refusal:
        run("sft", tmp_path / "sft", data, **SMALL, lora_dim=2, lora_module_name="decoder.block.")
    line = str(refusal.value)
    assert "--lora_module_name 'decoder.block.'" in line and "model.layers.*.self_attn.q_proj" in line
    assert "lm_head" not in line and "\n" not in line
