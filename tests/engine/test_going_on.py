"""What comes between micro-batches and steps: evaluations, saves, errors that are caught, calls out of order."""

from __future__ import annotations

import pytest
import torch

from tests.engine.test_engine import micro_step, simple
from tests.engine.test_stages import whole
from tests.engine.tiny import tiny_llama, token_batch, token_loss
from tests.helpers import run_ranks

PROBE = token_batch(2, seed=99)["input_ids"]


class Broken(Exception):
    pass


def break_off(eng, layer: int, is_training: bool = False) -> None:
    """A forward pass that raises in the middle of a layer, for callers who go on."""

    def fail(*_):
        raise Broken

    handle = eng.module.model.layers[layer].mlp.register_forward_pre_hook(fail)
    with pytest.raises(Broken), torch.set_grad_enabled(is_training):
        eng(PROBE)
    handle.remove()


def break_off_backward(eng) -> None:
    def fail(_):
        raise Broken

    layer = eng.module.model.layers[0]
    handle = layer.mlp.register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
    with pytest.raises(Broken):
        eng.backward(eng(PROBE).logits.float().mean(), weight=0)
    handle.remove()


def check_output(eng) -> None:
    """The forward pass computes with the parameters there are."""
    plain = tiny_llama()
    plain.load_state_dict(whole(eng))
    with torch.no_grad():
        torch.testing.assert_close(eng(PROBE).logits, plain(PROBE).logits, atol=1e-5, rtol=0)
    # a training pass is not put back to shards first
    torch.testing.assert_close(eng(PROBE).logits.detach(), plain(PROBE).logits.detach(), atol=1e-5, rtol=0)


def after_errors(rank, world, stage, folder):
    eng = simple(stage, accumulation=2)
    eng.save_checkpoint(folder)
    start = whole(eng)
    for number, is_training in enumerate((False, True)):
        for micro in range(2):
            micro_step(eng, token_batch(2, seed=10 * number + 2 * micro + rank))
        break_off(eng, layer=number, is_training=is_training)
        check_output(eng)
        break_off(eng, layer=number, is_training=is_training)
        eng.load_checkpoint(folder)
        assert all(torch.equal(tensor, start[name]) for name, tensor in whole(eng).items())
        check_output(eng)
    for micro in range(2):
        batch = token_batch(2, seed=micro)
        loss, count = token_loss(eng(batch["input_ids"]).logits, batch["labels"])
        eng.backward(loss, weight=count)
        break_off(eng, layer=0)  # an evaluation that fails between backward and step
        eng.step()
    assert any(not torch.equal(tensor, start[name]) for name, tensor in whole(eng).items())
    check_output(eng)
    return True


@pytest.mark.parametrize("stage", [1, 3])
def test_a_caught_error_leaves_no_stale_weights(tmp_path, stage):
    assert all(run_ranks(after_errors, 2, stage, tmp_path))


def after_a_broken_backward(rank, world, stage):
    eng, other = simple(stage), simple(stage)
    break_off_backward(eng)
    eng.parameters.zero_grad()  # what it had added up by then
    for number in range(2):
        for one in (eng, other):
            micro_step(one, token_batch(2, seed=2 * number + rank))
    expected = whole(other)
    return all(torch.equal(tensor, expected[name]) for name, tensor in whole(eng).items())


@pytest.mark.parametrize("stage", [1, 3])
def test_training_goes_on_after_a_caught_error_in_backward(stage):
    assert all(run_ranks(after_a_broken_backward, 2, stage))


def evaluate(eng, folder):
    with torch.no_grad():
        eng(PROBE)


def infer(eng, folder):
    with torch.inference_mode():
        eng(PROBE)


def drop_a_forward_pass(eng, folder):
    eng(PROBE)


def export(eng, folder):
    eng.save_pretrained(folder)


def fail(eng, folder):
    break_off(eng, layer=1)


def save(eng, folder):
    eng.save_checkpoint(folder)


def within_windows(rank, world, stage, bf16, folder):
    """The same training with something in the middle of every window, and without."""
    more = {"bf16": {"enabled": bf16}}
    results = []
    for between in (None, evaluate, infer, drop_a_forward_pass, export, fail, save):
        eng = simple(stage, accumulation=3, clip=0.5, **more)
        if between is infer:
            infer(eng, folder)  # the first pass of all too
        for number in range(6):
            batch = token_batch(2, seed=2 * number + rank)
            loss, count = token_loss(eng(batch["input_ids"]).logits, batch["labels"])
            if between in (evaluate, infer):
                between(eng, folder)  # between forward and its backward
            eng.backward(loss, weight=count)
            eng.step()
            if between is not None and number % 3 != 2:
                between(eng, folder)
        results.append((eng.get_global_grad_norm(), whole(eng)))
    (norm, parameters), *others = results
    assert all(other == norm for other, _ in others)
    return all(torch.equal(tensor, parameters[name]) for _, other in others for name, tensor in other.items())


@pytest.mark.parametrize(("stage", "bf16"), [(1, False), (1, True), (2, True)])
def test_what_happens_within_a_window_changes_no_number(tmp_path, stage, bf16):
    assert all(run_ranks(within_windows, 2, stage, bf16, tmp_path))


def test_a_load_forgets_a_gradient_that_was_looked_at(tmp_path):
    never, eng = simple(), simple()
    for one in (never, eng):
        micro_step(one, token_batch(2, seed=0))
    eng.save_checkpoint(tmp_path)
    loss, count = token_loss(eng(PROBE).logits, PROBE)
    eng.backward(loss, weight=10 * count)
    assert not eng.has_overflow()
    eng.load_checkpoint(tmp_path)
    for one in (never, eng):
        micro_step(one, token_batch(2, seed=1))
    assert eng.get_global_grad_norm() == never.get_global_grad_norm()
    assert all(torch.equal(a, b) for a, b in zip(eng.module.parameters(), never.module.parameters(), strict=True))


def test_calls_out_of_order_are_refused(tmp_path):
    eng = simple(accumulation=2)
    with pytest.raises(ValueError, match="step without backward: call both"):
        eng.step()
    batch = token_batch(2)

    def backward(weight=1):
        eng.backward(token_loss(eng(batch["input_ids"]).logits, batch["labels"])[0], weight=weight)

    backward()
    with pytest.raises(ValueError, match="backward twice without step: call step after every backward"):
        backward()
    with pytest.raises(ValueError, match="save_checkpoint between backward and step: save before the one"):
        eng.save_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="boundary was moved between backward and step: say it before backward"):
        eng.set_gradient_accumulation_boundary(True)
    eng.step()
    for weight in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"weight is {float(weight)}: it counts units, so give a finite number"):
            backward(weight)
    backward()
    eng.step()
    assert (eng.global_steps, eng.skipped_steps) == (1, 0)
