"""Text to token ids in pieces that join without a seam.

A dialogue is tokenized in stretches: the text between two control tokens, an answer apart from its prompt. So
prompt ids + answer ids are the ids of the whole by construction, and text that looks like a control token stays
text. This file hides what differs between tokenizers: which control tokens open a text, and whether a stretch
gets a space put in front of it (SentencePiece's dummy prefix).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from data.layout import special_pattern

_SPACES = ("\u2581", "\u0120")  # how SentencePiece and byte-level tokenizers write a space


class Encoder:
    """`tokenizer` as the rest of this package sees it.

    Attributes:
        prefix: ids of the control tokens the tokenizer opens every text with: one BOS, or none.
        specials: texts of its control tokens.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._backend = _own_backend(tokenizer)
        self.specials = control_tokens(tokenizer)
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


def _own_backend(tokenizer: Any) -> Tokenizer | None:
    """A copy of a fast tokenizer's core that reads control tokens in a text as text, pads and cuts nothing, and
    is out of reach of what other callers set; None for a tokenizer written in Python."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    own = Tokenizer.from_str(backend.to_str())
    own.no_padding()
    own.no_truncation()
    own.encode_special_tokens = True
    return own


def control_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Texts of the tokenizer's control tokens, sorted."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return tuple(sorted(added | set(tokenizer.all_special_tokens)))


def _one_space(text: str) -> bool:
    return text.startswith(" ") and not text.startswith("  ") and text != " "
