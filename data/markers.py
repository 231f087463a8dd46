"""Dialogues as text: `\\n\\nHuman:` and `\\n\\nAssistant:` markers, to turns and back.

A turn is `{"role": "system" | "user" | "assistant", "content": str}`. The text form of a dialogue is

    [system text]\\n\\nHuman: question\\n\\nAssistant: answer\\n\\nHuman: ...\\n\\nAssistant:

where a marker with nothing behind it at the end is the place of the next answer, not a turn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

Turn = dict[str, Any]

HUMAN = "\n\nHuman:"
ASSISTANT = "\n\nAssistant:"
SYSTEM = "\n\nSystem:"
MARKERS = {"user": HUMAN, "assistant": ASSISTANT, "system": SYSTEM}

_MARKER = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_WINDOWS_MARKER = re.compile(r"\r\n\r\n((?:Human|Assistant):)")
_ROLE = {"Human": "user", "Assistant": "assistant"}


def unix_markers(text: str) -> str:
    """`text` with the blank line before its markers as it has to be, where a Windows program has written it."""
    return _WINDOWS_MARKER.sub(r"\n\n\1", text) if "\r" in text else text


def has_markers(text: str) -> bool:
    """True when `text` is a dialogue in marker form.

    A marker at the very beginning may have lost its blank line, as in a cell of a table, and then counts only
    together with an assistant marker further on: a plain question may begin with the word "Human:".
    """
    return HUMAN in text or ASSISTANT in text


def parse_dialogue(text: str) -> list[Turn]:
    """The turns of a dialogue in marker form, contents stripped of outer whitespace.

    Text before the first marker is a system turn. Text without any marker is one user turn. A last assistant
    marker with nothing behind it is no turn: the answer is still to come.
    """
    if not has_markers(text):
        return [{"role": "user", "content": text.strip()}]
    found = list(_MARKER.finditer(text))
    turns = []
    preface = text[: found[0].start()].strip()
    if preface:
        turns.append({"role": "system", "content": preface})
    for match, following in zip(found, [*found[1:], None], strict=True):
        end = len(text) if following is None else following.start()
        content = text[match.end() : end].strip()
        role = _ROLE[match[1]]
        if following is None and role == "assistant" and not content:
            break
        turns.append({"role": role, "content": content})
    return turns


def turns_to_text(turns: Sequence[Turn], open_answer: bool = True) -> str:
    """The marker form of `turns`; with `open_answer` it ends in the assistant marker of the next answer."""
    parts = []
    for number, turn in enumerate(turns):
        if number == 0 and turn["role"] == "system":
            parts.append(turn["content"])
        else:
            parts.append(f"{MARKERS[turn['role']]} {turn['content']}")
    if open_answer:
        parts.append(ASSISTANT)
    return "".join(parts)


def split_last_answer(text: str) -> tuple[str, str] | None:
    """(prompt through the last assistant marker, answer behind it) of a whole dialogue; None without a marker.

    Turns behind the last answer, such as a last question nobody answered, are cut off.
    """
    start = text.rfind(ASSISTANT)
    if start < 0:
        return None
    end = start + len(ASSISTANT)
    answer = text[end:]
    later = answer.find(HUMAN)
    return text[:end], answer if later < 0 else answer[:later]
