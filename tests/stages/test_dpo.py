"""DPO against a slow float64 reference: a loop over pairs and tokens, written from the formula."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from data import load_stage_data
from rlhf.experience import answer_logprobs
from rlhf.losses import dpo_loss
from tests.helpers import run_ranks
from tests.rlhf import tiny_models
from tests.stages.kit import lines, run, trained, write_rows

FLAGS = {"data_split": "0,1,0", "per_device_train_batch_size": 4, "num_warmup_steps": 0}


def slow_logprob(model, ids, start) -> float:
    """Sum over the answer's tokens, one softmax over the vocabulary each, in float64, without padding."""
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0].double()
    total = 0.0
    for place in range(start, len(ids)):
        row = logits[place - 1]
        total += float(row[ids[place]] - row.max()) - math.log(float((row - row.max()).exp().sum()))
    return total


def slow_figures(policy, reference, items, beta, smoothing=0.0):
    sums = dict.fromkeys(("loss", "accuracy", "chosen_reward", "rejected_reward", "reward_margin"), 0.0)
    for item in items:
        rewards = []
        for side in ("chosen", "rejected"):
            ids, start = item[f"{side}_ids"], item[f"{side}_start"]
            rewards.append(beta * (slow_logprob(policy, ids, start) - slow_logprob(reference, ids, start)))
        gap = rewards[0] - rewards[1]
        sigmoid = 1 / (1 + math.exp(-gap))
        loss = -(1 - smoothing) * math.log(sigmoid) - smoothing * math.log(1 - sigmoid)
        for name, value in zip(sums, (loss, gap > 0, *rewards, gap), strict=True):
            sums[name] += value / len(items)
    return sums


@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_answers_probabilities_do_not_depend_on_company(family, side):
    model = tiny_models.causal_model(family).double()
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 400, (n,), generator=draw).tolist() for n in (5, 17, 11, 30)]
    starts = [3, 1, 9, 25]
    ids, mask = tiny_models.padded(rows, pad=2, side=side, extra=2)
    answers = torch.zeros_like(mask)
    for k, (row, start) in enumerate(zip(rows, starts, strict=True)):
        begin = ids.shape[1] - len(row) if side == "left" else 0
        answers[k, begin + start : begin + len(row)] = True
    with torch.no_grad():
        found = answer_logprobs(model, ids, mask, answers).tolist()
    slow = [slow_logprob(model, torch.tensor(row), start) for row, start in zip(rows, starts, strict=True)]
    assert found == pytest.approx(slow, rel=1e-5)


def test_the_loss_and_its_gradient_are_the_formula():
    draw = torch.Generator().manual_seed(0)
    chosen, rejected, ref_chosen, ref_rejected = (torch.randn(6, generator=draw) * 20 - 40 for _ in range(4))
    chosen.requires_grad_()
    losses, good, bad = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=0.3, label_smoothing=0.1)
    losses.sum().backward()
    for k in range(6):
        ratio = [float(x[k].double()) for x in (chosen.detach() - ref_chosen, rejected - ref_rejected)]
        sigmoid = 1 / (1 + math.exp(-0.3 * (ratio[0] - ratio[1])))
        assert losses[k].item() == pytest.approx(-0.9 * math.log(sigmoid) - 0.1 * math.log(1 - sigmoid), rel=1e-5)
        assert (good[k].item(), bad[k].item()) == pytest.approx((0.3 * ratio[0], 0.3 * ratio[1]), rel=1e-5)
        assert chosen.grad[k].item() == pytest.approx(0.3 * (sigmoid - 0.9), abs=1e-5)


def test_extreme_gaps_stay_finite():
    far = torch.tensor([1e4, -1e4])
    losses, *_ = dpo_loss(far, -far, torch.zeros(2), torch.zeros(2), beta=0.5, label_smoothing=0.0)
    assert losses.tolist() == pytest.approx([0.0, 1e4])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", 30)


def test_the_stage_starts_at_log_2_and_ends_where_the_formula_says(tmp_path, data):
    flags = {**FLAGS, "beta": 0.2, "label_smoothing": 0.05, "learning_rate": 1e-3, "num_train_epochs": 3}
    metrics = run("dpo", tmp_path / "out", data, **flags, per_device_eval_batch_size=2, max_seq_len=60)
    before, first, last = metrics[0], trained(metrics)[0], metrics[-1]
    for line in (before, first):
        assert line["loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert line["accuracy"] == 0 and line["reward_margin"] == 0  # a tie is not right
    assert last["loss"] < 0.5 and last["accuracy"] > 0.7 and last["reward_margin"] > 0.5
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    options = {"data_split": "0,1,0", "seed": 5, "max_seq_len": 60, "single_answers": "pair"}
    items = load_stage_data("reward", tokenizer, data_path=data, data_output_path=tmp_path / "c", **options).eval
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(folder).double().eval()
        for folder in (tmp_path / "out", tiny_models.folder())
    )
    slow = slow_figures(policy, reference, items, 0.2, 0.05)
    assert {name: last[name] for name in slow} == pytest.approx(slow, rel=1e-4, abs=1e-5)


def on_ranks(rank, world, output, data, flags):
    run("dpo", output, data, **flags)


def test_two_ranks_make_the_update_of_one(tmp_path, data):
    flags = {**FLAGS, "learning_rate": 1e-3, "max_steps": 3, "model_name_or_path": tiny_models.folder()}
    one = run("dpo", tmp_path / "one", data, **flags)
    run_ranks(on_ranks, 2, tmp_path / "two", data, {**flags, "per_device_train_batch_size": 2, "zero_stage": 3})
    for left, right in zip(one, lines(tmp_path / "two"), strict=True):
        for name in {"loss", "grad_norm", "chosen_reward", "chosen_logprob", "tokens"} & left.keys():
            assert left[name] == pytest.approx(right[name], rel=1e-4, abs=1e-5), name
    left, right = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name in left:
        torch.testing.assert_close(left[name], right[name], atol=1e-5, rtol=0)
