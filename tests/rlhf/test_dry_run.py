"""Dry runs: the steps they tell are those that are taken, the sizes are the published ones, and nothing is written."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf import pipeline
from rlhf.architectures import KNOWN, architecture
from rlhf.arguments import STAGE_PARSERS, parse
from rlhf.dry_run import dry_run, plan
from tests.rlhf import tiny_models
from tests.stages.kit import MAINS, PPO_SMALL, ppo_models, run, trained, write_rows

# parameters as their makers publish them, tied embeddings counted once
PUBLISHED = {
    "facebook/opt-125m": 125_239_296,
    "facebook/opt-350m": 331_196_416,
    "facebook/opt-1.3b": 1_315_758_080,
    "facebook/opt-6.7b": 6_658_473_984,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
}


def argv(**flags):
    words = []
    for name, value in flags.items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


def planned(stage, ranks=1, **flags):
    return "\n".join(plan(stage, parse(STAGE_PARSERS[stage](), argv(output_dir="out", **flags)), ranks, {}))


def table_row(text, model):
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    (row,) = [row for row in rows if row[0] == model and len(row) > 2 and row[1] != "size"]
    return row


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_have_the_published_number_of_parameters(name):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(architecture(name))
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name]


@pytest.mark.parametrize("name", KNOWN.keys() - PUBLISHED.keys())
def test_the_other_shapes_are_as_large_as_their_names(name):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(architecture(name))
    size = float(re.search(r"-(\d+(\.\d+)?)b", name.lower())[1]) * 1e9
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(size, rel=0.2)


def test_memory_by_kind():
    """OPT 1.3B in bf16 at stage 0: 2 bytes of weights, 4 each of master and gradient, 8 of moments a parameter."""
    text = planned("sft", model_name_or_path="facebook/opt-1.3b", dtype="bf16")
    gib = PUBLISHED["facebook/opt-1.3b"] / 1024**3
    expected = [f"{bytes_ * gib:.2f}" for bytes_ in (2, 4, 4, 8, 0, 18, 0)]
    assert table_row(text, "model") == ["model", "1.32 B", "1.32 B", "0", "bfloat16", *expected]


def test_only_adapters_have_gradients_and_no_second_model_is_the_reference():
    names = {"actor_model_name_or_path": "facebook/opt-1.3b", "critic_model_name_or_path": "facebook/opt-350m"}
    lora = {"actor_lora_dim": 16, "only_optimize_lora": True}
    text = planned("ppo", ranks=2, **names, **lora, dtype="bf16", inference_tp_size=2)
    # q, k, v, out: 16 x (2048 + 2048) each; fc1, fc2: 16 x (2048 + 8192) each; 24 layers
    trained_numel = 24 * 16 * (4 * 4096 + 2 * 10240)
    row = table_row(text, "actor")
    assert row[2] == f"{trained_numel / 1e6:.3g} M" and row[7] == f"{4 * trained_numel / 1024**3:.2f}"
    assert "reference" not in text and "reward model" in text
    assert "reference" in planned("ppo", **names, actor_lora_dim=16)
    average = table_row(planned("ppo", **names, enable_ema=True), "moving average")
    assert average[-2] == f"{4 * PUBLISHED['facebook/opt-1.3b'] / 1024**3:.2f}"
    # 16 sequences of 512 tokens, 24 layers, keys and values of 2048 in bf16
    assert f"keys and values at most {16 * 512 * 24 * 2 * 2048 * 2 / 1024**3:.2f} GiB" in text


def test_batches():
    text = planned("sft", 3, model_name_or_path="facebook/opt-125m", per_device_train_batch_size=5,
                   gradient_accumulation_steps=2)  # fmt: skip
    assert "5 rows x 2 micro-batches x 3 processes = 30 rows an update" in text
    sizes = {"per_device_generation_batch_size": 6, "generation_batches": 2, "per_device_training_batch_size": 4}
    names = {"actor_model_name_or_path": "facebook/opt-125m", "critic_model_name_or_path": "facebook/opt-125m"}
    text = planned("ppo", 4, **sizes, **names, ppo_epochs=2, gradient_accumulation_steps=3)
    assert "6 prompts x 1 answers x 2 generation batches x 4 processes = 48 answers an iteration" in text
    assert "4 answers x 3 micro-batches x 4 processes = 48 answers an update" in text
    assert "3 micro-batches x 2 epochs / 3 = 2 updates an iteration" in text


def test_estimators_without_a_critic_and_rewards_without_a_model():
    names = {"actor_model_name_or_path": "facebook/opt-125m", "reward_fn": "data.sample.gold:score"}
    text = planned("ppo", 2, **names, advantage_estimator="grpo", per_device_generation_batch_size=2)
    assert "2 prompts x 8 answers x 1 generation batches x 2 processes = 32 answers an iteration" in text
    assert not re.search(r"^ +(critic|reward model) ", text, flags=re.M) and "reference" in text
    with pytest.raises(ValueError, match="nothing scores the answers"):
        planned("ppo", actor_model_name_or_path="facebook/opt-125m", advantage_estimator="rloo")


@pytest.mark.parametrize("stage", ["sft", "reward", "dpo", "ppo"])
def test_the_steps_told_are_the_steps_taken(stage, tmp_path, capsys):
    data = write_rows(tmp_path / "rows.jsonl")
    reward = tmp_path / "reward"
    flags = {"per_device_train_batch_size": 4, "num_train_epochs": 2}
    if stage == "ppo":
        run("reward", reward, data, per_device_train_batch_size=4, max_steps=1)
        flags = {**PPO_SMALL, **ppo_models(tiny_models.folder(), reward), "ppo_epochs": 2, "max_steps": 0}
    else:
        flags["model_name_or_path"] = tiny_models.folder()
    shared = {"data_path": data, "data_split": "1,1,1", "seed": 5, "output_dir": tmp_path / "run"}
    MAINS[stage](argv(**shared, **flags, dry_run=True))
    told = re.search(r"make (\d+) optimizer steps", capsys.readouterr().out)
    assert not (tmp_path / "run").exists()
    steps = trained(run(stage, tmp_path / "run", data, **flags))
    assert steps[-1]["step"] == int(told[1]) > 1


def test_a_folder_with_only_a_configuration_will_do(tmp_path):
    shutil.copy(tiny_models.folder("opt") / "config.json", tmp_path)
    numel = sum(p.numel() for p in tiny_models.causal_model("opt").parameters())
    assert table_row(planned("sft", model_name_or_path=tmp_path), "model")[1] == f"{numel / 1e3:.3g} K"


def test_hub_data_is_not_looked_at(capsys):
    names = {"model_name_or_path": "facebook/opt-125m", "data_path": "Dahoas/rm-static"}
    text = planned("sft", **names)
    assert "Dahoas/rm-static: on the hub, not looked at" in text and "known when the data is read" in text
    assert "at most --max_steps 7" in planned("sft", **names, max_steps=7)


def test_too_few_rows_are_told(tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", count=9)
    text = planned("sft", 64, model_name_or_path="facebook/opt-125m", data_path=data)
    assert "about 1 rows: 1 epoch(s) of 0 micro-batch(es) make no optimizer step" in text


ONE = {"model_name_or_path": "facebook/opt-125m"}
JUDGED = {"actor_model_name_or_path": "facebook/opt-125m", "reward_fn": "data.sample.gold:score"}


@pytest.mark.parametrize(
    ("stage", "flags", "words"),
    [
        ("sft", {"model_name_or_path": "./nothing"}, "no model folder nothing"),
        ("sft", {**ONE, "data_path": "none.jsonl"}, "no data at none.jsonl"),
        ("sft", {**ONE, "lora_dim": 2, "lora_module_name": "zzz"}, "no linear layer"),
        ("ppo", {**JUDGED, "reward_fn": "none.py:score"}, "no file none.py"),
        ("ppo", {**JUDGED, "gold_fn": "data.sample.gold:nothing"}, "has no function nothing"),
        ("ppo", {**JUDGED, "unsupervised_dataset_name": "none.jsonl"}, "no data at none.jsonl"),
    ],
)
def test_what_would_stop_the_run_stops_it(stage, flags, words):
    with pytest.raises((ValueError, FileNotFoundError), match=words) as refusal:
        planned(stage, **flags)
    assert "\n" not in str(refusal.value)


def test_ranks_other_than_the_first_are_silent(monkeypatch, capsys):
    args = parse(STAGE_PARSERS["sft"](), argv(model_name_or_path="facebook/opt-125m", output_dir="o"))
    monkeypatch.setenv("WORLD_SIZE", "4")
    dry_run("sft", args)
    assert "on 4 processes" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "1")
    dry_run("sft", args)
    assert not capsys.readouterr().out


def test_the_pipelines_stages_start_from_what_is_not_there_yet(tmp_path, capsys):
    output = tmp_path / "out"
    words = ["--dry_run", "--actor-model", "facebook/opt-350m", "--reward-model", "125m", "--nproc", "2"]
    pipeline.main([*words, "--output-dir", str(output)])
    told = capsys.readouterr().out
    assert [title in told for title in ("Step 1 (SFT)", "Step 2 (reward model)", "Step 3 (PPO)")] == [True] * 3
    assert table_row(told, "actor")[1] == table_row(told, "reference")[1] == "331 M"
    assert table_row(told, "critic")[1] == "125 M" and not output.exists()
    pipeline.main([*words, "--output-dir", str(output), "--step", "3"])
    told = capsys.readouterr().out
    assert table_row(told, "actor")[1] == "331 M" and "Step 1" not in told
