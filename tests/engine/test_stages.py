"""Every ZeRO stage, on any number of ranks and micro-batches, is plain single-process training."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn

import engine
from tests.engine.reference import gradient
from tests.engine.tiny import plain_training, tiny_llama, token_batch, token_loss
from tests.helpers import run_ranks

# At larger rates Adam, which divides a gradient by its own size, blows rounding in tiny gradients up to the tolerance.
ROWS, STEPS, LR = 8, 3, 1e-3


class WithUnused(nn.Module):
    """A model beside a parameter that no forward pass uses."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.unused = nn.Linear(3, 5)

    def forward(self, **batch):
        return self.model(**batch)


def build(variant: str) -> nn.Module:
    model = tiny_llama(tied=variant == "tied")
    if variant == "frozen":
        for parameter in model.model.layers[0].parameters():
            parameter.requires_grad_(False)
    if variant == "adapter":
        model.requires_grad_(False)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("q_proj" in name or "norm" in name)
    return WithUnused(model) if variant == "unused" else model


def config_for(stage: int, accumulation: int, clip: float, **more) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage},
        **more,
    }


def train(eng, batches, rank: int, world: int, accumulation: int) -> list[float]:
    """Deal each batch's rows over ranks and micro-batches unevenly enough that token counts differ."""
    norms = []
    for batch in batches:
        for micro in range(accumulation):
            rows = slice((micro * world + rank), None, world * accumulation)
            part = {key: value[rows] for key, value in batch.items()}
            logits = eng(input_ids=part["input_ids"], attention_mask=part["attention_mask"]).logits
            loss, count = token_loss(logits, part["labels"])
            eng.backward(loss, weight=count)
            eng.step()
        norms.append(eng.get_global_grad_norm())
    return norms


def whole(eng) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in eng.gather_full_parameters()}


def run_case(rank, world, cases):
    results = []
    batches = [token_batch(ROWS, seed=seed) for seed in range(STEPS)]
    for variant, stage, accumulation, clip in cases:
        eng = engine.initialize(build(variant), config_for(stage, accumulation, clip))
        norms = train(eng, batches, rank, world, accumulation)
        results.append((norms, whole(eng)))
    return results


@cache
def reference(variant: str, clip: float):
    model = build(variant)
    return plain_training(model, [token_batch(ROWS, seed=seed) for seed in range(STEPS)], LR, clip, weight_decay=0.1)


VARIANTS = ("plain", "tied", "frozen", "adapter", "unused")
WINDOWS = ((1, 0.5), (4, 0.0), (4, 0.5))  # (accumulation, clip)


def cases_of(world: int) -> list[tuple]:
    """Everything on 2 ranks; on 1 rank all stages are one layout, and 4 ranks repeat the harder half."""
    stages = (0,) if world == 1 else (0, 1, 2, 3)
    variants = ("tied", "unused") if world == 4 else VARIANTS
    windows = [(a, c) for a, c in WINDOWS if ROWS // (a * world) >= 1]
    windows = windows[:1] if world == 4 else windows
    return [(v, s, a, c) for v, s, (a, c) in itertools.product(variants, stages, windows)]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_equal_to_plain_training(world):
    cases = cases_of(world)
    results = run_case(0, 1, cases) if world == 1 else run_ranks(run_case, world, cases, timeout=300)[0]
    for case, (norms, parameters) in zip(cases, results, strict=True):
        variant, _, _, clip = case
        expected, expected_norms = reference(variant, clip)
        assert norms == pytest.approx(expected_norms, rel=1e-5), case
        assert parameters.keys() == expected.keys()
        for name, tensor in parameters.items():
            torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=0, msg=f"{case} {name}")


WIDE_ROWS = 16


def run_wide(rank, world, cases):
    batches = [token_batch(WIDE_ROWS, seed=seed) for seed in range(STEPS)]
    results = []
    for variant, stage, clip in cases:
        eng = engine.initialize(build(variant), config_for(stage, 4, clip))
        results.append((train(eng, batches, rank, world, 4), whole(eng)))
    return results


@pytest.mark.slow
def test_four_ranks_and_four_micro_batches():
    """A row for each: every variant and stage, clipped and not by turns."""
    pairs = itertools.product(VARIANTS, (0, 1, 2, 3))
    cases = [(variant, stage, 0.5 * (number % 2)) for number, (variant, stage) in enumerate(pairs)]
    batches = [token_batch(WIDE_ROWS, seed=seed) for seed in range(STEPS)]
    for case, (norms, parameters) in zip(cases, run_ranks(run_wide, 4, cases, timeout=300)[0], strict=True):
        variant, _, clip = case
        expected, expected_norms = plain_training(build(variant), batches, LR, clip, weight_decay=0.1)
        assert norms == pytest.approx(expected_norms, rel=1e-5), case
        for name, tensor in parameters.items():
            torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=0, msg=f"{case} {name}")


SUPERVISED = (1, 20, 3, 11)  # tokens of the joint batch's four rows: by rank and micro-batch as unequal as can be


def uneven_batch() -> dict[str, torch.Tensor]:
    ids = token_batch(4, length=21, seed=3)["input_ids"].clamp(min=1)
    mask = torch.arange(21)[None, :] <= torch.tensor(SUPERVISED)[:, None]
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(~mask, -100)}


