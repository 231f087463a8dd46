"""The same logical rows, whatever they come in: every file type, shape and way of loading gives identical tensors."""

from __future__ import annotations

import itertools
import json

import datasets
import pytest
import torch

from data import load_stage_data, stream_stage_data
from tests.data.kit import build
from tests.data.test_files import write

ODD = ["plain", "שלום עולם", "zero\u200bwidth\u200d", "line\u2028sep", "a,b\tc \"d\" 'e'", "😀🏳️‍🌈", "é" * 3000]
ODD += ["two\n\nHuman: x"]
ROWS = [{"prompt": f"q {k} {text}", "chosen": f"yes {text}", "rejected": f"no {k}"} for k, text in enumerate(ODD)]
SPLITS = {"sft": "1,0,0", "reward": "0,1,0", "ppo": "0,0,1"}
KINDS = ["json", "jsonl", "csv", "tsv", "parquet", "arrow", "jsonl.gz", "csv.zst", "parquet.gz"]


def turn(role, text):
    return {"role": role, "content": text}


def shapes():
    """The rows in every shape that can say them all; none has markers around its texts, as one text has them within."""
    yield "plain", ROWS
    yield "renamed", [{"query": r["prompt"], "chosen": r["chosen"], "rejected": [r["rejected"]]} for r in ROWS]
    yield "turns", [
        {
            "conversations": [{"from": "human", "value": row["prompt"]}],
            "chosen": {"from": "gpt", "value": row["chosen"]},
            "rejected": turn("assistant", row["rejected"]),
        }
        for row in ROWS
    ]
    yield "lists", [
        {side: [turn("user", row["prompt"]), turn("assistant", row[side])] for side in ("chosen", "rejected")}
        for row in ROWS
    ]


def tensors(items):
    """Token ids and labels of each item, without the rows that come along."""
    return [{name: value for name, value in item.items() if isinstance(value, torch.Tensor)} for item in items]


def same(left, right):
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("stage", SPLITS)
def test_every_file_type_shape_and_cache_gives_the_same_tensors(tmp_path, stage):
    def load(path):
        cache = tmp_path / "cache"
        options = {"data_split": SPLITS[stage], "eval_fraction": 0.25, "data_output_path": cache}
        parts = load_stage_data(stage, build("byte-level"), data_path=path, **options)
        assert parts.report["totals"]["rows_dropped"] == {}
        return tensors([*parts.train, *parts.eval])

    rows = [row for row in ROWS if "Human" not in row["prompt"]]  # as a plain prompt it would be a dialogue
    expected = load(write(tmp_path / "expected.jsonl", rows))
    assert len(expected) == len(rows)
    for kind in KINDS:
        path = write(tmp_path / f"rows.{kind}", rows)
        same(load(path), expected)
        same(load(path), expected)  # from the cache
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    same(load(tmp_path / "saved"), expected)
    for name, shaped in shapes():
        path = tmp_path / f"{name}-shape.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in shaped if "Human" not in json.dumps(row)))
        same(load(path), expected)


@pytest.mark.parametrize("stage", SPLITS)
def test_a_stream_gives_the_items_of_the_cache(tmp_path, stage):
    path = write(tmp_path / "rows.csv", ROWS)
    options = {"data_path": path, "data_split": SPLITS[stage], "eval_fraction": 0.0}
    stored = load_stage_data(stage, build("byte-level"), data_output_path=tmp_path / "cache", **options).train
    streamed = itertools.islice(stream_stage_data(stage, build("byte-level"), **options), len(ROWS))

    def order(items):
        return sorted(tensors(items), key=lambda item: [value.tolist() for value in item.values() if value.ndim])

    same(order(streamed), order(stored))


def test_marker_text_within_turns_is_the_same_in_every_shape_of_turns(tmp_path):
    results = []
    for name, shaped in list(shapes())[2:]:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in shaped))
        options = {"data_split": "0,1,0", "eval_fraction": 0.0, "data_output_path": tmp_path / "cache"}
        results.append(tensors(load_stage_data("reward", build("byte-level"), data_path=path, **options).train))
    assert len(results[0]) == len(ROWS)
    same(*results)
