"""Every shape of row, recognised by its columns, and every reason to refuse one."""

from __future__ import annotations

import functools
import json

import pytest

from data.parts import split_turns
from data.shapes import normalise
from data.turns import RowError

PROMPT = "\n\nHuman: hi\n\nAssistant:"
USER = {"role": "user", "content": "hi"}
YES, NO = {"role": "assistant", "content": "yes"}, {"role": "assistant", "content": "no"}


def one(record, shape=None):
    name, rows = normalise(record, shape)
    assert len(rows) == 1
    return name, {key: value for key, value in rows[0].items() if key != "messages"}


@pytest.mark.parametrize(
    ("shape", "record"),
    [
        ("prompt-pair", {"prompt": "hi", "chosen": "yes", "rejected": "no"}),
        ("prompt-pair", {"prompt": PROMPT, "chosen": " yes", "rejected": " no "}),
        ("prompt-pair", {"prompt": [USER], "chosen": [YES], "rejected": [NO]}),
        ("prompt-pair", {"prompt": "hi", "chosen": [USER, YES], "rejected": [USER, NO]}),
        ("prompt-pair", {"question": "hi", "chosen": YES, "rejected": NO}),
        ("prompt-pair", {"instruction": "hi", "input": "", "chosen": "yes", "rejected": "no"}),
        ("dialogue-pair", {"chosen": PROMPT + " yes", "rejected": PROMPT + " no"}),
        ("dialogue-pair", {"chosen": "Human: hi\n\nAssistant: yes", "rejected": "Human: hi\n\nAssistant: no"}),
        ("dialogue-pair", {"chosen": [USER, YES], "rejected": [USER, NO]}),
        ("turns-pair", {"conversations": [{"from": "human", "value": "hi"}], "chosen": "yes", "rejected": "no"}),
        (
            "turns-pair",
            {
                "conversations": [{"from": "human", "value": "hi"}],
                "chosen": {"from": "gpt", "value": "yes"},
                "rejected": {"from": "gpt", "value": "no"},
            },
        ),
        ("turns-pair", {"messages": [USER, YES], "chosen": [USER, YES], "rejected": [USER, NO]}),
        ("turns-pair", {"messages": [USER, YES], "chosen": "yes", "rejected": "no"}),
        ("turns-pair", {"messages": json.dumps([USER]), "chosen": json.dumps([YES]), "rejected": json.dumps(NO)}),
    ],
)
def test_pairs(shape, record):
    name, row = one(record)
    assert name == shape
    assert row["prompt"].lstrip() == PROMPT.lstrip()
    assert (row["chosen"], row["rejected"]) == ("yes", "no")


@pytest.mark.parametrize(
    ("shape", "record"),
    [
        ("prompt-response", {"prompt": "hi", "response": "yes"}),
        ("prompt-response", {"prompt": "hi", "completion": " yes"}),
        ("prompt-response", {"prompt": PROMPT + " ye", "completion": "s"}),
        ("prompt-response", {"prompt": [USER], "completion": [YES]}),
        ("prompt-response", {"question": "hi", "response": "yes", "answer": None}),
        ("question-answer", {"question": "hi", "answer": "yes"}),
        ("instruction", {"instruction": "hi", "input": "", "output": "yes"}),
        ("self-instruct", {"instruction": "hi", "instances": [{"input": "", "output": "yes"}]}),
        ("turns", {"messages": [USER, YES]}),
        ("turns", {"messages": [USER, YES, {"role": "user", "content": "left open"}]}),
        ("turns", {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}),
        ("turns", {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, YES]}),
        ("turns", {"messages": json.dumps([USER, YES])}),
        ("dialogue-text", {"text": PROMPT + " yes"}),
        ("dialogue-text", {"text": PROMPT + " yes\n\nHuman: left open"}),
    ],
)
def test_single_answers(shape, record):
    name, row = one(record)
    if "question" in record and "response" in record:
        shape = "question-answer"
    assert name == shape
    assert (row["prompt"], row["response"]) == (PROMPT, "yes")


def test_prompt_alone():
    assert one({"prompt": "hi"}) == ("prompt", {"prompt": PROMPT})
    assert one({"prompt": "\n\nHuman: hi"})[1] == {"prompt": PROMPT}


def test_multi_turn_prompt_runs_through_the_last_marker():
    start = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    _, row = one({"chosen": start + " good", "rejected": start + " bad"})
    assert row == {"prompt": start, "chosen": "good", "rejected": "bad"}


