"""The parts of a row: its prompt, its answers, its score. Readers of `data.shapes` put rows together from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from data.markers import ASSISTANT, HUMAN, Turn, has_markers, split_last_answer, turns_to_text, unix_markers
from data.turns import RowError, is_turn, is_turns, parse_json, read_turn, read_turns, text_of

Row = dict[str, Any]

TURNS = ("messages", "conversations", "conversation", "dialogue", "dialog")
PROMPTS = ("prompt", "question", "instruction", "query")
ANSWERS = ("response", "completion", "answer", "output", "chosen")
SCORES = ("reward", "label", "score")
LARGEST = 3.4e38
"""Numbers are kept in 32 bits."""
PAIR_SCORES = (("chosen_score", "rejected_score"), ("score_chosen", "score_rejected"), ("margin", None))


def first(record: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in record), None)


def prompt_row(turns: list[Turn], field: str) -> Row:
    if not any(turn["content"] for turn in turns):
        raise RowError("empty prompt", field)
    return {"prompt": turns_to_text(turns), "messages": turns}


def text_prompt(text: str, field: str) -> tuple[Row, str]:
    """(row with the prompt, beginning of the answer): a plain prompt is wrapped, one with markers kept."""
    text = unix_markers(text)
    if not has_markers(text):
        return prompt_row([{"role": "user", "content": text.strip()}], field), ""
    parts = split_last_answer(text)
    if parts is None or text.rfind(HUMAN) > text.rfind(ASSISTANT):
        prompt, begun = text.rstrip() + ASSISTANT, ""
    else:
        prompt, begun = parts
    if not prompt.replace(HUMAN, "").replace(ASSISTANT, "").strip():
        raise RowError("empty prompt", field)
    return {"prompt": prompt}, begun.lstrip() if begun.strip() else ""


def read_prompt(record: Mapping[str, Any], name: str) -> tuple[Row, str]:
    system = record.get("system")
    if is_turns(record[name]):
        turns = read_turns(record[name], name)
        return prompt_row(with_system(system, turns), name), ""
    answer = first(record, ANSWERS)
    text = unix_markers(text_of(record[name], name))
    text = prompt_of_answer(text, None if answer is None else record[answer])
    if system and not has_markers(text):
        return prompt_row(with_system(system, [{"role": "user", "content": text.strip()}]), name), ""
    return text_prompt(text, name)


def with_system(system: Any, turns: list[Turn]) -> list[Turn]:
    content = text_of(system, "system").strip() if system else ""
    return [{"role": "system", "content": content}, *turns] if content else turns


def answer_text(value: Any, field: str) -> str:
    """An answer that is text, with or without its marker, one turn, or a list that ends in an assistant turn."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = turn_in_text(value)
    if isinstance(value, Mapping):
        turn = read_turn(value, field)
        if turn["role"] != "assistant":
            raise RowError("answer of another role", field, turn["role"])
        return turn["content"]
    if is_turns(value):
        return split_turns(read_turns(value, field), field)[1]
    return text_of(value, field).strip().removeprefix("Assistant:").lstrip()


def turn_in_text(value: str) -> Any:
    """The turn whose JSON text `value` is, else `value`."""
    try:
        turn = parse_json(value)
    except ValueError:
        return value
    return turn if is_turn(turn) else value


def filled(text: str, field: str) -> str:
    if not text:
        raise RowError("empty answer", field)
    return text


def split_turns(turns: list[Turn], field: str) -> tuple[list[Turn], str]:
    """(turns before the last assistant turn, its text); what stands behind it has no answer and is cut off."""
    last = max((k for k, turn in enumerate(turns) if turn["role"] == "assistant"), default=None)
    if last is None:
        raise RowError("no assistant turn", field)
    return turns[:last], turns[last]["content"]


def prompt_of_answer(text: str, answer: Any) -> str:
    """A prompt with its first marker made whole, when the answer beside it shows that it is a dialogue.

    Some sets cut a dialogue right before its last "Assistant:": the prompt begins with "Human:", the answer with
    "Assistant:".
    """
    cut = isinstance(answer, str) and answer.lstrip().startswith("Assistant:")
    return "\n\n" + text.lstrip() if cut and text.lstrip().startswith("Human:") else text


def pair_rows(base: Row, begun: str, record: Mapping[str, Any]) -> list[Row]:
    """One row for each rejected answer."""
    chosen = filled(begun + answer_text(record["chosen"], "chosen"), "chosen")
    rejected = record["rejected"]
    several = isinstance(rejected, list) and not is_turns(rejected)
    answers = rejected if several else [rejected]
    rows = []
    for number, answer in enumerate(answers):
        field = f"rejected[{number}]" if several else "rejected"
        text = filled(begun + answer_text(answer, field), field)
        rows.append({**base, "chosen": chosen, "rejected": text})
    if not rows:
        raise RowError("empty answer", "rejected", "a list of no answers")
    return rows


def add_margin(record: Mapping[str, Any], rows: list[Row], used: set[str]) -> None:
    for first, second in PAIR_SCORES:
        if first in record and (second is None or second in record):
            margin = number(record[first], first)
            if second is not None:
                margin = number(margin - number(record[second], second), first)
            for row in rows:
                row["margin"] = margin
            used.update({first, second} - {None})
            return


def add_score(record: Mapping[str, Any], row: Row, used: set[str]) -> None:
    name = first(record, SCORES)
    if name is not None:
        row["score"] = number(record[name], name)
        used.add(name)


def number(value: Any, field: str) -> float:
    if isinstance(value, str):
        words = {"true": 1.0, "false": 0.0}
        value = words.get(value.strip().lower(), value)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise RowError("not a number", field, f"{value!r:.60}") from error
    if not abs(number) <= LARGEST:
        raise RowError("not a number", field, f"{number} is no float of 32 bits")
    return number


def is_plain(value: Any) -> bool:
    """True for what JSON can hold: a row keeps such columns, and leaves out pictures, dates and the like."""
    if value is None or isinstance(value, str | int | float):
        return True
    if isinstance(value, list):
        return all(map(is_plain, value))
    return isinstance(value, dict) and all(isinstance(key, str) and is_plain(part) for key, part in value.items())
