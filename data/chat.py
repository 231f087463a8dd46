"""The one place where dialogues become token ids, for SFT, reward, PPO prompts, evaluation and chat alike.

A dialogue takes the shape of the tokenizer's chat template, or of the dialogue markers where it has none:

    prefix  turns ... assistant marker | answer  end token | turns ... assistant marker | answer  end token
            not trained                  trained             not trained                  trained

One BOS if the tokenizer opens texts with one; one end token at the end of every assistant turn, in prompts as in
training; the last end token is the last id. Prompt ids + answer ids are the ids of the whole. The end token is
the template's own (`<|im_end|>`, `<|eot_id|>`, ...), else the tokenizer's EOS.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data.layout import (
    END,
    START,
    TRAIN,
    Piece,
    marker_layout,
    template_end_token,
    template_layout,
    use_template_file,
)
from data.markers import Turn, parse_dialogue, turns_to_text
from data.tokens import Encoder

__all__ = [
    "ChatFormat",
    "Encoded",
    "IGNORE",
    "decode_response",
    "encode_dialogue",
    "encode_prompt",
    "end_token_id",
    "format_of",
    "parse_dialogue",
    "render",
    "stop_token_ids",
    "turns_of",
    "turns_to_text",
    "use_template_file",
]

IGNORE = -100
"""Label of a position that is not trained."""

Dialogue = Mapping[str, Any] | Sequence[Turn] | str
"""A row of `load_rows`, turns, or text in marker form."""


@dataclass
class Encoded:
    """Token ids of one dialogue, `trained[i]` telling the assistant's own, and where each turn's ids begin.

    `starts[k]` is the place of the first id of turn k's answer (assistant turns only), in `ids`.
    """

    ids: list[int]
    trained: list[bool]
    starts: list[int]


class ChatFormat:
    """How dialogues are written for one tokenizer. Get it by `format_of`, which keeps it.

    Raises:
        ValueError: the tokenizer has no end token at all.
    """

    def __init__(self, tokenizer: Any):
        self._encoder = Encoder(tokenizer)
        self._template = tokenizer.get_chat_template() if tokenizer.chat_template else None
        self._variables = dict(tokenizer.special_tokens_map)
        self._layouts: dict[tuple[tuple[str, ...], bool], list[Any]] = {}
        end = None
        if self._template is not None:
            end = template_end_token(self._template, self._variables, self._encoder.specials)
        self.end_id: int | None = tokenizer.eos_token_id if end is None else tokenizer.convert_tokens_to_ids(end)
        if self.end_id is None:
            raise ValueError(
                "the tokenizer has no end token: answers could never stop; set tokenizer.eos_token to one of its tokens"
            )
        self.stop_ids = list(dict.fromkeys([self.end_id, *_as_list(tokenizer.eos_token_id)]))

    def encode(self, dialogues: Iterable[Sequence[Turn]], open_answer: bool) -> list[Encoded]:
        """Ids of many dialogues at once; with `open_answer` they end in the marker of the next answer, else with
        the last end token.

        Raises:
            ValueError: a template that refuses a dialogue's sequence of roles.
        """
        return self.run([self.plan(turns, open_answer) for turns in dialogues])

    def run(self, plans: Sequence[list[Any]]) -> list[Encoded]:
        """The ids of plans, all their texts tokenized in one call, equal ones (the prompt of a pair's sides) once."""
        texts = [(part, number == 0) for plan in plans for number, part in enumerate(plan) if isinstance(part, str)]
        distinct = list(dict.fromkeys(texts))
        ids = self._encoder.encode([text for text, _ in distinct], [opening for _, opening in distinct])
        known = dict(zip(distinct, ids, strict=True))
        encoded = map(known.__getitem__, texts)
        return [self._assemble(plan, encoded) for plan in plans]

    def _assemble(self, plan: list[Any], encoded: Iterable[list[int]]) -> Encoded:
        out = Encoded([], [], [])
        inside = False
        for part in plan:
            if part is START or part is TRAIN:
                inside = part is TRAIN
                if part is START:
                    out.starts.append(len(out.ids))
                continue
            if part is END:
                ids = [self.end_id]
            else:
                ids = [part] if isinstance(part, int) else next(encoded)
            out.ids += ids
            out.trained += [inside] * len(ids)
            if part is END:
                inside = False
        first = self._encoder.prefix
        if first and out.ids[: len(first)] != first:  # a template that writes BOS itself does not get another
            out.ids[:0] = first
            out.trained[:0] = [False] * len(first)
            out.starts = [start + len(first) for start in out.starts]
        return out

    def plan(self, turns: Sequence[Turn], open_answer: bool) -> list[Any]:
        """Stretches of text, control token ids, START, TRAIN and END of a dialogue with its texts put in.

        A turn with a false `train` is the assistant's and ends with its end token, but is not trained.

        Raises:
            ValueError: a template that refuses the sequence of roles.
        """
        plan: list[Any] = []
        text = ""
        inside = False
        for piece in self._layout(tuple(turn["role"] for turn in turns), open_answer):
            if isinstance(piece, str):
                text += piece
            elif isinstance(piece, _Slot):
                content = turns[piece.turn]["content"]
                # An empty answer is its end token alone: without this a lone space would stand before it.
                text = text.rstrip() if inside and not content and not text.strip() else text + content
            else:
                if text:
                    plan.append(text)
                    text = ""
                if isinstance(piece, _Train):
                    if turns[piece.turn].get("train", True):
                        plan.append(TRAIN)
                else:
                    plan.append(piece)
                inside = inside and piece is not END or piece is START
        if text:
            plan.append(text)
        return plan

    def _layout(self, roles: tuple[str, ...], open_answer: bool) -> list[Any]:
        key = (roles, open_answer)
        if key not in self._layouts:
            if self._template is None:
                pieces: list[Piece] = marker_layout(roles, open_answer)
            else:
                specials = self._encoder.specials
                pieces = template_layout(self._template, self._variables, specials, roles, open_answer)
            self._layouts[key] = self._compile(pieces, open_answer)
        return self._layouts[key]

    def _compile(self, pieces: list[Piece], open_answer: bool) -> list[Any]:
        """Control tokens in the template's text to ids; nothing is kept behind the last END of a whole dialogue,
        so that its end token is its last token."""
        if not open_answer and END in pieces:
            pieces = pieces[: len(pieces) - pieces[::-1].index(END)]
        compiled: list[Any] = []
        for number, piece in enumerate(pieces):
            if isinstance(piece, str):
                compiled += self._encoder.split(piece)
            elif piece is TRAIN:
                compiled.append(_Train(next(turn for turn in pieces[number:] if isinstance(turn, int))))
            else:
                compiled.append(_Slot(piece) if isinstance(piece, int) else piece)
        return compiled


@dataclass(frozen=True)
class _Slot:
    turn: int


@dataclass(frozen=True)
class _Train:
    turn: int


_FORMATS: weakref.WeakKeyDictionary[Any, tuple[Any, ChatFormat]] = weakref.WeakKeyDictionary()


def format_of(tokenizer: Any) -> ChatFormat:
    """The tokenizer's `ChatFormat`, made once and again only when its template or control tokens change."""
    state = (repr(tokenizer.chat_template), repr(tokenizer.special_tokens_map), len(tokenizer))
    known = _FORMATS.get(tokenizer)
    if known is None or known[0] != state:
        known = (state, ChatFormat(tokenizer))
        _FORMATS[tokenizer] = known
    return known[1]


def turns_of(dialogue: Dialogue) -> list[Turn]:
    """The turns before the answer: a row's `messages`, else its `prompt` taken apart at the markers."""
    if isinstance(dialogue, str):
        return parse_dialogue(dialogue)
    if isinstance(dialogue, Mapping):
        messages = dialogue.get("messages")
        return list(messages) if messages is not None else parse_dialogue(dialogue["prompt"])
    return list(dialogue)


def render(dialogue: Dialogue, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """(ids, trained): a whole dialogue, `trained` true on assistant text and its end tokens.

    A row's answer is its `response`, else its `chosen`; turns and text are taken as they are. Behind the last
    assistant turn nothing is kept: the end token is the last id.

    Raises:
        ValueError: no assistant turn, or a template that refuses the roles.
    """
    turns = turns_of(dialogue)
    if isinstance(dialogue, Mapping):
        answer = dialogue.get("response", dialogue.get("chosen"))
        if answer is None:
            raise ValueError(f"the row has no answer: its columns are {', '.join(dialogue)}")
        turns = [*turns, {"role": "assistant", "content": answer.strip()}]
    while turns and turns[-1]["role"] != "assistant":
        turns = turns[:-1]
    if not turns:
        raise ValueError("the dialogue has no assistant turn: there is nothing to learn in it")
    encoded = encode_whole(tokenizer, [turns])[0]
    return encoded.ids, encoded.trained


def encode_whole(tokenizer: Any, dialogues: Sequence[Sequence[Turn]]) -> list[Encoded]:
    """Many dialogues that end in an assistant turn; each ends in the end token."""
    return format_of(tokenizer).encode(dialogues, open_answer=False)


def encode_prompts(tokenizer: Any, dialogues: Sequence[Dialogue]) -> list[list[int]]:
    """`encode_prompt` of many dialogues at once."""
    turns = [turns_of(dialogue) for dialogue in dialogues]
    return [one.ids for one in format_of(tokenizer).encode(turns, open_answer=True)]


def encode_prompt(tokenizer: Any, dialogue: Dialogue) -> list[int]:
    """Ids of a dialogue up to where the next answer begins, one BOS if the tokenizer has it.

    Earlier assistant turns end with the end token, as they do in training.
    """
    return encode_prompts(tokenizer, [dialogue])[0]


def encode_dialogue(tokenizer: Any, dialogue: Dialogue, response: str) -> tuple[list[int], list[int]]:
    """(input_ids, labels) of a dialogue and its answer; labels are ids on assistant tokens and IGNORE elsewhere.

    `input_ids` begins with `encode_prompt(tokenizer, dialogue)` and ends with the one end token of `response`.
    """
    turns = [*turns_of(dialogue), {"role": "assistant", "content": response.strip()}]
    encoded = encode_whole(tokenizer, [turns])[0]
    labels = [token if own else IGNORE for token, own in zip(encoded.ids, encoded.trained, strict=True)]
    return encoded.ids, labels


def decode_response(tokenizer: Any, ids: Sequence[int] | Any) -> str:
    """Text of generated `ids` (list or tensor): up to the first end token, other control tokens left out, stripped."""
    stops = set(format_of(tokenizer).stop_ids)
    own: list[int] = []
    for token in ids.tolist() if hasattr(ids, "tolist") else ids:
        if token in stops:
            break
        own.append(token)
    return tokenizer.decode(own, skip_special_tokens=True).strip()


def end_token_id(tokenizer: Any) -> int:
    """The token that ends an answer: the template's, else the tokenizer's EOS."""
    return format_of(tokenizer).end_id


def stop_token_ids(tokenizer: Any) -> list[int]:
    """Tokens at which generation stops: the end token, and EOS where the template's end token is another."""
    return list(format_of(tokenizer).stop_ids)


def _as_list(value: int | list[int] | None) -> list[int]:
    return [] if value is None else value if isinstance(value, list) else [value]
