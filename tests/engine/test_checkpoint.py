"""A resumed run is the run that never stopped: on other rank counts, under other stages."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import engine
from tests.engine.test_stages import build, config_for, train, whole
from tests.engine.tiny import tiny_llama, token_batch
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


def test_missing_and_incomplete_checkpoints_are_named(tmp_path):
    eng = start(0)
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        eng.load_checkpoint(tmp_path)
    eng.save_checkpoint(tmp_path, tag="good")
    (tmp_path / "latest").write_text("gone")
    with pytest.raises(FileNotFoundError, match="gone.*complete ones there: good"):
        eng.load_checkpoint(tmp_path)


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