@pytest.mark.parametrize(
    "record",
    [
        {"chosen": "\n\nHuman: a\n\nAssistant: x", "rejected": "\n\nHuman: b\n\nAssistant: y"},
        {"chosen": [USER, YES], "rejected": [USER, YES, USER, NO]},
        {"prompt": "hi", "chosen": [USER, YES], "rejected": [{"role": "user", "content": "ho"}, NO]},
    ],
)
def test_pairs_with_different_prompts_are_refused(record):
    with pytest.raises(RowError) as error:
        normalise(record)
    assert error.value.reason == "prompts differ"


def test_system_messages():
    system = {"role": "system", "content": "be kind"}
    _, row = one({"messages": [system, USER, YES]})
    assert row["prompt"] == "be kind" + PROMPT
    assert one({"system": "be kind", "conversations": [USER, YES]})[1]["prompt"] == "be kind" + PROMPT
    assert one({"system": "be kind", "instruction": "hi", "output": "yes"})[1]["prompt"] == "be kind" + PROMPT


def test_instruction_with_input_and_history():
    _, row = one({"instruction": "add", "input": "1 2", "output": "3", "history": [["a", "b"], ["c", "d"]]})
    assert row["prompt"] == (
        "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d\n\nHuman: add\n\n1 2\n\nAssistant:"
    )


def test_several_instances_and_several_rejected_answers():
    instances = [{"input": "1", "output": "a"}, {"input": "2", "output": "b"}]
    _, rows = normalise({"instruction": "do", "instances": instances})
    assert [(row["prompt"], row["response"]) for row in rows] == [
        ("\n\nHuman: do\n\n1\n\nAssistant:", "a"),
        ("\n\nHuman: do\n\n2\n\nAssistant:", "b"),
    ]
    _, rows = normalise({"prompt": "hi", "chosen": "yes", "rejected": ["no", "never"]})
    assert [(row["chosen"], row["rejected"]) for row in rows] == [("yes", "no"), ("yes", "never")]


@pytest.mark.parametrize(
    ("column", "value", "score"), [("reward", 0.5, 0.5), ("label", True, 1.0), ("score", "2", 2.0)]
)
def test_scores(column, value, score):
    assert one({"prompt": "hi", "completion": "yes", column: value})[1]["score"] == score
    assert one({"messages": [USER, YES], column: value})[1]["score"] == score


def test_margins():
    pair = {"prompt": "hi", "chosen": "yes", "rejected": "no"}
    assert one({**pair, "margin": 2})[1]["margin"] == 2.0
    assert one({**pair, "chosen_score": 5, "rejected_score": 1.5})[1]["margin"] == 3.5


def test_other_columns_are_kept_as_extra():
    row = one({"prompt": "hi", "response": "yes", "kind": "sum", "tags": ["a"], "picture": b"\x00"})[1]
    assert row["extra"] == {"kind": "sum", "tags": ["a"]}


def test_marker_text_inside_a_turn_stays_in_its_turn():
    inner = "see:\n\nAssistant: no turn"
    _, rows = normalise({"messages": [{"role": "user", "content": inner}, YES]})
    assert rows[0]["messages"] == [{"role": "user", "content": inner}]


def test_markers_behind_windows_lines_are_markers():
    windows = {side: f"\r\n\r\nHuman: a\r\nb\r\n\r\nAssistant: {side}" for side in ("chosen", "rejected")}
    _, [row] = normalise(windows)
    assert row == {"prompt": "\n\nHuman: a\r\nb\n\nAssistant:", "chosen": "chosen", "rejected": "rejected"}
    _, [row] = normalise({"prompt": "\r\n\r\nHuman: a\r\n\r\nAssistant:", "response": "yes"})
    assert row == {"prompt": "\n\nHuman: a\n\nAssistant:", "response": "yes"}


def test_turns_of_both_styles_in_one_table():
    """A parquet file gives every turn the fields of all of them, empty where a row has none."""
    empty = {"role": None, "content": None, "from": None, "value": None}
    messages = [{**empty, "from": "human", "value": "hi"}, {**empty, "role": "assistant", "content": "yes"}]
    _, [row] = normalise({"messages": messages})
    assert row["messages"] == [USER] and row["response"] == "yes"
    part = {"type": None, "text": "hi", "image_url": None}
    assert normalise({"messages": [{"role": "user", "content": [part]}, YES]})[1][0]["messages"] == [USER]


