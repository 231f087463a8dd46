"""Stages over data that is streamed, packed, grouped and padded: the same figures, and exact where a run goes on."""

import json

import pytest

from tests.rlhf import tiny_models
from tests.stages.kit import PPO_SMALL, ppo_models, run, trained, write_rows

SMALL = {"per_device_train_batch_size": 4, "max_steps": 4, "learning_rate": 1e-3, "per_device_eval_batch_size": 8}
STREAM = {"streaming": True, "shuffle_buffer": 6, "stream_eval_rows": 3}
FIGURES = {stage: ("loss", "grad_norm", "tokens") for stage in ("sft", "reward", "dpo")} | {"ppo": ("score_mean",)}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl")


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("reward") / "out"
    run("reward", folder, data, **{**SMALL, "max_steps": 1})
    return folder


def figures(metrics, stage):
    return [[line["step"], *(line[name] for name in FIGURES[stage])] for line in trained(metrics)]


@pytest.mark.parametrize("stage", FIGURES)
def test_a_streamed_run_goes_on_as_if_it_had_not_stopped(tmp_path, data, reward_model, stage):
    flags = {**SMALL, **STREAM}
    if stage == "ppo":
        flags = {**PPO_SMALL, **STREAM, **ppo_models(tiny_models.folder(), reward_model), "num_eval_prompts": 2}
    half = tmp_path / "half"
    save, tag = (1, "iteration1") if stage == "ppo" else (2, "global_step2")
    whole = figures(run(stage, half, data, **flags, save_interval=save), stage)
    report = json.loads((half / "data_report.json").read_text())
    for latest in (half / "checkpoints").rglob("latest"):  # as if it had been killed behind its first checkpoint
        assert (latest.parent / tag).is_dir()
        latest.write_text(tag)
    resumed = figures(run(stage, half, data, **flags, save_interval=save, resume=True), stage)
    assert [row[0] for row in resumed] == [1, 2, 3, 4]
    for got, want in zip(resumed, whole, strict=True):
        assert got == pytest.approx(want, rel=1e-5)
    assert json.loads((half / "data_report.json").read_text()) == report, "rows before the cut are counted once"
    (source,) = report["sources"]
    assert report["streaming"] and source["rows_train"] > 0
    assert source["rows_read"] == source["rows_train"] + source["rows_eval"] + sum(source["rows_dropped"].values())


def test_a_packed_row_trains_as_its_dialogues_by_themselves(tmp_path, data):
    """All 54 rows in one batch, or in one row: the same losses, step by step."""
    flags = {"max_steps": 3, "num_train_epochs": 3, "learning_rate": 1e-3, "data_split": "1,0,0"}
    alone = run("sft", tmp_path / "alone", data, **flags, per_device_train_batch_size=54)
    one_row = {"packing": True, "max_seq_len": 4096, "per_device_train_batch_size": 1}
    packed = run("sft", tmp_path / "packed", data, **flags, **one_row)
    assert trained(alone)[0]["tokens"] == trained(packed)[0]["tokens"]
    for left, right in zip(alone, packed, strict=True):
        assert left["loss"] == pytest.approx(right["loss"], abs=1e-5)


def test_rows_grouped_by_length_and_padded_to_a_multiple_are_the_same_rows(tmp_path, data):
    flags = {"per_device_train_batch_size": 9, "data_split": "1,0,0", "eval_fraction": 0.1}
    alone = trained(run("sft", tmp_path / "alone", data, **flags))
    grouped = trained(run("sft", tmp_path / "grouped", data, **flags, group_by_length=True, pad_to_multiple_of=16))
    alone, grouped = ([line["tokens"] for line in lines] for lines in (alone, grouped))
    assert len(alone) == len(grouped) == 6 and sum(alone) == sum(grouped)
    assert max(grouped) - min(grouped) > 2 * (max(alone) - min(alone))


def test_a_stream_needs_an_end(tmp_path, data):
    with pytest.raises(ValueError, match="say with --max_steps when to stop"):
        run("sft", tmp_path / "out", data, **{**SMALL, **STREAM, "max_steps": 0})


@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_a_run_goes_on_with_another_global_batch_to_the_end_of_the_data(tmp_path, data, reward_model, stage):
    """Of 54 rows 18 in three steps of six, and the other 36 in four of nine: as on more processes than before."""
    sizes = ["per_device_train_batch_size"]
    flags = {"data_split": "1,0,0", "learning_rate": 1e-3}
    if stage == "ppo":
        sizes = ["per_device_generation_batch_size", "per_device_training_batch_size"]
        flags = {**PPO_SMALL, **ppo_models(tiny_models.folder(), reward_model), "data_split": "0,0,1", "ppo_epochs": 1}
        flags |= {"num_eval_prompts": 2, "max_answer_seq_len": 2}
    run(stage, tmp_path / "out", data, **{**flags, **dict.fromkeys(sizes, 6), "max_steps": 3}, save_interval=3)
    rest = {**flags, **dict.fromkeys(sizes, 9), "max_steps": 0, "resume": True}
    lines = trained(run(stage, tmp_path / "out", data, **rest))
    assert [(line["step"], line["epoch"]) for line in lines] == [(step, 0) for step in range(1, 8)]
    if stage == "sft":
        whole = trained(run(stage, tmp_path / "whole", data, **{**flags, sizes[0]: 54}))
        assert sum(line["tokens"] for line in lines) == whole[0]["tokens"]
