"""A resumed run is the run that never stopped: on other rank counts, under other stages."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import engine
from tests.engine.test_stages import build, config_for, train, whole
from tests.engine.tiny import tiny_llama, token_batch, token_loss
from tests.helpers import run_ranks

BATCHES = [token_batch(6, seed=seed) for seed in range(4)]
SCHEDULE = {"scheduler": {"type": "linear", "params": {"num_warmup_steps": 2, "num_training_steps": 6}}}


def start(stage: int, variant: str = "tied", **more):
    eng = engine.initialize(build(variant), config_for(stage, 1, 0.5, **{**SCHEDULE, **more}))
    eng.enable_ema(0.9)
    return eng


def save_half(rank, world, jobs, more=None):
    """For each (stage, folder): two steps, then a checkpoint."""
    for stage, folder in jobs:
        eng = start(stage, **(more or {}))
        train(eng, BATCHES[:2], rank, world, 1)
        eng.save_checkpoint(folder, client_state={"position": 7})


def finish(rank, world, jobs, more=None):
    """For each (stage, folder): resume and take the other two steps."""
    results = []
    for stage, folder in jobs:
        eng = start(stage, **(more or {}))
        path, state = eng.load_checkpoint(folder)
        assert path.name == "global_step2" and state == {"position": 7}
        assert (eng.global_steps, eng.skipped_steps) == (2, 0)
        rates, norms = [], []
        for batch in BATCHES[2:]:
            rates += eng.get_lr()[:1]
            norms += train(eng, [batch], rank, world, 1)
        averages = {name: engine.sharding.whole(value) for name, value in eng.ema.items()}
        results.append((whole(eng), averages, rates, norms))
    return results


def uninterrupted(rank, world, stage, more=None):
    eng = start(stage, **(more or {}))
    norms = train(eng, BATCHES, rank, world, 1)
    return whole(eng), {name: engine.sharding.whole(value) for name, value in eng.ema.items()}, norms[2:]


def test_resume_on_other_ranks_and_stages(tmp_path):
    expected, averages, norms = uninterrupted(0, 1, 0)
    one, two = tmp_path / "one", [tmp_path / f"two{stage}" for stage in (1, 2, 3)]
    save_half(0, 1, [(0, one)])
    run_ranks(save_half, 2, [*zip((1, 2, 3), two, strict=True)])
    resumed = finish(0, 1, [(0, two[2]), (0, two[0])])
    resumed += run_ranks(finish, 3, [(3, one), (1, two[1]), (2, two[2]), (0, two[0])])[0]
    for parameters, ema, rates, got in resumed:
        assert rates == pytest.approx([1e-3, 0.75e-3])  # warm-up over 2 steps, then linear to 0 at 6
        assert got == pytest.approx(norms, rel=1e-5)
        for name in expected:
            torch.testing.assert_close(parameters[name], expected[name], atol=1e-5, rtol=0)
            torch.testing.assert_close(ema[name], averages[name], atol=1e-5, rtol=0)


def same_world(rank, world, stage, folder):
    more = {"bf16": {"enabled": True}}
    expected, *_ = uninterrupted(rank, world, stage, more)
    save_half(rank, world, [(stage, folder)], more)
    parameters, *_ = finish(rank, world, [(stage, folder)], more)[0]
    return all(torch.equal(parameters[name], expected[name]) for name in expected)


@pytest.mark.parametrize("stage", [0, 2])
def test_same_world_resumes_bit_for_bit_in_bf16(tmp_path, stage):
    assert all(run_ranks(same_world, 2, stage, tmp_path))


# -- within an accumulation window ------------------------------------------------------------------------

WINDOW = 4


def micro_batches(eng, batch, rank, world, start, stop):
    """Micro-batches `start` to `stop` of a window over `batch`; each one's rows are dealt to the ranks."""
    for micro in range(start, stop):
        rows = slice(micro + WINDOW * rank, None, WINDOW * world)
        part = {key: value[rows] for key, value in batch.items()}
        logits = eng(input_ids=part["input_ids"], attention_mask=part["attention_mask"]).logits
        loss, count = token_loss(logits, part["labels"])
        eng.backward(loss, weight=count)
        eng.step()


