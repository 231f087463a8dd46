"""Streams: each row once a pass, on one rank; stages disjoint; every row accounted for."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import datasets
import pytest

from data import stream_stage_data
from tests.data.kit import build


def write(path, n=100, name="question"):
    rows = [{"prompt": f"{name} {k}", "chosen": f"good {k}", "rejected": f"bad {k}"} for k in range(n)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def stream(path, stage="ppo", **options):
    options = {"data_split": "0,0,1", "eval_fraction": 0.0, "buffer_rows": 16, "seed": 3} | options
    return stream_stage_data(stage, build("byte-level"), data_path=path, **options)


def asked(items):
    return [item["row"]["messages"][0]["content"] for item in items]


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_row_once_a_pass_on_one_rank(tmp_path, world_size):
    path = write(tmp_path / "rows.jsonl", n=60)
    ranks = [stream(path, rank=rank, world_size=world_size) for rank in range(world_size)]
    first, second = ([], [])
    for one in ranks:
        items = asked(itertools.islice(one, 2 * 60 // world_size))
        first += items[: 60 // world_size]
        second += items[60 // world_size :]
    everything = sorted(f"question {k}" for k in range(60))
    assert sorted(first) == sorted(second) == everything
    assert first != second, "every pass has its own order"
    assert first != sorted(first, key=lambda text: int(text.split()[1]))


def test_stages_are_disjoint_and_cover_and_nothing_held_out_is_trained(tmp_path):
    path = write(tmp_path / "rows.jsonl", n=400)
    counts = Counter()
    for stage in ("sft", "reward", "ppo"):
        one = stream(path, stage, data_split="1,1,2", eval_fraction=0.2)
        key = {"sft": "input_ids", "reward": "chosen_ids", "ppo": "prompt_ids"}[stage]
        texts = [build("byte-level").decode(item[key]) for item in [*itertools.islice(one, 500), *one.held_out(1000)]]
        held = {build("byte-level").decode(item[key]) for item in one.held_out(1000)}
        train = {
            build("byte-level").decode(item[key])
            for item in itertools.islice(stream(path, stage, data_split="1,1,2", eval_fraction=0.2), 400)
        }
        assert not held & train
        assert 0.1 < len(held) / len(set(texts)) < 0.3
        numbers = {int(text.partition("question ")[2].split()[0]) for text in texts}
        counts.update(numbers)
        expected = 400 * (0.5 if stage == "ppo" else 0.25)
        assert abs(len(numbers) - expected) < 40
    assert sorted(counts) == list(range(400))
    assert set(counts.values()) == {1}


def test_weights_mix_sources(tmp_path):
    sources = [write(tmp_path / "a.jsonl", 30, "a"), f"{write(tmp_path / 'b.jsonl', 30, 'b')}:3"]
    names = [text.split()[0] for text in asked(itertools.islice(stream(sources), 80))]
    assert Counter(names) == {"a": 20, "b": 60}
    assert Counter(names[:8]) == {"a": 2, "b": 6}


def test_batches_and_drops(tmp_path):
    path = write(tmp_path / "rows.jsonl", n=10)
    with path.open("a") as file:
        file.write('{"prompt": "no pair"}\n{broken\n')
    one = stream(path, "reward", data_split="0,1,0", buffer_rows=100)
    batches = list(itertools.islice(one.batches(5), 2))
    assert [len(batch) for batch in batches] == [5, 5]
    assert {"chosen_ids", "rejected_ids"} <= set(batches[0][0])
    next(iter(one.batches(1)))
    assert one.passes == 1


def test_nothing_usable_is_an_error(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "alone"}\n')
    with pytest.raises(ValueError, match="no usable row for stage reward on rank 0: {'no pair of answers': 1}: give"):
        next(iter(stream(tmp_path / "rows.jsonl", "reward", data_split="0,1,0")))
    with pytest.raises(ValueError, match="no usable row for stage ppo on rank 1: it got none: give more data, or few"):
        next(iter(stream(tmp_path / "rows.jsonl", rank=1, world_size=2)))


def test_hub_sets_are_not_downloaded_first(monkeypatch):
    def load_dataset(path, subset, revision, streaming):
        assert streaming
        rows = [{"prompt": f"q{k}", "response": "a"} for k in range(5)]
        return datasets.IterableDatasetDict({"train": datasets.Dataset.from_list(rows).to_iterable_dataset()})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert sorted(asked(itertools.islice(stream("owner/name"), 5))) == [f"q{k}" for k in range(5)]


def test_own_evaluation_part(tmp_path):
    write(tmp_path / "train.jsonl", 10)
    write(tmp_path / "eval.jsonl", 4, "held")
    assert asked(stream(tmp_path).held_out(3)) == ["held 0", "held 1", "held 2"]
    # nothing of the training part is withheld for an evaluation that has rows of its own
    everything = sorted(f"question {k}" for k in range(10))
    assert sorted(asked(itertools.islice(stream(tmp_path, eval_fraction=0.5), 10))) == everything


def test_evaluation_rows_come_from_every_source(tmp_path):
    paths = [write(tmp_path / f"{name}.jsonl", n=60, name=name) for name in ("one", "two", "few")]
    write(tmp_path / "few.jsonl", n=6, name="few")
    held = asked(stream([paths[2], *paths[:2]], eval_fraction=0.5).held_out(21))
    counts = Counter(text.split()[0] for text in held)
    assert len(held) == 21 and 0 < counts["few"] < 7 and abs(counts["one"] - counts["two"]) <= 1


def test_rows_of_the_report_add_up_on_all_ranks(tmp_path):
    path = write(tmp_path / "rows.jsonl", n=50)
    with path.open("a") as file:
        file.write('{"prompt": "no pair"}\n{broken\n')
    ranks = [
        stream(path, "reward", data_split="1,2,1", eval_fraction=0.1, rank=rank, world_size=2) for rank in range(2)
    ]
    for one in ranks:
        list(itertools.islice(one, 30))
        (source,) = one.report()["sources"]
        assert source["rows_read"] == source["rows_train"] + sum(source["rows_dropped"].values())
        assert source["rows_train"] == source["items_train"] == 30
        assert source["rows_dropped"]["read ahead, not used yet"] > 0
    while ranks[0].passes < 1:
        next(iter(ranks[0]))
    assert ranks[0].report()["sources"][0]["rows_dropped"]["held out for evaluation"] > 0


def test_rows_of_an_own_evaluation_part_are_counted(tmp_path):
    write(tmp_path / "train.jsonl", 10)
    write(tmp_path / "eval.jsonl", 4, "held")
    one = stream(tmp_path)
    assert len(one.held_out(3)) == 3
    totals = one.report()["totals"]
    assert (totals["rows_read"], totals["rows_eval"], totals["rows_dropped"]) == (3, 3, {})


def test_sources_of_sft_alone_and_weights_of_zero(tmp_path):
    sources = [write(tmp_path / "a.jsonl", 40, "a"), f"{write(tmp_path / 'b.jsonl', 40, 'b')}:0"]
    only = write(tmp_path / "c.jsonl", 5, "c")
    one = stream(sources, "sft", data_split="1,1,0", sft_only_data_path=only)
    texts = [build("byte-level").decode(item["input_ids"]) for item in itertools.islice(one, 60)]
    assert {text.partition("Human: ")[2][0] for text in texts} == {"a", "c"}
    assert {text.partition("Human: c ")[2][0] for text in texts if "Human: c" in text} == set("01234")
    with pytest.raises(ValueError, match="every source of data_path has weight 0"):
        stream(f"{only}:0")
