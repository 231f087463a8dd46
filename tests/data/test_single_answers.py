"""Reward items of answers that were judged one by one, of pairs with margins, and of several rejected answers."""

from __future__ import annotations

import json

import pytest
import torch

from data import collate_answers, load_stage_data
from tests.data.kit import build

TOKENIZER = build("byte-level")


@pytest.fixture
def load(tmp_path):
    def run(*files, **options):
        paths = []
        for number, rows in enumerate(files):
            paths.append(tmp_path / f"rows{number}.jsonl")
            paths[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = {"data_split": "0,1,0", "eval_fraction": 0.0, "data_output_path": tmp_path / "cache"} | options
        return load_stage_data("reward", TOKENIZER, data_path=paths, **options)

    return run


def labels(count, *values):
    return [{"prompt": f"p{k}", "response": f"answer {k}", "label": values[k % len(values)]} for k in range(count)]


def described(parts):
    return [(item["kind"], round(item.get("target", item.get("margin")), 3), item["source"]) for item in parts.train]


def test_numbers_of_a_source_say_what_they_are(load):
    both = [{"prompt": "q", "response": f"text {k}", "label": k} for k in (0, 1)]
    scored = [{"prompt": f"p{k}", "response": "x", "score": value} for k, value in enumerate((0, 1, 2.5))]
    parts = load([*labels(3, 1, 0), *both], scored)
    assert described(parts) == [
        ("label", 1.0, 0), ("label", 0.0, 0), ("label", 1.0, 0), ("pair", 1.0, 0),
        ("score", 0.0, 1), ("score", 1.0, 1), ("score", 2.5, 1),
    ]  # fmt: skip
    assert parts.report["parts"]["train"]["kinds"] == {"label": 3, "pair": 1, "score": 3}
    assert [source["rows_train"] for source in parts.report["sources"]] == [5, 3]
    assert parts.train.lengths().tolist() == [
        max(len(value) for value in item.values() if isinstance(value, torch.Tensor)) for item in parts.train
    ]


def test_scores_without_a_partner_are_left_out_beside_pairs(load):
    """The squared error of a raw score would drown the pairs' loss; labels are of the pairs' own size."""
    rows = [{"prompt": "q", "response": f"text {k}", "score": k} for k in (2, 5, 9)]
    parts = load(rows)
    assert described(parts) == [("pair", 7.0, 0)]
    assert parts.report["totals"]["rows_dropped"] == {"no answer of another score to the same prompt": 1}


def test_an_evaluation_part_alone_says_what_its_numbers_are(load, tmp_path):
    folder = tmp_path / "both"
    folder.mkdir()
    pairs = [{"prompt": f"p{k}", "chosen": "a", "rejected": "b"} for k in range(4)]
    scored = [{"prompt": f"e{k}", "response": "x", "score": k} for k in range(5)]
    for name, rows in (("train", pairs), ("eval", scored)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"data_split": "0,1,0", "data_output_path": tmp_path / "cache"}
    held = load_stage_data("reward", TOKENIZER, data_path=folder, **options).eval
    assert [(item["kind"], item["target"]) for item in held] == [("score", float(k)) for k in range(5)]


def test_the_flag_decides_for_all(load):
    worse = {"prompt": "p0", "response": "worse", "label": 0}
    rows = [*labels(3, 1, 0), worse, {"prompt": "z", "chosen": "a", "rejected": "b"}]
    assert sorted(described(load(rows, single_answers="pair"))) == [("pair", 0.0, 0), ("pair", 1.0, 0)]
    assert [kind for kind, *_ in described(load(rows, single_answers="score"))] == ["score"] * 4 + ["pair"]
    assert [kind for kind, *_ in described(load(rows, single_answers="label"))] == ["label"] * 4 + ["pair"]
    wide = load([*rows, {"prompt": "w", "response": "x", "score": 3}], single_answers="label")
    assert wide.report["totals"]["rows_dropped"] == {"label outside 0 to 1": 1}
    with pytest.raises(ValueError, match="single_answers 'both' must be one of auto, pair, label, score"):
        load(rows, single_answers="both")


def test_several_rejected_answers_are_as_many_pairs_and_stay_together(load):
    rows = [{"prompt": f"p{k}", "chosen": "yes", "rejected": ["no", "never", "not"], "margin": 0.5} for k in range(10)]
    parts = load(rows, eval_fraction=0.3)
    assert (len(parts.train), len(parts.eval)) == (21, 9)
    assert {item["margin"] for item in parts.train} == {0.5}
    prompts = [
        {TOKENIZER.decode(item["chosen_ids"][: item["chosen_start"]]) for item in part}
        for part in (parts.train, parts.eval)
    ]
    assert (len(prompts[0]), len(prompts[1])) == (7, 3) and not prompts[0] & prompts[1]


def test_a_mixed_batch(load):
    pair = {"prompt": "q", "chosen": "a good one", "rejected": "bad", "margin": 2}
    parts = load([*labels(2, 1, 0), pair], [{"prompt": "r", "response": "so", "score": -1.5}])
    items = list(parts.train)
    batch = collate_answers([items[-1], *items[:-1]], pad_id=7)
    assert [batch[name].tolist() for name in ("margins", "targets", "is_label", "sources")] == [
        [2.0], [-1.5, 1.0, 0.0], [False, True, True], [0, 1, 0, 0],
    ]  # fmt: skip
    answers = [" a good one</s>", " bad</s>", " so</s>", " answer 0</s>", " answer 1</s>"]
    for ids, mask, response, answer in zip(
        batch["input_ids"], batch["attention_mask"], batch["response_mask"], answers, strict=True
    ):
        assert TOKENIZER.decode(ids[response]) == answer
        assert mask.sum() == mask.nonzero().max() + 1 and (ids[~mask] == 7).all() and (mask | ~response).all()


def test_answers_begin_behind_a_cut_prompt(load):
    rows = [{"prompt": "many words " * 30 + "here", "chosen": "yes", "rejected": "no"}]
    (item,) = load(rows, max_seq_len=60).train
    assert len(item["chosen_ids"]) <= 60
    assert TOKENIZER.decode(item["chosen_ids"][item["chosen_start"] :]) == " yes</s>"
    assert TOKENIZER.decode(item["rejected_ids"][item["rejected_start"] :]) == " no</s>"