LARGE = [token_batch(3 * WINDOW, seed=seed) for seed in range(3)]


def within(stage, bf16=False):
    return engine.initialize(build("unused"), config_for(stage, WINDOW, 0.5, bf16={"enabled": bf16}))


def save_within(rank, world, jobs, micro=2):
    """One step, then a checkpoint after `micro` micro-batches of the next."""
    for stage, folder in jobs:
        eng = within(stage)
        micro_batches(eng, LARGE[0], rank, world, 0, WINDOW)
        micro_batches(eng, LARGE[1], rank, world, 0, micro)
        eng.save_checkpoint(folder)


def finish_within(rank, world, jobs, micro=2):
    results = []
    for stage, folder in jobs:
        eng = within(stage)
        micro_batches(eng, LARGE[2], rank, world, 0, 1)  # what the engine held before must leave no trace
        eng.load_checkpoint(folder)
        assert (eng.global_steps, eng.micro_steps) == (1, WINDOW + micro)
        again = folder / f"again{stage}{world}"
        eng.save_checkpoint(again)
        eng.load_checkpoint(again)
        norms = []
        for number, batch in enumerate(LARGE[1:]):
            micro_batches(eng, batch, rank, world, 0 if number else micro, WINDOW)
            norms.append(eng.get_global_grad_norm())
        results.append((whole(eng), norms))
    return results


def uninterrupted_window():
    eng = within(0)
    norms = []
    for batch in LARGE:
        micro_batches(eng, batch, 0, 1, 0, WINDOW)
        norms.append(eng.get_global_grad_norm())
    return whole(eng), norms[1:]


def test_resume_within_an_accumulation_window(tmp_path):
    expected, norms = uninterrupted_window()
    one, two = tmp_path / "one", [tmp_path / f"two{stage}" for stage in range(4)]
    save_within(0, 1, [(0, one)])
    run_ranks(save_within, 2, [*zip(range(4), two, strict=True)])
    resumed = finish_within(0, 1, [(0, two[0]), (0, two[1]), (0, two[3])])
    resumed += run_ranks(finish_within, 2, [(1, two[0]), (1, two[1]), (2, two[1]), (3, two[2])])[0]
    resumed += run_ranks(finish_within, 3, [(0, one), (1, two[3]), (2, one), (3, two[1])])[0]
    for parameters, got in resumed:
        assert got == pytest.approx(norms, rel=1e-5)
        for name in expected:
            torch.testing.assert_close(parameters[name], expected[name], atol=1e-5, rtol=0)


@pytest.mark.parametrize("micro", [1, 3])
def test_resume_after_any_micro_batch(tmp_path, micro):
    expected, norms = uninterrupted_window()
    first, second = tmp_path / "1", tmp_path / "3"
    run_ranks(save_within, 2, [(1, first), (3, second)], micro)
    resumed = finish_within(0, 1, [(0, second)], micro)
    resumed += run_ranks(finish_within, 3, [(2, first), (1, second)], micro)[0]
    for parameters, got in resumed:
        assert got == pytest.approx(norms, rel=1e-5)
        for name in expected:
            torch.testing.assert_close(parameters[name], expected[name], atol=1e-5, rtol=0)


def same_world_within(rank, world, stages, folder):
    """bf16 gradients wait in fp32 sums of their own; they are saved too."""
    for stage in stages:
        never, stopped = within(stage, bf16=True), within(stage, bf16=True)
        for eng in (never, stopped):
            micro_batches(eng, LARGE[0], rank, world, 0, 3)
        stopped.save_checkpoint(folder / str(stage))
        resumed = within(stage, bf16=True)
        resumed.load_checkpoint(folder / str(stage))
        for eng in (never, resumed):
            micro_batches(eng, LARGE[0], rank, world, 3, WINDOW)
        assert resumed.get_global_grad_norm() == pytest.approx(never.get_global_grad_norm(), rel=1e-6)
        expected = whole(never)
        for name, tensor in whole(resumed).items():
            torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=0)
    return True