def descend(rank, world, cases):
    """One update of plain gradient descent at rate 1: what the parameters moved by is the gradient."""
    results = []
    for stage, accumulation in cases:
        sgd = {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
        eng = engine.initialize(build("plain"), config_for(stage, accumulation, 0.0, **sgd))
        before = whole(eng)
        train(eng, [uneven_batch()], rank, world, accumulation)
        results.append({name: before[name] - tensor for name, tensor in whole(eng).items()})
    return results


def test_unequal_token_counts_are_one_batch():
    """Against float64 sums over single rows, in which no micro-batch has a mean of its own."""
    expected, _ = gradient(build("plain"), uneven_batch())
    two = [(stage, accumulation) for stage in (0, 1, 2, 3) for accumulation in (1, 2)]
    moved = descend(0, 1, [(0, 1), (0, 2), (0, 4)]) + run_ranks(descend, 2, two)[0] + run_ranks(descend, 4, [(3, 1)])[0]
    for gradients in moved:
        for name, tensor in gradients.items():
            torch.testing.assert_close(tensor.double(), expected[name], atol=1e-6, rtol=0, msg=name)
    rows = [{key: value[i : i + 1] for key, value in uneven_batch().items()} for i in range(4)]
    means = [gradient(build("plain"), row)[0] for row in rows]
    gap = max(float((sum(mean[name] for mean in means) / 4 - expected[name]).abs().max()) for name in expected)
    assert gap > 1e-2  # a mean of means is far away


def test_reference_would_notice_a_mean_of_means():
    """The batches are uneven enough that averaging micro-batch means gives another update."""
    batches = [token_batch(ROWS, seed=seed) for seed in range(STEPS)]
    eng = engine.initialize(build("plain"), config_for(0, 4, 0.0))
    for batch in batches:
        for micro in range(4):
            part = {key: value[micro::4] for key, value in batch.items()}
            loss, _ = token_loss(eng(part["input_ids"], part["attention_mask"]).logits, part["labels"])
            eng.backward(loss)
            eng.step()
    expected, _ = reference("plain", 0.0)
    gap = max(float((tensor - expected[name]).abs().max()) for name, tensor in whole(eng).items())
    assert gap > 1e-4


def offloaded(rank, world, stage):
    eng = engine.initialize(
        build("tied"),
        config_for(
            stage,
            1,
            0.5,
            zero_optimization={
                "stage": stage,
                "offload_param": {"device": "cpu"},
                "offload_optimizer": {"device": "cpu"},
            },
        ),
    )
    norms = train(eng, [token_batch(ROWS, seed=seed) for seed in range(STEPS)], rank, world, 1)
    return norms, whole(eng)


def test_offloading_changes_no_number():
    expected, expected_norms = reference("tied", 0.5)
    for norms, parameters in (run_ranks(offloaded, 2, 3)[0], run_ranks(offloaded, 1, 2)[0]):
        assert norms == pytest.approx(expected_norms, rel=1e-5)
        for name, tensor in parameters.items():
            torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=0)


def in_smaller_groups(rank, world):
    """hpZ: from forward to backward each pair of ranks keeps a whole copy between them."""
    zero = {"stage": 3, "zero_hpz_partition_size": 2}
    eng = engine.initialize(build("tied"), config_for(3, 1, 0.5, zero_optimization=zero))
    batch = token_batch(ROWS)
    eng(input_ids=batch["input_ids"])
    kept = eng.module.model.layers[0].mlp.up_proj.weight
    assert kept.to_local().shape == (44 // 2, 32)
    norms = train(eng, [token_batch(ROWS, seed=seed) for seed in range(STEPS)], rank, world, 1)
    return norms, whole(eng)


def test_hpz_changes_no_number():
    expected, expected_norms = reference("tied", 0.5)
    norms, parameters = run_ranks(in_smaller_groups, 4)[0]
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    for name, tensor in parameters.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=0)


ORDERS = ({}, {"gradient_predivide_factor": 8.0}, {"prescale_gradients": True, "gradient_predivide_factor": 8.0})


def divided(rank, world):
    """For each order of division: what goes into the sum over ranks, and what comes out of training."""
    results = []
    sum_over_ranks = dist.all_reduce
    for keys in ORDERS:
        sizes = []

        def watched(tensor, *args, sizes=sizes, **kwargs):
            if tensor.numel() > 1000:
                sizes.append(float(tensor[:1000].norm()))
            return sum_over_ranks(tensor, *args, **kwargs)

        dist.all_reduce = watched
        eng = engine.initialize(build("plain"), config_for(0, 1, 0.5, **keys))
        norms = train(eng, [token_batch(ROWS, seed=seed) for seed in range(STEPS)], rank, world, 1)
        dist.all_reduce = sum_over_ranks
        results.append((sizes[0], norms, whole(eng)))
    return results


def test_the_order_of_division_changes_no_number():
    expected, expected_norms = reference("plain", 0.5)
    results = run_ranks(divided, 2)[0]
    (after, *_), (eighth, *_), (half, *_) = results
    assert eighth == pytest.approx(after / 8) and half == pytest.approx(after / 2)
    for _, norms, parameters in results:
        assert norms == pytest.approx(expected_norms, rel=1e-5)
        for name, tensor in parameters.items():
            torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=0)
