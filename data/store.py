"""Tokenized items on disk, read through memory maps: a million items open at once and cost what is looked at.

A folder holds, flat and one behind the other,

    ids.i32       token ids of all sequences           ends.i64      where each sequence ends
    trained.u8    1 on trained tokens (SFT)            order.i64     the items of an epoch, by number
    rows.jsonl    the row of each item (PPO)           row_ends.i64  where each row's line ends

An SFT item is one sequence, a pair two (chosen, rejected), a prompt one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.chat import IGNORE

SEQUENCES = {"sft": 1, "reward": 2, "ppo": 1}


class StoreWriter:
    """Appends items of one stage to a new folder; a `with` block closes its files."""

    def __init__(self, folder: Path, stage: str):
        folder.mkdir(parents=True)
        self.folder, self.stage = folder, stage
        self.items = self.tokens = self.trained_tokens = self.longest = 0
        self._row_bytes = 0
        self._order: list[np.ndarray] = []
        names = ["ids.i32", "ends.i64"]
        names += ["trained.u8"] if stage == "sft" else ["rows.jsonl", "row_ends.i64"] if stage == "ppo" else []
        self._files = {name: open(folder / name, "wb") for name in names}

    def add(self, items: Sequence[Item], copies: Sequence[int]) -> None:
        """Appends `items`; item i takes part `copies[i]` times in an epoch."""
        sequences = [sequence for item in items for sequence in item.sequences]
        if not sequences:
            return
        lengths = np.fromiter(map(len, sequences), dtype=np.int64, count=len(sequences))
        np.concatenate([np.asarray(one, dtype=np.int32) for one in sequences]).tofile(self._files["ids.i32"])
        (self.tokens + lengths.cumsum()).tofile(self._files["ends.i64"])
        self.tokens += int(lengths.sum())
        self.longest = max(self.longest, int(lengths.max()))
        if self.stage == "sft":
            trained = np.concatenate([np.asarray(item.trained, dtype=np.uint8) for item in items])
            trained.tofile(self._files["trained.u8"])
            self.trained_tokens += int(trained.sum())
        if self.stage == "ppo":
            lines = [json.dumps(item.row, ensure_ascii=False).encode() + b"\n" for item in items]
            ends = self._row_bytes + np.cumsum([len(line) for line in lines])
            self._row_bytes = int(ends[-1])
            self._files["rows.jsonl"].writelines(lines)
            ends.astype(np.int64).tofile(self._files["row_ends.i64"])
        self._order.append(np.repeat(np.arange(self.items, self.items + len(items)), copies))
        self.items += len(items)

    def statistics(self) -> dict[str, Any]:
        """Counts of what was written, and the hash of the token ids, for the report; after the `with` block."""
        with open(self.folder / "ids.i32", "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        counts = {"items": self.items, "tokens": self.tokens, "longest": self.longest, "ids_sha256": digest}
        return counts | ({"trained_tokens": self.trained_tokens} if self.stage == "sft" else {})

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            file.close()
        order = np.concatenate(self._order) if self._order else np.zeros(0)
        order.astype(np.int64).tofile(self.folder / "order.i64")


class Item:
    """What a stage learns from one row: its token sequences, which tokens are trained (SFT), the row (PPO)."""

    __slots__ = ("row", "sequences", "trained")

    def __init__(self, sequences: list[list[int]], trained: list[bool] | None = None, row: dict | None = None):
        self.sequences, self.trained, self.row = sequences, trained, row


def item_tensors(stage: str, sequences: Sequence[Any], trained: Any = None, row: dict | None = None) -> dict[str, Any]:
    """An item as a stage sees it: a dict of int64 tensors, and the row of a prompt."""
    ids = [torch.from_numpy(np.asarray(sequence).astype(np.int64)) for sequence in sequences]
    if stage == "reward":
        return {"chosen_ids": ids[0], "rejected_ids": ids[1]}
    if stage == "ppo":
        return {"prompt_ids": ids[0], "row": row}
    untrained = torch.from_numpy(~np.asarray(trained).astype(bool))
    return {"input_ids": ids[0], "labels": ids[0].masked_fill(untrained, IGNORE)}


class ItemSet(Sequence):
    """The items of one stage's part, a sequence of dicts of tensors (int64).

    sft: `input_ids`, `labels` [T];  reward: `chosen_ids`, `rejected_ids` [T];  ppo: `prompt_ids` [T], `row`.
    """

    def __init__(self, folder: Path, stage: str):
        self.folder, self.stage = Path(folder), stage
        self._maps: dict[str, np.ndarray] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "stage": self.stage, "_maps": {}}

    def _map(self, name: str) -> np.ndarray:
        if name not in self._maps:
            path = self.folder / name
            kind = {"i32": np.int32, "i64": np.int64, "u8": np.uint8, "jsonl": np.uint8}[name.rpartition(".")[2]]
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
        return item_tensors(self.stage, ids, trained, self._row(item) if self.stage == "ppo" else None)

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
