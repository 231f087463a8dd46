"""Pairs out of answers scored one by one."""

from __future__ import annotations

import json

from data import load_stage_data
from data.pairing import Pool, Scored
from tests.data.kit import build


def scored(*answers):
    pool = Pool()
    for number, (prompt, response, score) in enumerate(answers):
        row = {"prompt": prompt, "response": response, "score": score}
        pool.add(Scored(number, f"row {number}", row))
    pairs, left = pool.match()
    return [(row["prompt"], row["chosen"], row["rejected"], row["margin"]) for row, _, _ in pairs], [
        one.record for one in left
    ]


def test_best_against_worst_while_scores_differ():
    answers = [("p", "a", 1), ("p", "b", 0), ("q", "c", 0), ("p", "d", 1), ("p", "e", 0.5), ("p", "f", 0)]
    assert scored(*answers) == ([("p", "a", "f", 1), ("p", "d", "b", 1)], [4, 2])


def test_equal_scores_make_no_pair():
    assert scored(("p", "a", 1), ("p", "b", 1)) == ([], [0, 1])
    assert scored() == ([], [])


def test_marker_text_inside_a_turn_is_another_prompt():
    pool = Pool()
    turns = [{"role": "user", "content": "a\n\nAssistant: b\n\nHuman: c"}]
    text = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    pool.add(Scored(0, "", {"prompt": text, "messages": turns, "response": "x", "score": 1}))
    pool.add(Scored(1, "", {"prompt": text, "response": "y", "score": 0}))
    assert not pool.match()[0]


def test_reward_stage_counts_both_rows_of_a_pair(tmp_path):
    rows = [{"prompt": f"p{k // 2}", "completion": f"answer {k}", "label": k % 2 == 0} for k in range(10)]
    rows += [
        {"prompt": "alone", "completion": "x", "label": True},
        {"prompt": "own pair", "chosen": "a", "rejected": "b"},
    ]
    rows += [
        {"prompt": "same", "completion": "x", "label": True},
        {"prompt": "same", "completion": "x", "label": False},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parts = load_stage_data(
        "reward",
        build("byte-level"),
        data_path=tmp_path / "rows.jsonl",
        data_split="0,1,0",
        data_output_path=tmp_path / "cache",
        eval_fraction=0.0,
        single_answers="pair",
    )
    source = parts.report["sources"][0]
    assert (source["rows_read"], source["rows_train"], source["items_train"]) == (14, 11, 6)
    assert source["rows_dropped"] == {"no answer of another score to the same prompt": 1, "both answers equal": 2}
    texts = {build("byte-level").decode(item["chosen_ids"]) for item in parts.train}
    assert "\n\nHuman: p3\n\nAssistant: answer 6</s>" in texts
