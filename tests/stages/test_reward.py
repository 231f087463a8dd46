"""The reward stage on mixed data: pairs with margins and several rejected answers, labelled and scored answers."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from data import load_stage_data
from rlhf.models import load_score_model, scores
from tests.helpers import run_ranks
from tests.rlhf import tiny_models
from tests.stages.kit import WORDS, lines, run, trained

FLAGS = {"data_split": "0,1,0", "per_device_train_batch_size": 8, "eval_fraction": 0.2}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A file of each kind: 20 pairs of 10 rows, 10 labels, 10 scores."""
    folder = tmp_path_factory.mktemp("sources")
    asked = [(f"Say {word}.", word) for word in WORDS]
    files = {
        "pairs": [
            {"prompt": ask, "chosen": f"It is {word}.", "rejected": ["It is.", "No."], "margin": 0.7}
            for ask, word in asked
        ],
        "labels": [
            {"prompt": ask, "response": "It is so." if k % 2 else "No, no!", "label": k % 2 == 1}
            for k, (ask, _) in enumerate(asked)
        ],
        "scores": [
            {"prompt": ask, "response": "very " * k + "good", "score": k / 2} for k, (ask, _) in enumerate(asked)
        ],
    }
    paths = []
    for name, rows in files.items():
        paths.append(folder / f"{name}.jsonl")
        paths[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths


@pytest.mark.parametrize("margin_scale", [1.0, 0.0])
def test_the_loss_of_a_mixture_is_the_formula(tmp_path, sources, margin_scale):
    """In float64 from the scores of each held-out text by itself."""
    flags = {**FLAGS, "eval_fraction": 0.5, "learning_rate": 0, "max_steps": 1, "margin_scale": margin_scale}
    found = run("reward", tmp_path / "out", sources, **flags, per_device_eval_batch_size=3)[-1]
    assert (found["pairs"], found["labels"], found["scores"]) == (10, 5, 5)
    model, tokenizer = load_score_model(tmp_path / "out"), AutoTokenizer.from_pretrained(tmp_path / "out")
    options = {"data_split": "0,1,0", "eval_fraction": 0.5, "seed": 5, "data_output_path": tmp_path / "other"}
    items = load_stage_data("reward", tokenizer, data_path=sources, **options).eval

    def score(ids):
        with torch.no_grad():
            return float(scores(model, ids[None], torch.ones(1, len(ids), dtype=torch.bool)))

    losses = []
    for item in items:
        if item["kind"] == "pair":
            gap = score(item["chosen_ids"]) - score(item["rejected_ids"]) - margin_scale * 0.7
            losses.append(math.log1p(math.exp(-gap)))
        elif item["kind"] == "label":
            sign = 1 if item["target"] else -1
            losses.append(math.log1p(math.exp(-sign * score(item["answer_ids"]))))
        else:
            losses.append((score(item["answer_ids"]) - item["target"]) ** 2)
    assert found["loss"] == pytest.approx(sum(losses) / 20, abs=1e-5)


@pytest.mark.parametrize("pair_loss", ["end", "token"])
def test_each_kind_is_learned_beside_the_others(tmp_path, sources, pair_loss):
    flags = {**FLAGS, "num_train_epochs": 40, "learning_rate": 3e-3, "eval_interval": 1000, "pair_loss": pair_loss}
    metrics = run("reward", tmp_path / "out", sources, **flags)
    steps, found = trained(metrics), metrics[-1]
    assert steps[-1]["loss"] < 0.3 * steps[0]["loss"]
    assert set(found["accuracy_by_source"]) == {str(path) for path in sources[:2]}
    assert found["accuracy"] == 1 and found["auc"] > 0.8 and 0 <= found["ece"] < 0.3
    assert found["score_error"] < 1.5


def test_labels_alone(tmp_path, sources):
    flags = {**FLAGS, "num_train_epochs": 20, "learning_rate": 3e-3, "per_device_train_batch_size": 4}
    found = run("reward", tmp_path / "out", sources[1], **flags)[-1]
    assert (found["pairs"], found["labels"]) == (0, 2) and found["accuracy"] == 1
    with pytest.raises(ValueError, match="10 no answer of another score to the same prompt"):
        run("reward", tmp_path / "pairs", sources[1], **flags, single_answers="pair")


def on_ranks(rank, world, output, sources, flags):
    run("reward", output, sources, **flags)


def test_two_ranks_make_the_update_of_one_on_mixed_data(tmp_path, sources):
    """Whichever kinds fall to a rank."""
    flags = {**FLAGS, "learning_rate": 1e-3, "max_steps": 3, "per_device_eval_batch_size": 4}
    flags["model_name_or_path"] = tiny_models.folder()
    one = run("reward", tmp_path / "one", sources, **flags)
    run_ranks(on_ranks, 2, tmp_path / "two", sources, {**flags, "per_device_train_batch_size": 4, "zero_stage": 3})
    for left, right in zip(one, lines(tmp_path / "two"), strict=True):
        for name in {"loss", "grad_norm", "accuracy", "chosen_score", "auc", "ece", "tokens"} & left.keys():
            assert left[name] == pytest.approx(right[name], rel=1e-4), name
    left, right = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name in left:
        torch.testing.assert_close(left[name], right[name], atol=1e-5, rtol=0)
