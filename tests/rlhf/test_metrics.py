"""What a run writes: lines, resumption, numbers that are not finite, global means, run.json."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from rlhf.metrics import (
    MetricAccumulator,
    MetricsWriter,
    write_data_report,
    write_run_json,
)
from rlhf.results import read_lines
from tests.helpers import run_ranks


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_one_line_a_step_flushed_at_once(tmp_path):
    writer = MetricsWriter(tmp_path, "sft")
    writer.log(1, {"loss": torch.tensor(0.5), "epoch": 0})
    assert lines_of(tmp_path) == [{"stage": "sft", "step": 1, "loss": 0.5, "epoch": 0}]
    writer.log_eval(1, {"perplexity": 2.0})
    writer.log_eval(1, {})
    writer.close()
    assert lines_of(tmp_path)[1:] == [{"stage": "sft", "step": 1, "eval": True, "perplexity": 2.0}]


def test_numbers_that_json_has_not_become_null(tmp_path):
    writer = MetricsWriter(tmp_path, "ppo")
    writer.log(1, {"a": float("nan"), "b": float("inf"), "c": torch.tensor(float("-inf")), "d": None, "e": [1.0]})
    writer.close()
    assert lines_of(tmp_path) == [
        {"stage": "ppo", "step": 1, "a": None, "b": None, "c": None, "d": None, "e": [1.0]}
    ]


def test_a_resumed_run_goes_on_where_its_checkpoint_stood(tmp_path):
    writer = MetricsWriter(tmp_path, "sft")
    writer.log_eval(0, {"loss": 9.0})
    for step in (1, 2, 3, 4):
        writer.log(step, {"loss": float(step)})
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "sft", "st')  # killed while writing
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    writer = MetricsWriter(tmp_path, "sft", start_step=2)
    writer.log(3, {"loss": 30.0})
    writer.close()
    assert [(line["step"], line["loss"]) for line in lines_of(tmp_path)] == [(0, 9.0), (1, 1.0), (2, 2.0), (3, 30.0)]
    MetricsWriter(tmp_path, "sft").close()
    assert lines_of(tmp_path) == [], "a fresh run starts a fresh file"
    assert read_lines(tmp_path / "absent.jsonl") == []


@pytest.mark.parametrize("given", [None, "elsewhere"])
def test_tensorboard_gets_the_same_figures(tmp_path, given):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    args = argparse.Namespace(enable_tensorboard=True, tensorboard_path=given and str(tmp_path / given))
    writer = MetricsWriter(tmp_path, "reward", args)
    writer.log(1, {"loss": 0.25, "note": "text", "bad": float("nan")})
    writer.log_eval(1, {"accuracy": 0.75})
    writer.close()
    events = EventAccumulator(str(tmp_path / (given or "tensorboard")))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"reward/loss", "reward/eval_accuracy"}
    assert events.Scalars("reward/loss")[0].value == 0.25 and events.Scalars("reward/eval_accuracy")[0].step == 1


def test_accumulated_means_are_of_sums():
    metrics = MetricAccumulator()
    metrics.add("loss", torch.tensor(3.0), 1)
    metrics.add("loss", 1.0, 3)
    metrics.add_mean("length", 2.0, 4)
    metrics.add_mean("length", 5.0, 0)
    metrics.add("nothing", 0.0, 0)
    metrics.add_max("peak", 1.5)
    metrics.add_max("peak", -2.0)
    assert metrics.reduce() == {"loss": 1.0, "length": 2.0, "nothing": 0.0, "peak": 1.5}
    assert metrics.reduce() == {}


def _log(rank, world_size, folder):
    metrics = MetricAccumulator()
    metrics.add("loss", [6.0, 1.0][rank], [3, 1][rank])
    metrics.add_max("peak", float(rank))
    means = metrics.reduce()
    writer = MetricsWriter(folder, "sft")
    writer.log(1, means)
    writer.close()
    write_run_json(folder, {"rank": rank}, "complete")
    return means


def test_two_ranks_mean_together_and_one_writes(tmp_path):
    assert run_ranks(_log, 2, tmp_path) == [{"loss": 1.75, "peak": 1.0}] * 2
    assert lines_of(tmp_path) == [{"stage": "sft", "step": 1, "loss": 1.75, "peak": 1.0}]
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["arguments"] == {"rank": 0} and run["world_size"] == 2


def test_run_json(tmp_path):
    args = argparse.Namespace(lr=1e-3, path=Path("x"), limit=float("inf"), names=["a"], flag=None)
    write_run_json(tmp_path / "out", args, "running")
    first = json.loads((tmp_path / "out" / "run.json").read_text())
    write_run_json(tmp_path / "out", args, "complete")
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert first["status"] == "running" and run["status"] == "complete" and run["started"] == first["started"]
    assert run["arguments"] == {"lr": 1e-3, "path": "x", "limit": None, "names": ["a"], "flag": None}
    assert run["versions"]["torch"] == torch.__version__.split("+")[0] or run["versions"]["torch"] == torch.__version__
    assert run["device"].startswith(("cpu", "NVIDIA")) and run["versions"]["python"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["run.json"]


def test_data_report(tmp_path):
    report = {"sources": [{"name": "sample", "rows_read": 3, "rows_dropped": {"equal": 1}}], "rows_train": 2}
    write_data_report(tmp_path, report)
    assert json.loads((tmp_path / "data_report.json").read_text()) == report
