"""Shapes of well-known data sets that have columns of their own, each turned into one of `data.shapes`.

    shape        columns                                         as in
    comparison   question, answer_0, answer_1, score_0, score_1  openai/webgpt_comparisons
    preference   history, human_ref_A, human_ref_B, labels       stanfordnlp/SHP
    passages     query, positive_passages, negative_passages     Cohere/miracl-zh-queries-22-12, -ja-
    human-ai     question, human_answers, chatgpt_answers        Hello-SimpleAI/HC3-Chinese
    upper-case   INSTRUCTION, RESPONSE                           wangrui6/Zhihu-KOL
    vicuna-text  prompt with USER: and ASSISTANT:, label         pvduy/sharegpt_alpaca_oa_vicuna_format
    quiz         question, sentence                              lmqg/qg_jaquad
    quizzes      questions, paragraph                            lmqg/qag_jaquad
    mkqa-zh_cn   queries, answers, by language                   mkqa-Chinese
    mkqa-ja      the same                                        mkqa-Japanese

They are recognised by their columns, so that a local copy works like the name on the hub. The mkqa sets hold many
languages and are never guessed: their names, or `?shape=mkqa-ja`, say which one is meant.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from data.markers import ASSISTANT, HUMAN
from data.parts import number
from data.turns import RowError, read_list, text_of

Record = Mapping[str, Any]

_CITATION = re.compile(r" ?[\[(].*?[\])]")
_VICUNA = re.compile(r"(?:^|(?<=\s)|(?<=</s>))(USER|ASSISTANT):\s?")


def _comparison(record: Record) -> dict[str, Any]:
    question = record["question"]
    prompt = question.get("full_text") if isinstance(question, Mapping) else question
    answers = [_CITATION.sub("", text_of(record[name], name)).strip() for name in ("answer_0", "answer_1")]
    first, second = (number(record[name], name) for name in ("score_0", "score_1"))
    chosen, rejected = answers if first >= second else answers[::-1]
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, "margin": abs(first - second)}


def _preference(record: Record) -> dict[str, Any]:
    answers = [record["human_ref_A"], record["human_ref_B"]]
    chosen, rejected = answers if number(record["labels"], "labels") == 1 else answers[::-1]
    return {"prompt": record["history"], "chosen": chosen, "rejected": rejected}


def _passages(record: Record) -> dict[str, Any]:
    row = {"prompt": record["query"], "chosen": _first_passage(record, "positive_passages")}
    if record["negative_passages"]:
        return {**row, "rejected": _first_passage(record, "negative_passages")}
    return {"prompt": row["prompt"], "response": row["chosen"]}


def _first_passage(record: Record, field: str) -> Any:
    passage = _first_of(record, field)
    if not isinstance(passage, Mapping) or passage.get("text") is None:
        raise RowError("empty answer", field)
    return passage["text"]


def _human_ai(record: Record) -> dict[str, Any]:
    return {"prompt": record["question"], "response": _first_of(record, "human_answers")}


def _first_of(record: Record, field: str) -> Any:
    values = read_list(record[field], field)
    if not values:
        raise RowError("empty answer", field)
    return values[0]


def _upper_case(record: Record) -> dict[str, Any]:
    return {"prompt": record["INSTRUCTION"], "response": record["RESPONSE"]}


def _vicuna(record: Record) -> dict[str, Any]:
    def marker(match: re.Match[str]) -> str:
        return (HUMAN if match[1] == "USER" else ASSISTANT) + " "

    text = _VICUNA.sub(marker, text_of(record["prompt"], "prompt").replace("</s>", "</s> ")).replace("</s> ", "")
    return {"prompt": text, "response": record["label"]}


def _quiz(record: Record) -> dict[str, Any]:
    return {"prompt": record["question"], "response": record["sentence"]}


def _quizzes(record: Record) -> dict[str, Any]:
    return {"prompt": _first_of(record, "questions"), "response": record["paragraph"]}


def _mkqa(language: str) -> Callable[[Record], dict[str, Any]]:
    def read(record: Record) -> dict[str, Any]:
        for field in ("queries", "answers"):
            if not isinstance(record[field], Mapping):
                raise RowError("not text", field, f"a {type(record[field]).__name__} in place of texts by language")
        return {"prompt": record["queries"].get(language), "response": _first_passage(record["answers"], language)}

    return read


READERS: dict[str, tuple[frozenset[str], Callable[[Record], dict[str, Any]]]] = {
    "comparison": (frozenset({"question", "answer_0", "answer_1", "score_0", "score_1"}), _comparison),
    "preference": (frozenset({"history", "human_ref_A", "human_ref_B", "labels"}), _preference),
    "passages": (frozenset({"query", "positive_passages", "negative_passages"}), _passages),
    "human-ai": (frozenset({"question", "human_answers", "chatgpt_answers"}), _human_ai),
    "upper-case": (frozenset({"INSTRUCTION", "RESPONSE"}), _upper_case),
    "vicuna-text": (frozenset({"prompt", "label"}), _vicuna),
    "quiz": (frozenset({"question", "sentence", "paragraph"}), _quiz),
    "quizzes": (frozenset({"questions", "paragraph"}), _quizzes),
    "mkqa-zh_cn": (frozenset({"queries", "answers"}), _mkqa("zh_cn")),
    "mkqa-ja": (frozenset({"queries", "answers"}), _mkqa("ja")),
}


def recognise_foreign(record: Record) -> str | None:
    """The foreign shape a record has by its columns, or None."""
    for shape, (columns, _) in READERS.items():
        if shape.startswith("mkqa") or not columns <= record.keys():
            continue
        if shape != "vicuna-text" or (isinstance(record["label"], str) and "ASSISTANT:" in str(record["prompt"])):
            return shape
    return None


def read_foreign(shape: str, record: Record) -> tuple[dict[str, Any], set[str]]:
    """(the record in a shape of `data.shapes`, columns used up by it). Raises RowError or KeyError."""
    columns, read = READERS[shape]
    return read(record), set(columns)
