"""One message of anybody's data set to a turn of ours: names of roles and fields, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from data.markers import Turn

ROLES = {
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "system",
}
TOOL_ROLES = {"tool", "function", "function_call", "function_response", "observation", "ipython"}
CALL_FIELDS = ("tool_calls", "function_call")


class RowError(ValueError):
    """A row that cannot be used: `reason` is what is counted, `field` where it was, the message the whole of it."""

    def __init__(self, reason: str, field: str, detail: str = ""):
        super().__init__(f"{reason}, field {field}" + (f": {detail}" if detail else ""))
        self.reason, self.field = reason, field


def text_of(value: Any, field: str) -> str:
    """`value` as text: numbers are written out, lists of text parts joined.

    Raises:
        RowError: nothing there, an image or other part that is not text, or text that is not valid Unicode.
    """
    if isinstance(value, str):
        if not value.isascii():
            try:
                value.encode("utf-8")
            except UnicodeEncodeError as error:
                raise RowError("not valid Unicode", field, f"a lone surrogate at character {error.start}") from error
        return value
    if value is None or value != value:  # NaN is how a table of numbers writes that a text is missing
        raise RowError("missing text", field)
    if isinstance(value, bool | int | float):
        return str(value)
    if isinstance(value, Sequence) and all(isinstance(part, str | Mapping) for part in value):
        return "".join(_part_text(part, field) for part in value)
    raise RowError("not text", field, f"a {type(value).__name__}")


def _part_text(part: str | Mapping[str, Any], field: str) -> str:
    if isinstance(part, str):
        return text_of(part, field)
    kind = part.get("type") or "text"
    if kind == "text" and part.get("text") is not None:
        return text_of(part["text"], field)
    refused = "image turn" if "image" in str(kind) else "turn that is not text"
    raise RowError(refused, field, f"a part of type {kind}")


def parse_json(text: str) -> Any:
    """JSON text, as it stands in a table's cell.

    Raises:
        ValueError: it is none, is nested too deep, or has a number of thousands of digits.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON at character {error.pos}") from error


def read_list(value: Any, field: str) -> list[Any]:
    """A list, or the JSON text of one, as it stands in a table's cell.

    Raises:
        RowError: anything else.
    """
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError as error:
            raise RowError("not a list of turns", field, str(error)) from error
    if not isinstance(value, Sequence):
        raise RowError("not a list of turns", field, f"a {type(value).__name__}")
    return list(value)


def read_turn(message: Any, field: str) -> Turn:
    """A message with `role`/`content`, `from`/`value` or `role`/`value` to a turn.

    An assistant message with `weight` 0 or `train` false is kept with `train` false: context that is not learned.

    Raises:
        RowError: tool and image turns, unknown roles, missing text.
    """
    if not isinstance(message, Mapping):
        raise RowError("not a turn", field, f"a {type(message).__name__} in place of role and content")
    # a table of rows in both styles has all four fields in each, empty where a row has none
    name = message.get("role") if message.get("role") is not None else message.get("from")
    if name is None:
        raise RowError("turn without a role", field, f"its fields are {', '.join(map(str, message))}")
    key = str(name).strip().lower()
    if key in TOOL_ROLES or any(message.get(call) for call in CALL_FIELDS):
        raise RowError("tool turn", field, f"role {name}")
    if key not in ROLES:
        raise RowError("unknown role", field, f"{name!r}; known are {', '.join(ROLES)}")
    content = next((message[key] for key in ("content", "value", "text") if message.get(key) is not None), None)
    turn: Turn = {"role": ROLES[key], "content": text_of(content, field).strip()}
    if turn["role"] == "assistant" and not _is_trained(message):
        turn["train"] = False
    return turn


def _is_trained(message: Mapping[str, Any]) -> bool:
    """False for a message marked by `weight` 0 or `train` false: it is context, not to be learned."""
    return message.get("weight") not in (0, 0.0) and message.get("train") is not False


def read_turns(value: Any, field: str) -> list[Turn]:
    """A list of messages to turns. Raises RowError with the number of the message in the field's name."""
    return [read_turn(message, f"{field}[{number}]") for number, message in enumerate(read_list(value, field))]


def is_turn(value: Any) -> bool:
    """True for a message of a known role, which tells a turn in JSON text from other JSON."""
    if not isinstance(value, Mapping) or not ("content" in value or "value" in value):
        return False
    name = value.get("role") if value.get("role") is not None else value.get("from")
    return isinstance(name, str) and name.strip().lower() in (*ROLES, *TOOL_ROLES)


def is_turns(value: Any) -> bool:
    """True for a non-empty list of messages, or the JSON text of one, whose roles are known: other JSON is text."""
    if isinstance(value, str):
        if not value.lstrip().startswith("[{"):
            return False
        try:
            value = parse_json(value)
        except ValueError:
            return False
        return bool(value) and all(map(is_turn, value))
    return (
        isinstance(value, Sequence)
        and len(value) > 0
        and all(isinstance(part, Mapping) and ("role" in part or "from" in part) for part in value)
    )
