"""Well-known hub sets by name, on small copies in their shapes: no network."""

from __future__ import annotations

import datasets
import pytest

from data import load_rows
from data.shapes import normalise
from data.turns import RowError

ASK = "\n\nHuman: {}\n\nAssistant:".format

SETS = {
    "Dahoas/rm-static": (
        {
            "prompt": "\n\nHuman: a\n\nAssistant: b \n\nHuman: q \n\nAssistant:",
            "response": " r",
            "chosen": " r",
            "rejected": " n",
        },
        {
            "prompt": "\n\nHuman: a\n\nAssistant: b \n\nHuman: q \n\nAssistant:",
            "response": "r",
            "chosen": "r",
            "rejected": "n",
        },
    ),
    "Dahoas/full-hh-rlhf": (
        {"prompt": ASK("q"), "response": " y", "chosen": " y", "rejected": " n"},
        {"prompt": ASK("q"), "response": "y", "chosen": "y", "rejected": "n"},
    ),
    "Dahoas/synthetic-instruct-gptj-pairwise": (
        {"prompt": "q", "chosen": "y", "rejected": "n"},
        {"prompt": ASK("q"), "chosen": "y", "rejected": "n"},
    ),
    "yitingxie/rlhf-reward-datasets": (
        {"prompt": "Human: q\n\n", "chosen": "Assistant: y", "rejected": "Assistant: n"},
        {"prompt": "\n\nHuman: q" + "\n\nAssistant:", "chosen": "y", "rejected": "n"},
    ),
    "openai/webgpt_comparisons": (
        {
            "question": {"full_text": "q", "id": "1"},
            "answer_0": "no [1]",
            "answer_1": "yes [1, 2], so (3) it is.",
            "score_0": -0.5,
            "score_1": 0.5,
        },
        {"prompt": ASK("q"), "chosen": "yes, so it is.", "rejected": "no", "margin": 1.0},
    ),
    "stanfordnlp/SHP": (
        {"history": "q", "human_ref_A": "n", "human_ref_B": "y", "labels": 0, "score_A": 1, "score_B": 9},
        {"prompt": ASK("q"), "chosen": "y", "rejected": "n", "extra": {"score_A": 1, "score_B": 9}},
    ),
    "pvduy/sharegpt_alpaca_oa_vicuna_format": (
        {"prompt": "USER: a ASSISTANT: b </s>USER: q ASSISTANT:", "label": "y"},
        {"prompt": "\n\nHuman: a \n\nAssistant: b \n\nHuman: q \n\nAssistant:", "response": "y"},
    ),
    "wangrui6/Zhihu-KOL": (
        {"INSTRUCTION": "问", "RESPONSE": "答", "SOURCE": "Zhihu", "METADATA": "{}"},
        {"prompt": ASK("问"), "response": "答", "extra": {"SOURCE": "Zhihu", "METADATA": "{}"}},
    ),
    "Cohere/miracl-zh-queries-22-12": (
        {"query": "问", "positive_passages": [{"text": "y"}], "negative_passages": [{"text": "n"}]},
        {"prompt": ASK("问"), "chosen": "y", "rejected": "n"},
    ),
    "Cohere/miracl-ja-queries-22-12": (
        {"query": "問", "positive_passages": [{"text": "y"}], "negative_passages": []},
        {"prompt": ASK("問"), "response": "y"},
    ),
    "Hello-SimpleAI/HC3-Chinese": (
        {"question": "问", "human_answers": ["y"], "chatgpt_answers": ["n"]},
        {"prompt": ASK("问"), "response": "y"},
    ),
    "mkqa-Chinese": (
        {"queries": {"zh_cn": "问", "ja": "問"}, "answers": {"zh_cn": [{"text": "y"}], "ja": [{"text": "n"}]}},
        {"prompt": ASK("问"), "response": "y"},
    ),
    "mkqa-Japanese": (
        {"queries": {"zh_cn": "问", "ja": "問"}, "answers": {"zh_cn": [{"text": "n"}], "ja": [{"text": "y"}]}},
        {"prompt": ASK("問"), "response": "y"},
    ),
    "lmqg/qg_jaquad": (
        {"question": "q", "sentence": "y", "paragraph": "p", "answer": "short"},
        {"prompt": ASK("q"), "response": "y", "extra": {"answer": "short"}},
    ),
    "lmqg/qag_jaquad": (
        {"questions": ["q", "r"], "paragraph": "y", "answers": ["a", "b"]},
        {"prompt": ASK("q"), "response": "y", "extra": {"answers": ["a", "b"]}},
    ),
    "Anthropic/hh-rlhf": (
        {"chosen": ASK("q") + " y", "rejected": ASK("q") + " n"},
        {"prompt": ASK("q"), "chosen": "y", "rejected": "n"},
    ),
}


