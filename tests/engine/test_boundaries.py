"""Updates that the caller closes or drops: boundaries set by hand, overflows foreseen, steps skipped."""

from __future__ import annotations

import math

import pytest
import torch

from tests.engine.test_engine import micro_step, simple
from tests.engine.tiny import token_batch, token_loss
from tests.helpers import run_ranks


def updates(stage: int, by_hand: bool, rank: int = 0, world: int = 1):
    """Two updates, each of three micro-batches of unequal size."""
    eng = simple(stage, accumulation=1 if by_hand else 3, clip=0.5)
    norms = []
    for number in range(6):
        if by_hand:
            eng.set_gradient_accumulation_boundary(number % 3 == 2)
        micro_step(eng, token_batch(1 + number % 3, seed=10 * number + rank))
        assert eng.is_gradient_accumulation_start() == (number % 3 == 2)
        norms.append(eng.get_global_grad_norm())
    weights = {name: parameter.clone() for name, parameter in eng.gather_full_parameters()}
    return norms[2::3], weights, eng.global_steps, eng.micro_steps // eng.gradient_accumulation_steps()


def rank_updates(rank, world, stage, by_hand):
    return updates(stage, by_hand, rank, world)


@pytest.mark.parametrize(("stage", "world"), [(0, 1), (1, 2), (3, 2)])
def test_boundaries_by_hand_are_those_that_are_counted(stage, world):
    def run(by_hand):
        return run_ranks(rank_updates, world, stage, by_hand)[0] if world > 1 else updates(stage, by_hand)

    counted, called = run(False), run(True)
    assert called[2:] == counted[2:] == (2, 2)
    assert called[0] == pytest.approx(counted[0], rel=1e-5)
    for name, weight in counted[1].items():
        torch.testing.assert_close(called[1][name], weight, atol=1e-6, rtol=0)


@pytest.mark.parametrize("poisoned", [False, True])
def test_an_overflow_is_foreseen_and_a_step_can_be_skipped(poisoned):
    eng = simple(clip=0.5)
    before = [parameter.clone() for parameter in eng.module.parameters()]
    batch = token_batch(2, seed=0)
    loss, _ = token_loss(eng(batch["input_ids"], batch["attention_mask"]).logits, batch["labels"])
    eng.backward(loss * float("nan") if poisoned else loss)
    assert eng.has_overflow() == poisoned == eng.has_overflow()  # asked twice, reduced once
    eng.step(skip=True)
    assert eng.skipped_steps == eng.global_steps == 1 and not eng.was_step_applied()
    assert all(torch.equal(a, b) for a, b in zip(before, eng.module.parameters(), strict=True))
    assert (eng.get_global_grad_norm() == math.inf) == poisoned
    micro_step(eng, batch, weighted=False)
    assert eng.was_step_applied() and eng.skipped_steps == 1
    assert any(not torch.equal(a, b) for a, b in zip(before, eng.module.parameters(), strict=True))


def test_weights_that_are_all_zero_skip_the_step():
    """Moments alone would move the parameters."""
    eng = simple()
    micro_step(eng, token_batch(2, seed=0))
    before = [parameter.clone() for parameter in eng.module.parameters()]
    loss, _ = token_loss(eng(token_batch(2, seed=1)["input_ids"]).logits, token_batch(2, seed=1)["labels"])
    eng.backward(loss, weight=0)
    eng.step()
    assert (eng.global_steps, eng.skipped_steps, eng.was_step_applied()) == (2, 1, False)
    assert all(torch.equal(now, then) for now, then in zip(eng.module.parameters(), before, strict=True))


def test_a_checkpoint_within_boundaries_set_by_hand_goes_on(tmp_path):
    def micro(eng, number):
        eng.set_gradient_accumulation_boundary(number == 2)
        micro_step(eng, token_batch(1 + number, seed=number))

    never, stopped, resumed = simple(clip=0.5), simple(clip=0.5), simple(clip=0.5)
    for number in range(3):
        micro(never, number)
    micro(stopped, 0)
    stopped.save_checkpoint(tmp_path)
    resumed.load_checkpoint(tmp_path)
    for number in (1, 2):
        micro(resumed, number)
    assert resumed.get_global_grad_norm() == pytest.approx(never.get_global_grad_norm(), rel=1e-6)
    for now, then in zip(resumed.module.parameters(), never.module.parameters(), strict=True):
        torch.testing.assert_close(now, then, atol=1e-6, rtol=0)
