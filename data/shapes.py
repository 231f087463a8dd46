"""Rows of anybody's data set to rows of ours.

The shape of a row is recognised by its columns, in this order (the first that fits):

    turns-pair          messages/conversations + chosen + rejected (text, one turn, or lists of turns)
    turns               messages/conversations: the last assistant turn is the answer
    prompt-pair         prompt/question/instruction + chosen + rejected (rejected may be a list of answers)
    dialogue-pair       chosen + rejected that are whole dialogues, with markers or as lists of turns
    instruction         instruction (+ input, history, system) + output
    self-instruct       instruction + instances, a list of input and output: one row each
    prompt-response     prompt + response/completion/answer/output/chosen
    question-answer     question + answer
    dialogue-text       text with dialogue markers
    prompt              a prompt alone, good for PPO
    (before all these)  the shapes of `data.foreign`

One answer with a `reward`, `label` or `score` keeps it as a number under `score`. What comes out:

    prompt: str     marker form, through the last assistant marker
    messages: list  the prompt's turns, when the row came as turns or as a plain prompt: then marker text inside a
                    turn stays text
    response, or chosen and rejected: str, stripped
    score: float    of the one answer;  margin: float, how much better the chosen one is
    extra: dict     the row's other columns, as far as they are text and numbers
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from data.foreign import READERS as FOREIGN
from data.foreign import read_foreign, recognise_foreign
from data.markers import ASSISTANT, Turn, has_markers, parse_dialogue, split_last_answer, unix_markers
from data.parts import (
    ANSWERS,
    PROMPTS,
    TURNS,
    Row,
    add_margin,
    add_score,
    answer_text,
    filled,
    first,
    is_plain,
    pair_rows,
    prompt_row,
    read_prompt,
    split_turns,
    text_prompt,
    with_system,
)
from data.turns import RowError, is_turns, read_list, read_turns, text_of

MEDIA = ("images", "image", "videos", "audios")


def normalise(record: Mapping[str, Any], shape: str | None = None) -> tuple[str, list[Row]]:
    """(name of the shape, rows) of one record; several rows for several rejected answers or instances.

    Args:
        record: column -> value.
        shape: a name of the table above fixes it.

    Raises:
        RowError: the row cannot be used; its reason and field say why.
    """
    record = {key: value for key, value in record.items() if value is not None}
    for column in MEDIA:
        if record.get(column):
            raise RowError("image turn", column, "only text can be learned")
    if shape is None:
        used, rows = _read(record, shape := recognise(record))
    else:
        try:
            used, rows = _read(record, shape)
        except KeyError as error:
            raise RowError("missing column", str(error.args[0]), f"shape {shape} needs it") from error
    try:
        extra = {key: value for key, value in record.items() if key not in used and is_plain(value)}
    except RecursionError as error:
        raise RowError("nested too deep", "columns", ", ".join(record)) from error
    for row in rows:
        if extra:
            row["extra"] = extra
    return shape, rows


def _read(record: Mapping[str, Any], shape: str) -> tuple[set[str], list[Row]]:
    if shape in _READERS:
        return _READERS[shape](record)
    common, used = read_foreign(shape, record)
    return used, _READERS[recognise(common)](common)[1]


def recognise(record: Mapping[str, Any]) -> str:
    """The shape of a record, see the table of this module. Raises RowError when none fits."""
    columns = record.keys()
    foreign = recognise_foreign(record)
    if foreign is not None:
        return foreign
    pair = "chosen" in columns and "rejected" in columns
    prompt, answer = first(record, PROMPTS), first(record, ANSWERS)
    if first(record, TURNS) is not None:
        return "turns-pair" if pair else "turns"
    if pair:
        return "dialogue-pair" if prompt is None else "prompt-pair"
    if "instruction" in columns and "instances" in columns:
        return "self-instruct"
    if "instruction" in columns and answer is not None:
        return "instruction"
    if prompt is not None and answer is not None:
        return "question-answer" if prompt == "question" else "prompt-response"
    if isinstance(record.get("text"), str) and has_markers(unix_markers(record["text"])):
        return "dialogue-text"
    if prompt is not None:
        return "prompt"
    raise RowError("unknown shape", "columns", f"{', '.join(map(str, columns)) or 'none'}")


def _turns_pair(record: Mapping[str, Any]) -> tuple[set[str], list[Row]]:
    name = first(record, TURNS)
    used = {name, "system", "chosen", "rejected"}
    shared = _pair_of_dialogues(record)
    if shared is not None:
        rows = [shared]
    else:
        turns = with_system(record.get("system"), read_turns(record[name], name))
        while turns and turns[-1]["role"] == "assistant" and _repeats_answer(turns[-1], record):
            turns = turns[:-1]
        rows = pair_rows(prompt_row(turns, name), "", record)
    add_margin(record, rows, used)
    return used, rows


def _repeats_answer(turn: Turn, record: Mapping[str, Any]) -> bool:
    return turn["content"] == answer_text(record["chosen"], "chosen")


def _turns(record: Mapping[str, Any]) -> tuple[set[str], list[Row]]:
    name = first(record, TURNS)
    turns = with_system(record.get("system"), read_turns(record[name], name))
    before, answer = split_turns(turns, name)
    row = {**prompt_row(before, name), "response": filled(answer, name)}
    used = {name, "system"}
    add_score(record, row, used)
    return used, [row]


def _prompt_pair(record: Mapping[str, Any]) -> tuple[set[str], list[Row]]:
    name = first(record, PROMPTS)
    used = {name, "system", "chosen", "rejected"}
    shared = _pair_of_dialogues(record)
    if shared is not None:
        rows = [shared]
    else:
        used |= {"input"} if name == "instruction" else set()
        base, begun = read_prompt(_with_input(record, name), name)
        rows = pair_rows(base, begun, record)
        if "response" in record:
            used.add("response")
            response = filled(begun + answer_text(record["response"], "response"), "response")
            rows = [{**row, "response": response} for row in rows]
    add_margin(record, rows, used)
    return used, rows


def _pair_of_dialogues(record: Mapping[str, Any]) -> Row | None:
    """The row of two sides that are lists of turns with the whole dialogue; None when they hold the answer alone."""
    if not (is_turns(record["chosen"]) and is_turns(record["rejected"])):
        return None
    sides = [split_turns(read_turns(record[side], side), side) for side in ("chosen", "rejected")]
    (before, chosen), (other, rejected) = sides
    if not before and not other:
        return None
    if before != other:
        raise RowError("prompts differ", "rejected", "its turns before the answer are not those of chosen")
    base = prompt_row(with_system(record.get("system"), before), "chosen")
    return {**base, "chosen": filled(chosen, "chosen"), "rejected": filled(rejected, "rejected")}


def _dialogue_pair(record: Mapping[str, Any]) -> tuple[set[str], list[Row]]:
    used = {"chosen", "rejected", "system"}
    row = _pair_of_dialogues(record)
    if row is None:
        (base, good), (other, bad) = (_dialogue_text_of(record[side], side) for side in ("chosen", "rejected"))
        if base["prompt"] != other["prompt"]:
            raise RowError("prompts differ", "rejected", "its dialogue before the answer is not that of chosen")
        row = {**base, "chosen": good, "rejected": bad}
    add_margin(record, [row], used)
    return used, [row]


def _dialogue_text_of(value: Any, field: str) -> tuple[Row, str]:
    """(row with the prompt, answer) of a whole dialogue in marker form."""
    parts = split_last_answer(unix_markers(text_of(value, field)))
    if parts is None:
        raise RowError("no assistant marker", field, f"a whole dialogue needs {ASSISTANT.strip()!r} after a blank line")
    return text_prompt(parts[0], field)[0], filled(parts[1].strip(), field)


def _with_input(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An instruction and its input are one question, a blank line between them."""
    extra = record.get("input")
    if name != "instruction" or not extra or not text_of(extra, "input").strip():
        return record
    return {**record, name: f"{text_of(record[name], name).strip()}\n\n{text_of(extra, 'input').strip()}"}