def test_bf16_resumes_within_a_window(tmp_path):
    assert all(run_ranks(same_world_within, 2, (0, 1, 2), tmp_path))


def test_another_window_goes_on_at_the_same_share_of_it(tmp_path):
    """Half of 4 is 1 of 2; in plain means the halves add up whatever their micro-batches were."""

    def run(eng, steps):
        for seed in steps:
            loss, _ = token_loss(eng(**{"input_ids": ids(seed)}).logits, ids(seed))
            eng.backward(loss)
            eng.step()
        return whole(eng)

    def ids(seed):
        return token_batch(2, seed=0)["input_ids"]  # the same each time: any number of them has the same mean

    def start_with(window):
        return engine.initialize(tiny_llama(), config_for(0, window, 0.5))

    four = start_with(4)
    run(four, range(6))
    four.save_checkpoint(tmp_path)
    two = start_with(2)
    two.load_checkpoint(tmp_path)
    assert two.micro_steps == 3
    expected = run(four, range(2))
    for name, tensor in run(two, range(1)).items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-7, rtol=0)
    three = start_with(3)
    with pytest.raises(ValueError, match="stands 2 micro-batches into 4.*resume it with gradient_accumulation_steps 4"):
        three.load_checkpoint(tmp_path)


# -- optimizers and background saves ----------------------------------------------------------------------

OPTIMIZERS = {"SGD": {"lr": 0.05, "momentum": 0.9}, "Adagrad": {"lr": 0.01}, "Lion": {"lr": 1e-4}}


def optimizer_steps(rank, world, stage, folder, batches, load):
    """For each optimizer, saved in the background: one step changes what is being written under its hands."""
    results = []
    for name, params in OPTIMIZERS.items():
        more = {"optimizer": {"type": name, "params": params}, "checkpoint": {"async_save": True}}
        eng = engine.initialize(build("tied"), config_for(stage, 1, 0.0, **more))
        if load:
            eng.load_checkpoint(folder / name)
        for batch in batches:
            train(eng, [batch], rank, world, 1)
            if not load:
                eng.save_checkpoint(folder / name, client_state={"rank": rank})
        eng.wait_for_checkpoint()
        assert engine.checkpoint_files.complete_tags(folder / name)[-1] == f"global_step{1 if load else len(batches)}"
        results.append(whole(eng))
    return results


def test_every_optimizer_resumes_sharded_from_a_background_save(tmp_path):
    expected = optimizer_steps(0, 1, 0, tmp_path / "whole", BATCHES[:2], load=False)
    optimizer_steps(0, 1, 0, tmp_path / "part", BATCHES[:1], load=False)
    got = run_ranks(optimizer_steps, 2, 2, tmp_path / "part", BATCHES[1:2], True)[0]
    run_ranks(optimizer_steps, 2, 1, tmp_path / "two", BATCHES[:1], False)
    got += optimizer_steps(0, 1, 0, tmp_path / "two", BATCHES[1:2], load=True)
    for parameters, reference in zip(got, expected * 2, strict=True):
        for name in reference:
            torch.testing.assert_close(parameters[name], reference[name], atol=2e-5, rtol=0)


def export(rank, world, stage, folder, variant):
    eng = engine.initialize(build(variant), config_for(stage, 1, 0.5))
    train(eng, BATCHES[:1], rank, world, 1)
    eng.save_pretrained(folder)
    return whole(eng)


@pytest.mark.parametrize("variant", ["plain", "tied", "frozen"])
@pytest.mark.parametrize("stage", [0, 3])
def test_export_is_whole(tmp_path, variant, stage):
    """Stock loaders find every tensor once, at full size, and compute the same logits."""
    trained = run_ranks(export, 2, stage, tmp_path, variant)[0]
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    same = tiny_llama(tied=variant == "tied")
    same.load_state_dict(trained, strict=variant != "tied")
    batch = BATCHES[0]
    with torch.no_grad():
        ours = same(batch["input_ids"], batch["attention_mask"]).logits
        theirs = loaded(batch["input_ids"], batch["attention_mask"]).logits
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] == (variant == "tied")