@pytest.mark.parametrize(
    "answer",
    ['{"from": "Paris", "value": 3}', '[{"from": "a", "to": "b"}]', '[{"role": "captain", "content": "x"}]', "[{" * 9]
    + ['{"a":' * 100_000, f"[{{{'1' * 5000}"],
)
def test_an_answer_in_json_is_an_answer(answer):
    assert normalise({"prompt": "hi", "response": answer})[1][0]["response"] == answer
    assert normalise({"prompt": "hi", "chosen": answer, "rejected": "no"})[1][0]["chosen"] == answer


def test_untrained_messages():
    _, rows = normalise({"messages": [USER, {**YES, "weight": 0}, USER, {**NO, "weight": 1}]})
    assert [turn.get("train", True) for turn in rows[0]["messages"]] == [True, False, True]


def nest(inner, _):
    return {"a": inner}


@pytest.mark.parametrize(
    ("reason", "field", "record"),
    [
        ("unknown shape", "columns", {"foo": 1, "text": "plain"}),
        ("unknown shape", "columns", {}),
        ("tool turn", "messages[1]", {"messages": [USER, {"role": "tool", "content": "x"}, YES]}),
        ("tool turn", "messages[1]", {"messages": [USER, {**YES, "tool_calls": [{"id": 1}]}]}),
        ("image turn", "messages[0]", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, YES]}),
        ("image turn", "images", {"messages": [USER, YES], "images": ["a.png"]}),
        ("unknown role", "messages[0]", {"messages": [{"role": "narrator", "content": "x"}, YES]}),
        ("turn without a role", "messages[0]", {"messages": [{"content": "x"}, YES]}),
        ("not a turn", "messages[0]", {"messages": ["x"]}),
        ("not a list of turns", "messages", {"messages": "x"}),
        ("not a list of turns", "messages", {"messages": 5}),
        ("missing text", "messages[0]", {"messages": [{"role": "user"}, YES]}),
        ("no assistant turn", "messages", {"messages": [USER]}),
        ("empty answer", "messages", {"messages": [USER, {"role": "assistant", "content": " "}]}),
        ("empty answer", "chosen", {"prompt": "hi", "chosen": "\n", "rejected": "no"}),
        ("empty answer", "rejected[1]", {"prompt": "hi", "chosen": "yes", "rejected": ["no", ""]}),
        ("empty answer", "rejected", {"prompt": "hi", "chosen": "yes", "rejected": []}),
        ("empty answer", "output", {"instruction": "hi", "output": ""}),
        ("empty prompt", "prompt", {"prompt": " ", "response": "yes"}),
        ("empty prompt", "prompt", {"prompt": "\n\nHuman: \n\nAssistant:", "response": "yes"}),
        ("empty prompt", "messages", {"messages": [YES]}),
        ("no assistant marker", "chosen", {"chosen": "yes", "rejected": "no"}),
        ("not text", "response", {"prompt": "hi", "response": {"a": 1}.keys()}),
        ("not valid Unicode", "response", {"prompt": "hi", "response": "a\ud800"}),
        ("not a number", "label", {"prompt": "hi", "response": "yes", "label": "good"}),
        ("not a number", "reward", {"prompt": "hi", "response": "yes", "reward": float("nan")}),
        ("not a number", "reward", {"prompt": "hi", "response": "yes", "reward": float("inf")}),
        ("not a number", "reward", {"prompt": "hi", "response": "yes", "reward": 10**400}),
        ("not a number", "margin", {"prompt": "hi", "chosen": "yes", "rejected": "no", "margin": "1e39"}),
        ("missing text", "response", {"prompt": "hi", "response": float("nan")}),
        ("not a list of turns", "messages", {"messages": "[" * 100_000}),
        ("not a list of turns", "messages", {"messages": f"[{'1' * 5000}]"}),
        ("nested too deep", "columns", {"prompt": "hi", "response": "yes", "meta": functools.reduce(nest, range(900))}),
        ("answer of another role", "chosen", {"prompt": "hi", "chosen": USER, "rejected": NO}),
    ],
)
def test_refused_rows_name_reason_and_field(reason, field, record):
    with pytest.raises(RowError) as error:
        normalise(record)
    assert (error.value.reason, error.value.field) == (reason, field)
    assert "\n" not in str(error.value)


def test_fixed_shape():
    record = {"prompt": "hi", "chosen": "yes", "rejected": "no"}
    assert one(record, "prompt-response")[1]["response"] == "yes"
    with pytest.raises(RowError, match="missing column, field instances|missing column, field instruction"):
        normalise(record, "self-instruct")


def test_split_turns_cuts_what_nobody_answered():
    assert split_turns([USER, YES, USER], "x") == ([USER], "yes")