def _instruction(record: Mapping[str, Any]) -> tuple[set[str], list[Row]]:
    answer = first(record, ("output", *ANSWERS))
    used = {"instruction", "input", "history", "system", answer}
    base, begun = read_prompt(_with_input(record, "instruction"), "instruction")
    if record.get("history"):
        base = _with_history(base, read_list(record["history"], "history"))
    row = {**base, "response": filled(begun + answer_text(record[answer], answer), answer)}
    add_score(record, row, used)
    return used, [row]


def _with_history(base: Row, history: list[Any]) -> Row:
    """Earlier [question, answer] pairs stand before the last question and behind the system turn."""
    turns = base["messages"] if "messages" in base else parse_dialogue(base["prompt"])
    earlier: list[Turn] = []
    for number, pair in enumerate(history):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise RowError("not a question and an answer", f"history[{number}]")
        for role, text in zip(("user", "assistant"), pair, strict=True):
            earlier.append({"role": role, "content": text_of(text, f"history[{number}]").strip()})
    start = 1 if turns[0]["role"] == "system" else 0
    return prompt_row([*turns[:start], *earlier, *turns[start:]], "instruction")


def _self_instruct(record: Mapping[str, Any]) -> tuple[set[str], list[Row]]:
    rows = []
    for number, instance in enumerate(read_list(record["instances"], "instances")):
        field = f"instances[{number}]"
        if not isinstance(instance, Mapping) or "output" not in instance:
            raise RowError("missing text", f"{field}.output")
        one = {"instruction": record["instruction"], "input": instance.get("input", "")}
        base, begun = read_prompt(_with_input(one, "instruction"), "instruction")
        answer = begun + text_of(instance["output"], f"{field}.output").strip()
        rows.append({**base, "response": filled(answer, f"{field}.output")})
    if not rows:
        raise RowError("empty answer", "instances", "a list of no instances")
    return {"instruction", "instances"}, rows


def _prompt_response(record: Mapping[str, Any]) -> tuple[set[str], list[Row]]:
    name, answer = first(record, PROMPTS), first(record, ANSWERS)
    base, begun = read_prompt(record, name)
    row = {**base, "response": filled(begun + answer_text(record[answer], answer), answer)}
    used = {name, answer, "system"}
    add_score(record, row, used)
    return used, [row]


def _dialogue_text(record: Mapping[str, Any]) -> tuple[set[str], list[Row]]:
    base, answer = _dialogue_text_of(record["text"], "text")
    row = {**base, "response": answer}
    used = {"text"}
    add_score(record, row, used)
    return used, [row]


def _prompt(record: Mapping[str, Any]) -> tuple[set[str], list[Row]]:
    name = first(record, PROMPTS)
    base, begun = read_prompt(record, name)
    return {name, "system"}, [{**base, "response": begun.strip()} if begun else base]


_READERS: dict[str, Callable[[Mapping[str, Any]], tuple[set[str], list[Row]]]] = {
    "turns-pair": _turns_pair,
    "turns": _turns,
    "prompt-pair": _prompt_pair,
    "dialogue-pair": _dialogue_pair,
    "instruction": _instruction,
    "self-instruct": _self_instruct,
    "prompt-response": _prompt_response,
    "question-answer": _prompt_response,
    "dialogue-text": _dialogue_text,
    "prompt": _prompt,
}
SHAPES = (*_READERS, *FOREIGN)
