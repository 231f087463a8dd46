"""What the engine prints and writes about a run, and that it is about the whole global batch."""

from __future__ import annotations

import csv
import logging
import re

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import engine
from engine import monitor
from tests.engine.test_engine import micro_step
from tests.engine.test_stages import ROWS, config_for, train
from tests.engine.tiny import plain_training, tiny_llama, token_batch, token_loss
from tests.helpers import run_ranks

SCHEDULE = {"scheduler": {"type": "linear", "params": {"num_warmup_steps": 0, "num_training_steps": 4}}}
BATCHES = [token_batch(ROWS, seed=seed) for seed in range(3)]


def watched(stage, accumulation, folder, **more):
    section = {"enabled": True, "output_path": str(folder), "job_name": "job"}
    settings = {"tensorboard": section, "csv_monitor": section, **SCHEDULE, **more}
    return engine.initialize(tiny_llama(), config_for(stage, accumulation, 0.5, **settings))


def read(folder, name):
    with (folder / "job" / f"Train_Samples_{name}.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["step", name]
    return [(int(samples), float(value)) for samples, value in rows]


def run_watched(rank, world, folder):
    train(watched(2, 2, folder), BATCHES[:2], rank, world, 2)
    # a second engine in the same folder goes on with its files
    eng = watched(0, 1, folder, fp16={"enabled": True, "initial_scale_power": 8})
    eng.global_samples = 8
    loss = token_loss(eng(BATCHES[2]["input_ids"]).logits, BATCHES[2]["labels"])[0]
    eng.backward(loss * (1.0 + rank))
    eng.step()
    return float(loss)


@torch.no_grad()
def mean_loss(model, batch):
    return float(token_loss(model(batch["input_ids"], batch["attention_mask"]).logits, batch["labels"])[0])


def test_events_are_of_the_global_batch(tmp_path):
    loss = run_ranks(run_watched, 2, tmp_path)[0]
    trained = tiny_llama()
    expected = [mean_loss(trained, BATCHES[0])]
    plain_training(trained, BATCHES[:1], 1e-3, 0.5, weight_decay=0.1)
    expected.append(mean_loss(trained, BATCHES[1]))
    got = read(tmp_path, "train_loss")
    # samples by the config: 1 a micro-batch x 2 micro-batches x 2 ranks, then without accumulation
    assert [samples for samples, _ in got] == [4, 8, 10]
    assert [value for _, value in got] == [
        pytest.approx(expected[0], rel=1e-5),
        pytest.approx(expected[1], rel=1e-5),
        pytest.approx(1.5 * loss, rel=1e-5),  # 1 and 2 times it on the two ranks
    ]
    assert [value for _, value in read(tmp_path, "lr")] == pytest.approx([1e-3, 0.75e-3, 1e-3])
    assert read(tmp_path, "loss_scale") == [(4, 1.0), (8, 1.0), (10, 256.0)]
    events = EventAccumulator(str(tmp_path / "job")).Reload()
    assert "Train/Samples/loss_scale" in events.Tags()["scalars"]
    assert not list(tmp_path.glob("job/*elapsed*"))


def test_lines_and_times(tmp_path, caplog):
    caplog.set_level(logging.INFO, "engine.monitor")
    eng = watched(0, 2, tmp_path, steps_per_print=2, wall_clock_breakdown=True)
    for seed in range(9):
        micro_step(eng, token_batch(1, seed=seed))
    lines = [record.getMessage() for record in caplog.records if record.name == "engine.monitor"]
    number = r"\d+\.\d+"
    assert [line.split(":")[0] for line in lines] == ["step 2", "step 2 took", "step 4", "step 4 took"]
    assert re.fullmatch(rf"step 4: loss {number}, lr 2.500e-04, grad norm {number}, {number} samples/s", lines[2])
    parts = rf"forward {number} ms, backward {number} ms, reduce {number} ms, step {number} ms"
    assert re.fullmatch(rf"step 4 took: {parts}", lines[3])
    both, inner, reduce = (
        read(tmp_path, f"elapsed_time_ms_{part}") for part in ("backward", "backward_inner", "backward_allreduce")
    )
    assert len(both) == 4 and both[0][1] == pytest.approx(inner[0][1] + reduce[0][1])
    assert all(value > 0 for part in ("forward", "step") for _, value in read(tmp_path, f"elapsed_time_ms_{part}"))


def test_nothing_is_written_unless_asked(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO, "engine.monitor")
    eng = engine.initialize(tiny_llama(), config_for(0, 1, 0.5))
    micro_step(eng, token_batch(1))
    forward_only = {"train_micro_batch_size_per_gpu": 1, "csv_monitor": {"enabled": True}}
    with torch.no_grad():
        engine.initialize(tiny_llama(), forward_only)(token_batch(1)["input_ids"])
    assert not list(tmp_path.iterdir()) and not caplog.records


def test_keys_without_effect_are_named_once(caplog):
    monitor.warn_once.cache_clear()
    config = {"train_micro_batch_size_per_gpu": 1, "aio": {}, "comms_logger": {"enabled": True}}
    for _ in range(2):
        engine.initialize(torch.nn.Linear(2, 2), config)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said == ["config keys that DeepSpeed knows and that have no effect here: aio, comms_logger"]
