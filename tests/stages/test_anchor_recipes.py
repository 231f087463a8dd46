"""DeepSpeed-Chat's published recipes, run to their end as they are, on small models and data of our own."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf.model_files import quiet
from tests.rlhf import tiny_models
from tests.rlhf.anchor_recipes import command
from tests.stages.kit import MAINS, lines, trained, write_rows


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Rows, and small models that take 512 tokens; the reward models are made by the recipes of step 2."""
    folder = tmp_path_factory.mktemp("recipes")
    write_rows(folder / "rows.jsonl")
    for family in ("opt", "llama"):
        with quiet():
            tiny_models.causal_model(family, max_position_embeddings=520).save_pretrained(folder / family)
        tiny_models.tokenizer().save_pretrained(folder / family)
    run(folder, "reward opt-350m nodes, older", folder / "reward-opt", model_name_or_path=folder / "opt")
    run(folder, "reward llama2-7b", folder / "reward-llama", model_name_or_path=folder / "llama")
    return folder


def run(folder, name, output, **models):
    stage, words = command(name)
    own = {"data_path": folder / "rows.jsonl", "data_output_path": folder / "cache", "output_dir": output, **models}
    own["tensorboard_path"] = output / "events"
    MAINS[stage]([*words, *(word for flag, value in own.items() for word in (f"--{flag}", str(value)))])
    assert json.loads((output / "run.json").read_text())["status"] == "complete"
    return lines(output)


def test_reward_models(made):
    for family in ("opt", "llama"):
        folder = made / f"reward-{family}"
        _, report = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
    steps = trained(lines(made / "reward-opt"))
    assert len(steps) == 11 and steps[0]["lr"] == pytest.approx(5e-5)  # 22 rows of 60 to train on, 2 at a time


@pytest.mark.parametrize(
    ("name", "family"),
    [("sft opt-6.7b one GPU", "opt"), ("sft llama2-7b one node", "llama"), ("dpo llama2-7b", "llama")],
)
def test_one_model(made, tmp_path, name, family):
    run(made, name, tmp_path / "out", model_name_or_path=made / family)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    start = AutoModelForCausalLM.from_pretrained(made / family)
    assert not torch.equal(next(model.parameters()), next(start.parameters()))


@pytest.mark.parametrize(
    ("name", "family", "folders"),
    [
        ("ppo opt-1.3b one node, older", "opt", {"actor", "critic", "actor_ema"}),
        ("ppo llama2-7b", "llama", {"actor", "critic"}),
    ],
)
def test_ppo(made, tmp_path, name, family, folders):
    output = tmp_path / "out"
    models = {"actor_model_name_or_path": made / family, "critic_model_name_or_path": made / f"reward-{family}"}
    steps = trained(run(made, name, output, **models))
    assert steps and steps[0]["ratio_max"] == pytest.approx(1.0, abs=1e-4) and steps[0]["kl_ref"] == 0
    assert {path.name for path in output.iterdir() if (path / "config.json").exists()} == folders
    for folder in folders - {"critic"}:
        AutoModelForCausalLM.from_pretrained(output / folder)