@pytest.mark.parametrize("name", SETS)
def test_by_name(name, monkeypatch):
    record, expected = SETS[name]
    asked = []

    def load_dataset(path, subset, revision, streaming):
        asked.append(path)
        return datasets.DatasetDict({"train": datasets.Dataset.from_list([record] * 2)})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows, report = load_rows(name)
    assert asked == ["mkqa" if name.startswith("mkqa") else name]
    assert report["rows_used"] == 2
    for row in rows:
        row.pop("messages", None)
        assert row == expected


def test_local_copy_in_its_shape(tmp_path):
    record, expected = SETS["stanfordnlp/SHP"]
    datasets.Dataset.from_list([record]).save_to_disk(str(tmp_path / "shp"))
    (row,), report = load_rows(tmp_path / "shp")
    assert (row["chosen"], row["rejected"]) == (expected["chosen"], expected["rejected"])
    assert report["shape"] == {"preference": 1}


def test_languages_are_never_guessed():
    record, _ = SETS["mkqa-Japanese"]
    with pytest.raises(ValueError, match="unknown shape"):
        normalise(record)
    assert normalise(record, "mkqa-zh_cn")[1][0]["response"] == "n"


def test_answers_that_are_not_there():
    for shape, record in [
        ("mkqa-ja", {"queries": {"ja": "q"}, "answers": {"ja": [{"text": None}]}}),
        (None, {"question": "q", "human_answers": [], "chatgpt_answers": []}),
        (None, {"query": "q", "positive_passages": [], "negative_passages": []}),
    ]:
        with pytest.raises(ValueError, match="empty answer"):
            normalise(record, shape)


@pytest.mark.parametrize(
    ("field", "shape", "record"),
    [
        ("score_0", None, {"question": "q", "answer_0": "a", "answer_1": "b", "score_0": "x", "score_1": 1}),
        ("score_1", None, {"question": "q", "answer_0": "a", "answer_1": "b", "score_0": 0, "score_1": float("nan")}),
        ("labels", None, {"history": "q", "human_ref_A": "a", "human_ref_B": "b", "labels": "A"}),
        ("positive_passages", None, {"query": "q", "positive_passages": 5, "negative_passages": []}),
        ("human_answers", None, {"question": "q", "human_answers": {"a": 1}, "chatgpt_answers": []}),
        ("questions", None, {"questions": 5, "paragraph": "p"}),
        ("queries", "mkqa-ja", {"queries": "q", "answers": {"ja": [{"text": "a"}]}}),
        ("answers", "mkqa-ja", {"queries": {"ja": "q"}, "answers": ["a"]}),
        ("ja", "mkqa-ja", {"queries": {"ja": "q"}, "answers": {"ja": 7}}),
    ],
)
def test_a_field_of_another_kind_is_named(field, shape, record):
    with pytest.raises(RowError) as error:
        normalise(record, shape)
    assert error.value.field == field


def test_jsonfile_of_older_scripts(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.json").write_text('[{"prompt": "q", "chosen": "y", "rejected": "n"}]')
    (tmp_path / "data" / "eval.json").write_text('[{"prompt": "e", "chosen": "y", "rejected": "n"}]')
    monkeypatch.chdir(tmp_path)
    assert load_rows("local/jsonfile")[0][0]["prompt"] == ASK("q")
    assert load_rows("local/jsonfile", "eval")[0][0]["prompt"] == ASK("e")
