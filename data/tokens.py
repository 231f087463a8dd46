"""Text to token ids in pieces that join without a seam.

A dialogue is tokenized in stretches: the text between two control tokens, an answer apart from its prompt. So
prompt ids + answer ids are the ids of the whole by construction, and text that looks like a control token stays
text. This file hides what differs between tokenizers: which control tokens open a text, and whether a stretch
gets a space put in front of it (SentencePiece's dummy prefix).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from data.layout import question_layout, special_pattern

_SPACES = ("\u2581", "\u0120")  # how SentencePiece and byte-level tokenizers write a space


class Encoder:
    """`tokenizer` as the rest of this package sees it.

    Attributes:
        prefix: ids of the control tokens the tokenizer opens every text with: one BOS, or none.
        specials: texts of its control tokens.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.specials = control_tokens(tokenizer)
        self._backend = _own_backend(tokenizer, self.specials)
        self._pattern = special_pattern(self.specials)
        bare = self._ids(["a"])[0]
        whole = tokenizer("a", verbose=False)["input_ids"]
        start = next(i for i in range(len(whole) + 1) if whole[i : i + len(bare)] == bare)
        self.prefix: list[int] = whole[:start]
        first = tokenizer.convert_ids_to_tokens(bare[0]) if bare else ""
        self.adds_space = first.startswith(_SPACES)

    def split(self, text: str) -> list[str | int]:
        """The template text `text` as plain stretches and the ids of the control tokens between them."""
        parts: list[str | int] = []
        position = 0
        for match in self._pattern.finditer(text):
            parts += [text[position : match.start()], self._tokenizer.convert_tokens_to_ids(match[0])]
            position = match.end()
        return [part for part in [*parts, text[position:]] if part != ""]

    def encode(self, texts: Sequence[str], opening: Sequence[bool]) -> list[list[int]]:
        """Ids of stretches; `opening[i]`: stretch i opens its text, nothing but `prefix` stands before it."""
        cut = [
            text[1:] if self.adds_space and not first and _one_space(text) else text
            for text, first in zip(texts, opening, strict=True)
        ]
        encoded = self._ids(cut)
        if self.adds_space:
            for i, (text, first) in enumerate(zip(texts, opening, strict=True)):
                if not first and not text.startswith(" ") and self._is_bare_space(encoded[i]):
                    encoded[i] = encoded[i][1:]
        return encoded

    def _is_bare_space(self, ids: list[int]) -> bool:
        return bool(ids) and self._tokenizer.convert_ids_to_tokens(ids[0]) in _SPACES

    def _ids(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        if self._backend is not None:
            return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        return self._tokenizer(
            texts,
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]


def _own_backend(tokenizer: Any, specials: Sequence[str]) -> Tokenizer | None:
    """A copy of a fast tokenizer's core that reads control tokens in a text as text, pads and cuts nothing, and
    is out of reach of what other callers set; None for a tokenizer written in Python."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    own = Tokenizer.from_str(json.dumps(_out_of_reach(json.loads(backend.to_str()), set(specials))))
    own.no_padding()
    own.no_truncation()
    own.encode_special_tokens = True
    return own


def _out_of_reach(core: dict[str, Any], specials: set[str]) -> dict[str, Any]:
    """A tokenizer's core in which the control tokens keep their ids under names that no text can have.

    A control token is often a word of the vocabulary too, and a model of whole words or of word probabilities finds it
    there; and what was added as a plain token is found even where control tokens are read as text.
    """
    names = {text: f"\U0010ffff {number} \U0010fffe" for number, text in enumerate(sorted(specials))}
    model = core["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(text, text): number for text, number in vocab.items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
    if model.get("merges"):
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        model["merges"] = [pair for pair in pairs if not names.keys() & {*pair, "".join(pair)}]
    model["unk_token"] = names.get(model.get("unk_token"), model.get("unk_token"))
    for token in core["added_tokens"]:
        if token["content"] in names:
            token.update(content=names[token["content"]], special=True)
    return core


def control_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Texts of the tokenizer's control tokens, sorted: those marked as such, and those among its other added tokens
    with which its chat template opens and closes a question."""
    added = {str(token): token.special for token in tokenizer.added_tokens_decoder.values()}
    found = {text for text, special in added.items() if special} | set(tokenizer.all_special_tokens)
    if tokenizer.chat_template:
        around = question_layout(tokenizer.get_chat_template(), dict(tokenizer.special_tokens_map))
        found |= {text for text in added if text in around}
    return tuple(sorted(found))


def _one_space(text: str) -> bool:
    return text.startswith(" ") and not text.startswith("  ") and text != " "
