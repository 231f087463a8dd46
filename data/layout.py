"""What stands around the contents of a dialogue: dialogue markers, or a tokenizer's chat template.

A layout is worked out once for each sequence of roles, never for the texts: the template is run on placeholders
and the texts are put in afterwards. So a text can steer neither the template nor the control tokens, and a
dialogue costs no template run of its own.

    pieces: str     text around the contents; control tokens in it are real
            int     number of the turn whose content stands here
            START   here an answer begins: from here on tokens are the assistant's own
            END     here an answer ends: the end token, the assistant's last own token
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from data.markers import ASSISTANT, MARKERS

START = object()
TRAIN = object()
END = object()
Piece = str | int | object

_GENERATION = re.compile(r"\{%-?\s*generation\b")
_FAILURES = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What a template may raise: it is anybody's program."""
_SLOT = re.compile(r"@@turn-(\d+)-of-the-dialogue@@")


def marker_layout(roles: Sequence[str], open_answer: bool) -> list[Piece]:
    """Pieces of the marker form, see `data.markers`; every assistant turn has its END."""
    pieces: list[Piece] = []
    for number, role in enumerate(roles):
        if role == "assistant":
            pieces += [ASSISTANT, START, TRAIN, " ", number, END]
        elif number == 0 and role == "system":
            pieces.append(number)
        else:
            pieces += [MARKERS[role] + " ", number]
    return [*pieces, ASSISTANT] if open_answer else pieces


def template_layout(
    template: str, variables: dict[str, Any], specials: Sequence[str], roles: Sequence[str], open_answer: bool
) -> list[Piece]:
    """Pieces of a chat template.

    An answer begins where the template's generation prompt ends, so a prompt is always the beginning of the
    whole. It ends at the template's end token behind its content; END is put in where the template has none. Trained
    is the whole answer, or, where the template marks what the model generates ({% generation %}), the marked part of
    it; an assistant turn with no mark is not trained.

    Args:
        template: Jinja text.
        variables: what else the template may use, such as `bos_token`.
        specials: texts of the tokenizer's control tokens.
        roles: of the turns; `open_answer`: end with the generation prompt.

    Raises:
        ValueError: the template refuses these roles or loses a turn.
    """
    text, marks = _render(template, variables, roles, open_answer)
    slots = list(_SLOT.finditer(text))
    if sorted(int(slot[1]) for slot in slots) != list(range(len(roles))):
        missing = sorted(set(range(len(roles))) - {int(slot[1]) for slot in slots})
        which = f"leaves out turn {missing[0]} ({roles[missing[0]]})" if missing else "repeats a turn"
        raise ValueError(f"the chat template {which} of the roles {', '.join(roles)}")
    end = template_end_token(template, variables, specials) if "assistant" in roles else None
    pieces: list[Piece] = []
    position = 0
    for slot, following in zip(slots, [*slots[1:], None], strict=True):
        number = int(slot[1])
        if roles[number] != "assistant":
            pieces += [text[position : slot.start()], number]
            position = slot.end()
            continue
        start = _answer_start(text, position, slot.start(), template, variables, roles[:number])
        pieces += [text[position:start], START, *_answer(text, start, slot, marks), number]
        position = slot.end()
        behind = text[position : following.start() if following else len(text)]
        closing = _first_special(behind, specials)
        # another control token than the end token opens the next turn
        if closing is not None and behind[closing[0] : closing[1]] == end:
            pieces.append(text[position : position + closing[0]])
            position += closing[1]
        pieces.append(END)
    pieces.append(text[position:])
    return [piece for piece in pieces if piece != ""]


def _answer_start(
    text: str, low: int, high: int, template: str, variables: dict[str, Any], roles: Sequence[str]
) -> int:
    """Where the generation prompt behind the turns `roles` ends in `text`; `high`, where the answer's content begins,
    when the template writes those turns differently by themselves."""
    try:
        prompt = _render(template, variables, roles, True)[0]
    except ValueError:  # a template that cannot begin with the assistant's turn, asked for what stands before it
        return high
    return len(prompt) if text.startswith(prompt) and low <= len(prompt) <= high else high


def _answer(text: str, start: int, slot: re.Match[str], marks: list[tuple[int, int]] | None) -> list[Piece]:
    """An answer from `start` to its content, with TRAIN where training begins; without it when nothing is marked."""
    if marks is None:
        return [TRAIN, text[start : slot.start()]]
    begin = next((low for low, high in marks if low <= slot.start() and slot.end() <= high), None)
    if begin is None:
        return [text[start : slot.start()]]
    begin = max(begin, start)
    return [text[start:begin], TRAIN, text[begin : slot.start()]]


def template_end_token(template: str, variables: dict[str, Any], specials: Sequence[str]) -> str | None:
    """The control token by which the template ends an answer; None when it has none.

    Raises:
        ValueError: the template writes no answer, or fails.
    """
    text = _render(template, variables, ["user", "assistant"], False)[0]
    slot = next((slot for slot in _SLOT.finditer(text) if slot[1] == "1"), None)
    if slot is None:
        raise ValueError("the chat template leaves out or changes the text of an answer: it must write it as it is")
    closing = _first_special(text[slot.end() :], specials)
    return text[slot.end() :][closing[0] : closing[1]] if closing else None


def use_template_file(tokenizer: Any, path: str | Path) -> None:
    """Gives the tokenizer the chat template in the file `path`; it is saved with the tokenizer from then on.

    Raises:
        FileNotFoundError: there is no such file. ValueError: nothing is in it, or no UTF-8.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no chat template at {path}: give the path of a Jinja file")
    try:
        template = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: the chat template is not UTF-8 at byte {error.start}: save it as UTF-8") from error
    if not template.strip():
        raise ValueError(f"{path}: the chat template is empty: leave it out to use the dialogue markers")
    tokenizer.chat_template = template


def question_layout(template: str, variables: dict[str, Any]) -> str:
    """What the template writes around a question by itself; nothing when it refuses to."""
    try:
        return _render(template, variables, ["user"], False)[0]
    except ValueError:
        return ""


def _first_special(text: str, specials: Sequence[str]) -> tuple[int, int] | None:
    """(start, end) of the first control token when only whitespace stands before it."""
    match = special_pattern(tuple(specials)).search(text)
    return match.span() if match and not text[: match.start()].strip() else None


@cache
def special_pattern(specials: tuple[str, ...]) -> re.Pattern[str]:
    """Pattern of any of the texts `specials`, the longest first; matches nothing when there are none."""
    longest_first = sorted(filter(None, specials), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _render(
    template: str, variables: dict[str, Any], roles: Sequence[str], open_answer: bool
) -> tuple[str, list[tuple[int, int]] | None]:
    """(text with placeholders, (start, end) of the parts marked as generated; None where the template marks none)."""
    turns = [{"role": role, "content": f"@@turn-{number}-of-the-dialogue@@"} for number, role in enumerate(roles)]
    marked = bool(_GENERATION.search(template))
    try:
        rendered, marks = render_jinja_template(
            [turns],
            chat_template=template,
            add_generation_prompt=open_answer,
            return_assistant_tokens_mask=marked,
            **variables,
        )
    except _FAILURES as error:
        raise ValueError(f"the chat template refuses the roles {', '.join(roles)}: {error}") from error
    return rendered[0], list(marks[0]) if marked else None
