"""The engine's own rules: weights of micro-batches, skipped steps, precision, schedules, forward-only engines."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import engine
from tests.engine.test_stages import config_for, train, whole
from tests.engine.tiny import tiny_llama, token_batch, token_loss
from tests.helpers import run_ranks


def simple(stage: int = 0, accumulation: int = 1, clip: float = 0.0, **more):
    return engine.initialize(tiny_llama(), config_for(stage, accumulation, clip, **more))


def micro_step(eng, batch, weighted: bool = True, poison: bool = False):
    loss, count = token_loss(eng(batch["input_ids"], batch["attention_mask"]).logits, batch["labels"])
    if poison:
        loss = loss * float("nan")
    eng.backward(loss, weight=count if weighted else None)
    eng.step()


def test_plain_backward_is_the_mean_over_micro_batches():
    eng = simple(accumulation=2)
    parts = [token_batch(2, seed=seed) for seed in range(2)]
    reference = tiny_llama()
    for part in parts:
        loss, _ = token_loss(reference(part["input_ids"], part["attention_mask"]).logits, part["labels"])
        (loss / 2).backward()
    norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in reference.parameters()]))
    for part in parts:
        micro_step(eng, part, weighted=False)
    assert eng.get_global_grad_norm() == pytest.approx(float(norm), rel=1e-5)


def test_counters_and_boundaries():
    eng = simple(accumulation=3)
    seen = []
    for number in range(7):
        seen.append((eng.is_gradient_accumulation_boundary(), eng.is_gradient_accumulation_start()))
        micro_step(eng, token_batch(1, seed=number))
    assert [boundary for boundary, _ in seen] == [False, False, True, False, False, True, False]
    assert [start for _, start in seen] == [True, False, False, True, False, False, True]
    assert (eng.global_steps, eng.micro_steps, eng.weights_version) == (2, 7, 2)


def test_what_users_of_deepspeed_ask_an_engine():
    eng = simple(accumulation=3)
    sizes = eng.train_batch_size(), eng.train_micro_batch_size_per_gpu(), eng.gradient_accumulation_steps()
    assert sizes == (3, 1, 3) and not eng.was_step_applied()
    for poison in (False, True):
        for number in range(3):
            micro_step(eng, token_batch(1, seed=number), poison=poison and number == 1)
        assert eng.was_step_applied() != poison
    assert (eng.global_steps, eng.skipped_steps, eng.global_samples) == (2, 1, 6)


def test_a_model_with_nothing_to_train_is_named():
    with pytest.raises(ValueError, match="no parameter has requires_grad: unfreeze some, or leave the optimizer out"):
        engine.initialize(tiny_llama().requires_grad_(False), config_for(0, 1, 0.0))


def test_mixing_weighted_and_plain_micro_batches_is_refused():
    eng = simple(accumulation=2)
    micro_step(eng, token_batch(1))
    with pytest.raises(ValueError, match="`weight` in one micro-batch"):
        micro_step(eng, token_batch(1), weighted=False)


def test_a_micro_batch_without_any_token_changes_nothing():
    batch, empty = token_batch(2, seed=1), token_batch(1, seed=2)
    empty["labels"] = torch.full_like(empty["labels"], -100)
    one, two = simple(), simple(accumulation=2)
    micro_step(one, batch)
    micro_step(two, batch)
    logits = two(empty["input_ids"], empty["attention_mask"]).logits
    two.backward(logits.sum() * 0.0, weight=0)
    two.step()
    expected = whole(one)
    for name, tensor in whole(two).items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-7, rtol=0)


def poisoned(rank, world, stage, bf16):
    """Rank 1 alone sees a NaN in its second step; both ranks must skip that one and nothing else."""
    more = {"scheduler": {"type": "linear", "params": {"num_warmup_steps": 0, "num_training_steps": 10}}}
    eng = simple(stage, **more, bf16={"enabled": bf16})
    eng.enable_ema(0.5)
    before = None
    for step in range(3):
        if step == 1:
            before = whole(eng), eng.get_lr(), {k: engine.sharding.whole(v).clone() for k, v in eng.ema.items()}
        micro_step(eng, token_batch(2, seed=10 * step + rank), poison=step == 1 and rank == 1)
        if step == 1:
            parameters, rate, averages = before
            now = whole(eng)
            assert all(torch.equal(now[name], parameters[name]) for name in parameters)
            assert eng.get_lr() == rate
            assert all(torch.equal(engine.sharding.whole(v), averages[k]) for k, v in eng.ema.items())
            assert eng.get_global_grad_norm() == float("inf")
    return eng.global_steps, eng.skipped_steps, eng.weights_version, eng.get_lr()[0]


@pytest.mark.parametrize(("stage", "bf16"), [(0, False), (1, True), (2, True), (3, False)])
def test_a_non_finite_gradient_on_one_rank_skips_the_step_on_all(stage, bf16):
    for result in run_ranks(poisoned, 2, stage, bf16):
        assert result == (3, 1, 2, pytest.approx(1e-3 * 0.8))


def in_bf16(rank, world, stage):
    eng = simple(stage, **{"bf16": {"enabled": True}})
    dtypes = []
    eng.module.model.layers[0].mlp.register_forward_hook(lambda m, i, o: dtypes.append(o.dtype))
    norms = train(eng, [token_batch(4, seed=s) for s in range(3)], rank, world, 1)
    optimizer_types = {p.dtype for group in eng.optimizer.param_groups for p in group["params"]}
    assert set(dtypes) == {torch.bfloat16} and optimizer_types == {torch.float32}
    return norms, whole(eng)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_follows_fp32_within_its_error(stage):
    norms, parameters = run_ranks(in_bf16, 2, stage)[0]
    exact = simple()
    exact_norms = train(exact, [token_batch(4, seed=s) for s in range(3)], 0, 1, 1)
    # bf16 keeps 8 bits: 2^-8 relative a rounding, several of which add up through a layer
    assert norms == pytest.approx(exact_norms, rel=2e-2)
    start = tiny_llama().state_dict()
    moved = sum(float((parameters[n] - start[n]).pow(2).sum()) for n in parameters) ** 0.5
    apart = sum(float((parameters[n] - t).pow(2).sum()) for n, t in whole(exact).items()) ** 0.5
    assert all(tensor.dtype == torch.float32 for tensor in parameters.values())
    assert apart < 0.15 * moved


def test_small_updates_survive_in_bf16():
    """Masters add up updates that bf16 alone would round away."""
    eng = simple(**{"bf16": {"enabled": True}, "optimizer": {"type": "SGD", "params": {"lr": 1e-5}}})
    before = whole(eng)
    for _ in range(4):
        micro_step(eng, token_batch(4, seed=0))
    after = whole(eng)
    assert any(not torch.equal(after[name], before[name]) for name in after)


class Headed(nn.Module):
    """A bf16 body under a head that asks for fp32."""

    _keep_in_fp32_modules = ["head"]

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 1, bias=False)

    def forward(self, x):
        hidden = self.body(x)
        assert hidden.dtype == torch.bfloat16
        return self.head(hidden.float())


def fp32_head(rank, world, stage):
    torch.manual_seed(0)
    eng = engine.initialize(Headed(), config_for(stage, 1, 0.0, bf16={"enabled": True}))
    out = eng(torch.ones(2, 8).bfloat16())
    eng.backward(out.float().mean())
    eng.step()
    return str(out.dtype)


@pytest.mark.parametrize("stage", [0, 3])
def test_modules_that_ask_for_fp32_keep_it(stage):
    assert run_ranks(fp32_head, 2, stage) == ["torch.float32"] * 2


def evaluate_between(rank, world, stage):
    """Forward passes without gradients between steps must neither see nor leave stale weights."""
    eng = simple(stage)
    batch = token_batch(4, seed=rank)
    probe = token_batch(2, seed=99)
    outputs = []
    for _ in range(2):
        micro_step(eng, batch)
        with torch.no_grad():
            outputs.append(eng(probe["input_ids"], probe["attention_mask"]).logits)
        plain = tiny_llama()
        plain.load_state_dict(whole(eng))
        with torch.no_grad():
            expected = plain(probe["input_ids"], probe["attention_mask"]).logits
        torch.testing.assert_close(outputs[-1], expected, atol=1e-5, rtol=0)
    return True


@pytest.mark.parametrize("stage", [1, 3])
def test_evaluation_uses_the_newest_weights(stage):
    assert all(run_ranks(evaluate_between, 2, stage))


def forward_only(rank, world, stage):
    eng = engine.initialize(tiny_llama(), {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}})
    batch = token_batch(2)
    with torch.no_grad():
        logits = eng(batch["input_ids"], batch["attention_mask"]).logits
        expected = tiny_llama()(batch["input_ids"], batch["attention_mask"]).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    assert not any(p.requires_grad for p in eng.module.parameters()) and eng.optimizer is None
    with pytest.raises(ValueError, match="forward-only"):
        eng.backward(logits.sum())
    return True


@pytest.mark.parametrize("stage", [0, 3])
def test_forward_only(stage):
    assert all(run_ranks(forward_only, 2, stage))


def own_optimizer(rank, world, stage):
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = config_for(stage, 1, 0.0)
    eng = engine.initialize(
        model,
        {k: v for k, v in config.items() if k != "optimizer"},
        optimizer=optimizer,
        lr_scheduler=lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0 / (1 + step)),
    )
    assert eng.optimizer is optimizer
    batch = token_batch(4, seed=5)
    micro_step(eng, {key: value[rank::world] for key, value in batch.items()})
    reference = tiny_llama()
    loss, _ = token_loss(reference(batch["input_ids"], batch["attention_mask"]).logits, batch["labels"])
    loss.backward()
    for parameter in reference.parameters():
        parameter.data.add_(parameter.grad, alpha=-0.1)
    got = whole(eng)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(got[name], parameter.detach(), atol=1e-6, rtol=0)
    return eng.get_lr()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_client_optimizer_and_scheduler(stage):
    assert run_ranks(own_optimizer, 2, stage) == [[pytest.approx(0.05)]] * 2


def test_different_initial_weights_start_from_rank_0():
    assert all(run_ranks(different_start, 2))


def different_start(rank, world):
    eng = engine.initialize(tiny_llama(seed=rank), config_for(3, 1, 0.0))
    expected = dict(tiny_llama(seed=0).named_parameters())
    return all(torch.equal(tensor, expected[name]) for name, tensor in eng.gather_full_parameters())


def test_loss_must_be_a_scalar():
    eng = simple()
    batch = token_batch(2)
    with pytest.raises(ValueError, match=r"scalar loss, not one of shape \[2\]"):
        eng.backward(eng(batch["input_ids"]).logits.mean((1, 2)))
