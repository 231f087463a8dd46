"""Tokenized items on disk, read through memory maps: a million items open at once and cost what is looked at.

A folder holds, flat and one behind the other,

    ids.i32       token ids of all sequences           ends.i64      where each sequence ends
    trained.u8    1 on trained tokens (SFT)            order.i64     the items of an epoch, by number
    rows.jsonl    the row of each item (PPO)           row_ends.i64  where each row's line ends
    facts.rec     what is known of each item (reward)

An SFT item is one sequence, a prompt one, a reward item two: chosen and rejected, or one answer and an empty one.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.cache import writing
from data.chat import IGNORE

SEQUENCES = {"sft": 1, "reward": 2, "ppo": 1}
KINDS = ("pair", "label", "score")
"""Of reward items: two answers, the better first; one answer with the probability that it is good; one with a score."""
FACTS = np.dtype([("kind", "u1"), ("value", "f4"), ("starts", "i4", (2,)), ("source", "u2")])
"""`kind` by its place in KINDS; `value` the margin of a pair, else the label or score; where the answers begin."""


class StoreWriter:
    """Appends items of one stage to a new folder; a `with` block closes its files.

    Raises:
        ValueError: the folder cannot be written to, or is full.
    """

    def __init__(self, folder: Path, stage: str):
        self.folder, self.stage = folder, stage
        self.items = self.tokens = self.trained_tokens = self.longest = 0
        self.kinds: Counter[str] = Counter()
        self._row_bytes = 0
        self._order: list[np.ndarray] = []
        names = ["ids.i32", "ends.i64"]
        names += {"sft": ["trained.u8"], "reward": ["facts.rec"], "ppo": ["rows.jsonl", "row_ends.i64"]}[stage]
        with writing(folder):
            folder.mkdir(parents=True)
            self._files = {name: open(folder / name, "wb") for name in names}

    def add(self, items: Sequence[Item], copies: Sequence[int]) -> None:
        """Appends `items`; item i takes part `copies[i]` times in an epoch."""
        if items:
            with writing(self.folder):
                self._add(items, copies)

    def _add(self, items: Sequence[Item], copies: Sequence[int]) -> None:
        absent = [[]] * SEQUENCES[self.stage]
        sequences = [ids for item in items for ids in [*item.sequences, *absent[len(item.sequences) :]]]
        lengths = np.fromiter(map(len, sequences), dtype=np.int64, count=len(sequences))
        self._write("ids.i32", np.concatenate([np.asarray(one, dtype=np.int32) for one in sequences]))
        self._write("ends.i64", self.tokens + lengths.cumsum())
        self.tokens += int(lengths.sum())
        self.longest = max(self.longest, int(lengths.max()))
        if self.stage == "sft":
            trained = np.concatenate([np.asarray(item.trained, dtype=np.uint8) for item in items])
            self._write("trained.u8", trained)
            self.trained_tokens += int(trained.sum())
        if self.stage == "reward":
            self._write("facts.rec", np.array([item.facts for item in items], dtype=FACTS))
            self.kinds.update(KINDS[item.facts[0]] for item in items)
        if self.stage == "ppo":
            lines = [
                json.dumps(item.row, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n" for item in items
            ]
            ends = self._row_bytes + np.cumsum([len(line) for line in lines])
            self._row_bytes = int(ends[-1])
            self._files["rows.jsonl"].writelines(lines)
            self._write("row_ends.i64", ends.astype(np.int64))
        self._order.append(np.repeat(np.arange(self.items, self.items + len(items)), copies))
        self.items += len(items)

    def _write(self, name: str, values: np.ndarray) -> None:
        # not by numpy's tofile, which loses what a full disk does not take without a word
        self._files[name].write(values.tobytes())

    def statistics(self) -> dict[str, Any]:
        """Counts of what was written, and the hash of the token ids, for the report; after the `with` block."""
        with open(self.folder / "ids.i32", "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        counts = {"items": self.items, "tokens": self.tokens, "longest": self.longest, "ids_sha256": digest}
        own = {"sft": {"trained_tokens": self.trained_tokens}, "reward": {"kinds": dict(self.kinds)}}
        return counts | own.get(self.stage, {})

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *error: object) -> None:
        with writing(self.folder):
            for file in self._files.values():
                file.close()
            order = np.concatenate(self._order) if self._order else np.zeros(0)
            (self.folder / "order.i64").write_bytes(order.astype(np.int64).tobytes())


class Item:
    """What a stage learns from one row: its token sequences, which tokens are trained (SFT), the row (PPO), what is
    known of a pair or an answer (reward: a tuple with the fields of FACTS)."""

    __slots__ = ("facts", "row", "sequences", "trained")

    def __init__(
        self,
        sequences: list[list[int]],
        trained: list[bool] | None = None,
        row: dict | None = None,
        facts: tuple | None = None,
    ):
        self.sequences, self.trained, self.row, self.facts = sequences, trained, row, facts


def item_tensors(
    stage: str, sequences: Sequence[Any], trained: Any = None, row: dict | None = None, facts: Any = None
) -> dict[str, Any]:
    """An item as a stage sees it: a dict of int64 tensors, the row of a prompt, the facts of a reward item."""
    ids = [torch.from_numpy(np.asarray(sequence).astype(np.int64)) for sequence in sequences]
    if stage == "reward":
        kind, value, starts, source = facts
        about = {"kind": KINDS[kind], "source": int(source)}
        if about["kind"] != "pair":
            return {"answer_ids": ids[0], "answer_start": int(starts[0]), "target": float(value), **about}
        sides = {"chosen_ids": ids[0], "rejected_ids": ids[1]}
        return {
            **sides,
            "chosen_start": int(starts[0]),
            "rejected_start": int(starts[1]),
            "margin": float(value),
            **about,
        }
    if stage == "ppo":
        return {"prompt_ids": ids[0], "row": row}
    untrained = torch.from_numpy(~np.asarray(trained).astype(bool))
    return {"input_ids": ids[0], "labels": ids[0].masked_fill(untrained, IGNORE)}


class ItemSet(Sequence):
    """The items of one stage's part, a sequence of dicts of tensors (int64).

    sft: `input_ids`, `labels` [T];  ppo: `prompt_ids` [T], `row`;  reward: a pair is `chosen_ids`, `rejected_ids` [T],
    `chosen_start`, `rejected_start` (where the answers begin), `margin`, one answer `answer_ids` [T], `answer_start`,
    `target`, both with `kind` (see KINDS) and `source` (its number in the report).

    `identity`: what the items and their order hang on, see `data.identity`; None when nobody said.
    """

    def __init__(self, folder: Path, stage: str, identity: dict[str, Any] | None = None):
        self.folder, self.stage, self.identity = Path(folder), stage, identity
        self._maps: dict[str, np.ndarray] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_maps": {}}

    def _map(self, name: str) -> np.ndarray:
        if name not in self._maps:
            path = self.folder / name
            kinds = {"i32": np.int32, "i64": np.int64, "u8": np.uint8, "jsonl": np.uint8, "rec": FACTS}
            kind = kinds[name.rpartition(".")[2]]
            empty = path.stat().st_size == 0  # which cannot be mapped
            self._maps[name] = np.zeros(0, kind) if empty else np.memmap(path, kind, mode="r")
        return self._maps[name]

    def __len__(self) -> int:
        return len(self._map("order.i64"))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        item = int(self._map("order.i64")[place])
        count = SEQUENCES[self.stage]
        spans = [self._span(count * item + side) for side in range(count)]
        ids = [self._map("ids.i32")[start:end] for start, end in spans]
        start, end = spans[0]
        trained = self._map("trained.u8")[start:end] if self.stage == "sft" else None
        row = self._row(item) if self.stage == "ppo" else None
        facts = self._map("facts.rec")[item] if self.stage == "reward" else None
        return item_tensors(self.stage, ids, trained, row, facts)

    def lengths(self) -> np.ndarray:
        """Tokens of each item (of a pair, of its longer side), int64 [items]; for batches of similar length."""
        lengths = np.diff(self._map("ends.i64"), prepend=0)
        per_item = lengths.reshape(-1, SEQUENCES[self.stage]).max(axis=1)
        return per_item[self._map("order.i64")]

    def _span(self, sequence: int) -> tuple[int, int]:
        ends = self._map("ends.i64")
        return (int(ends[sequence - 1]) if sequence else 0), int(ends[sequence])

    def _row(self, item: int) -> dict[str, Any]:
        ends = self._map("row_ends.i64")
        start = int(ends[item - 1]) if item else 0
        return json.loads(self._map("rows.jsonl")[start : int(ends[item])].tobytes())
