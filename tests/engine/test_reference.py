"""The slow reference against torch's own parts, and the engine against the reference."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import engine
from tests.engine import reference
from tests.engine.tiny import plain_training, tiny_llama, token_batch, token_loss
from tests.helpers import run_ranks

BATCHES = [token_batch(4, seed=seed) for seed in range(4)]
LR = 3e-3


@pytest.mark.parametrize(("tied", "clip"), [(False, 0.0), (True, 0.5)])
def test_reference_equals_torch(tied, clip):
    found, updates = reference.train(
        tiny_llama(tied), BATCHES, rates=[LR] * 4, clip=clip, betas=(0.9, 0.95), weight_decay=0.1
    )
    expected, norms = plain_training(tiny_llama(tied), BATCHES, LR, clip, weight_decay=0.1)
    assert [update.grad_norm for update in updates] == pytest.approx(norms, rel=1e-5)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=0)


def test_reference_loss_is_the_mean_over_supervised_tokens():
    model = tiny_llama()
    _, loss = reference.gradient(model, BATCHES[0])
    logits = model(input_ids=BATCHES[0]["input_ids"], attention_mask=BATCHES[0]["attention_mask"]).logits
    assert loss == pytest.approx(token_loss(logits, BATCHES[0]["labels"])[0].item(), rel=1e-6)


SCHEDULE = {"warmup_max_lr": LR, "warmup_num_steps": 2, "total_num_steps": 6, "warmup_min_lr": 1e-4}
POISON = 66


def build(poisoned):
    """With an embedding row that is not finite, or without."""
    model = tiny_llama()
    if poisoned:
        with torch.no_grad():
            model.model.embed_tokens.weight[POISON] = float("inf")
    return model


def batches_for(poisoned):
    """The poisoned token stands in one row of the second batch alone: on one rank, in one micro-batch."""
    batches = [{key: value.clone() for key, value in batch.items()} for batch in BATCHES]
    for batch in batches:
        batch["input_ids"][batch["input_ids"] == POISON] = 1
    if poisoned:
        batches[1]["input_ids"][0, 0] = POISON
    return batches


def train_engine(rank, world, cases):
    """For each (stage, accumulation, poisoned): rates used, norms reported, parameters, skipped steps."""
    results = []
    for stage, accumulation, poisoned in cases:
        config = {
            "train_micro_batch_size_per_gpu": 4 // (accumulation * world),
            "gradient_accumulation_steps": accumulation,
            "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": [0.9, 0.95], "weight_decay": 0.1}},
            "scheduler": {"type": "WarmupDecayLR", "params": SCHEDULE},
            "gradient_clipping": 0.5,
            "zero_optimization": {"stage": stage},
        }
        eng = engine.initialize(build(poisoned), config)
        rates, norms = [], []
        for batch in batches_for(poisoned):
            rates.append(eng.get_lr()[0])
            for micro in range(accumulation):
                part = {key: value[micro * world + rank :: accumulation * world] for key, value in batch.items()}
                logits = eng(input_ids=part["input_ids"], attention_mask=part["attention_mask"]).logits
                loss, count = token_loss(logits, part["labels"])
                eng.backward(loss, weight=count)
                eng.step()
            norms.append(eng.get_global_grad_norm())
        whole = {name: tensor.clone() for name, tensor in eng.gather_full_parameters()}
        results.append((rates, norms, whole, eng.skipped_steps))
    return results


def warmup_decay(k):
    """The rate of update k, by the formula at i = k - 1, with N = 2 and T = 6."""
    i, low = k - 1, SCHEDULE["warmup_min_lr"]
    gamma = 0.0 if i < 0 else math.log(i + 1) / math.log(2) if i < 2 else (6 - i) / 4
    return low + (LR - low) * gamma


def check(cases, results):
    """Clipping, decay, schedule, accumulation and skipping at once, against the reference."""
    expected = {
        poisoned: reference.train(
            build(poisoned),
            batches_for(poisoned),
            rates=[warmup_decay(k) for k in range(len(BATCHES))],
            clip=0.5,
            betas=(0.9, 0.95),
            weight_decay=0.1,
        )
        for poisoned in {case[2] for case in cases}
    }
    for case, (rates, norms, whole, skipped) in zip(cases, results, strict=True):
        parameters, updates = expected[case[2]]
        assert rates == pytest.approx([update.rate for update in updates]), case
        assert skipped == sum(update.skipped for update in updates) == int(case[2]), case
        for norm, update in zip(norms, updates, strict=True):
            assert update.skipped or norm == pytest.approx(update.grad_norm, rel=1e-5), case
        for name, tensor in whole.items():
            finite = torch.isfinite(tensor)
            assert torch.equal(finite, torch.isfinite(parameters[name])), (case, name)
            torch.testing.assert_close(tensor[finite], parameters[name][finite], atol=1e-5, rtol=0)


@pytest.mark.parametrize("poisoned", [False, True])
def test_engine_in_one_process_equals_the_reference(poisoned):
    cases = [(stage, accumulation, poisoned) for stage in (0, 3) for accumulation in (1, 2, 4)]
    check(cases, train_engine(0, 1, cases))


def test_engine_on_two_ranks_equals_the_reference():
    cases = list(itertools.product((0, 1, 2, 3), (1, 2), (False, True)))
    for results in run_ranks(train_engine, 2, cases):
        check(cases, results)
