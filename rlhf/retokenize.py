"""Models that speak another tokenizer than the actor: answers go to them as text, and come back in the actor's tokens.

A reward model reads the re-tokenized dialogue and gives one score, whatever its tokens are. A critic gives a value at
each of its own tokens, while one is wanted for the state before each token of the actor. That state is the prompt and
the characters the actor has written so far; its value is read at the last critic token that lies wholly within them.
So a value never depends on text that is still to come, and a state in the middle of a critic token has the value of
the state before it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from data.chat import decode_response, encode_dialogue, encode_prompt, stop_token_ids


@dataclass
class Retokenizer:
    """From the actor's tokens to those of another model."""

    actor: Any
    other: Any

    def whole(self, rows: Sequence[dict], texts: Sequence[str], finished: Sequence[bool]) -> list[list[int]]:
        """Ids of dialogues with their answers; an answer that was cut off has no end token here either."""
        return [
            encode_dialogue(self.other, row, text)[0][: None if is_finished else -1]
            for row, text, is_finished in zip(rows, texts, finished, strict=True)
        ]

    def padded(self, sequences: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """ids, mask `[B, L]`, padded on the right."""
        width = max(map(len, sequences))
        ids = torch.full((len(sequences), width), self.other.pad_token_id)
        mask = torch.zeros(len(sequences), width, dtype=torch.bool)
        for number, sequence in enumerate(sequences):
            ids[number, : len(sequence)] = torch.tensor(sequence)
            mask[number, : len(sequence)] = True
        return ids, mask

    def places(self, row: dict, response: Sequence[int], whole: Sequence[int], is_finished: bool) -> list[int]:
        """For each of the actor's `response` tokens, the position in `whole` where the state before it is read."""
        text = decode_response(self.actor, response)
        start = len(encode_prompt(self.other, row))
        written = [0, *(known for known, _ in _reach(self.actor, response, text))]
        # not the end token: the state before the actor's own end token must not know that the answer ends
        ends = [begun for _, begun in _reach(self.other, whole[start : -1 if is_finished else None], text)]
        places, inside = [], 0
        for characters in written[: len(response)]:
            while inside < len(ends) and ends[inside] <= characters:
                inside += 1
            places.append(start + inside - 1)
        return places


def _reach(tokenizer: Any, ids: Sequence[int], text: str) -> list[tuple[int, int]]:
    """After each token, how many characters of `text` are known, and how many have begun: a token may be half one."""
    reach, known, begun = [], 0, 0
    for end in range(1, len(ids) + 1):
        decoded = tokenizer.decode(ids[:end], skip_special_tokens=True).lstrip()
        known = max(known, len(os.path.commonprefix([decoded, text])))
        begun = max(begun, known + (len(decoded) > known))
        reach.append((known, begun))
    return reach


def same_tokens(actor: Any, other: Any) -> bool:
    """Whether `other` makes of every dialogue the ids that `actor` makes of it. A padding token apart may be new."""
    added = other.get_added_vocab()
    if any(added.get(token) != number for token, number in actor.get_added_vocab().items()):
        return False
    if actor.chat_template != other.chat_template or stop_token_ids(actor) != stop_token_ids(other):
        return False
    return _rules(actor) == _rules(other)


def _rules(tokenizer: Any) -> Any:
    """What decides a text's ids, comparable."""
    if not getattr(tokenizer, "is_fast", False):
        added = tokenizer.get_added_vocab()
        return type(tokenizer).__name__, {k: v for k, v in tokenizer.get_vocab().items() if k not in added}
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    return {part: state.get(part) for part in ("model", "normalizer", "pre_tokenizer", "post_processor")}
