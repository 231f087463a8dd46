"""Batches: who gets which rows when, and rows of unequal length in one tensor.

Padding is known by the mask alone: ids under it are `pad_id`, labels `IGNORE`, and nothing looks at either.
B is the batch, T the longest row in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from data.chat import IGNORE
from data.splits import shuffled

Batch = dict[str, Tensor]


class BatchSampler:
    """Row numbers of one rank's batches, from one global order that depends on (seed, epoch) alone.

    Batch b of all ranks together is the b-th slice of the global order, whatever the number of ranks: 4 ranks
    of 2 rows and 1 rank of 8 see the same rows in the same step. All ranks have the same number of batches.

    Args:
        n: number of rows.
        batch_size: rows of one rank's batch.
        rank, world_size: of this process.
        seed: of the order.
        shuffle: False keeps the order 0..n-1.
        drop_last: leave out the rows that do not fill a global batch (others in every epoch). False deals
            them out as evenly as they go: the last batches are smaller and may be empty on some ranks.
        lengths: length of each row; with it rows of similar length share a batch, which saves padding.

    Raises:
        ValueError: with `drop_last`, fewer rows than one global batch.
    """

    def __init__(
        self,
        n: int,
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        lengths: Sequence[int] | None = None,
    ):
        self.n, self.batch_size, self.rank, self.world_size = n, batch_size, rank, world_size
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self.lengths = None if lengths is None else torch.as_tensor(lengths).numpy()
        self.global_size = batch_size * world_size
        if batch_size < 1 or not 0 <= rank < world_size:
            raise ValueError(
                f"batch_size {batch_size}, rank {rank} of {world_size}: need batch_size >= 1, 0 <= rank < ranks"
            )
        if self.lengths is not None and len(self.lengths) != n:
            raise ValueError(f"{len(self.lengths)} lengths for {n} rows: give one length a row")
        if drop_last and n < self.global_size:
            raise ValueError(
                f"{n} rows do not fill one batch of {batch_size} rows x {world_size} ranks = {self.global_size}: "
                "lower the batch size or give more data"
            )

    def __len__(self) -> int:
        """Batches of an epoch, the same on every rank."""
        return self.n // self.global_size if self.drop_last else -(-self.n // self.global_size)

    def order(self, epoch: int) -> list[int]:
        """The global order of all rows in `epoch`."""
        if not self.shuffle:
            return list(range(self.n))
        order = shuffled(self.n, self.seed, epoch)
        if self.lengths is None:
            return order.tolist()
        return self._grouped(order, epoch).tolist()

    def _grouped(self, order: Any, epoch: int) -> Any:
        """Sorts windows of 50 global batches by length, then deals the batches out in random order. The rows that
        fill no batch are set aside before, so that they are a random lot. The batch of the longest row comes first: if
        it does not fit into memory, one knows at once."""
        size, window = self.global_size, 50 * self.global_size
        whole = self.n // size
        for start in range(0, whole * size, window):
            part = order[start : min(start + window, whole * size)]
            order[start : start + len(part)] = part[self.lengths[part].argsort(kind="stable")[::-1]]
        batches = order[: whole * size].reshape(whole, size)
        batches = batches[shuffled(whole, self.seed, epoch, 1)]
        if whole:
            longest = int(self.lengths[batches].max(axis=1).argmax())
            batches[[0, longest]] = batches[[longest, 0]]
        order[: whole * size] = batches.reshape(-1)
        return order

    def iter(self, epoch: int = 0, start_batch: int = 0) -> Iterator[list[int]]:
        """This rank's lists of row numbers in `epoch`, from its batch number `start_batch` on."""
        order = self.order(epoch)
        for number in range(start_batch, len(self)):
            rows = order[number * self.global_size : (number + 1) * self.global_size]
            if len(rows) == self.global_size:
                yield rows[self.rank * self.batch_size : (self.rank + 1) * self.batch_size]
            else:
                bounds = [len(rows) * place // self.world_size for place in (self.rank, self.rank + 1)]
                yield rows[bounds[0] : bounds[1]]


def collate_sft(items: Sequence[Batch], pad_id: int | None, pad_to_multiple_of: int = 1) -> Batch:
    """Items with `input_ids`, `labels` [T] to a right-padded batch: input_ids, attention_mask, labels [B, T]."""
    batch = _pad([item["input_ids"] for item in items], pad_id, pad_to_multiple_of)
    labels = torch.full_like(batch["input_ids"], IGNORE)
    for row, item in zip(labels, items, strict=True):
        row[: len(item["labels"])] = item["labels"]
    return {**batch, "labels": labels}


def collate_pairs(items: Sequence[Batch], pad_id: int | None, pad_to_multiple_of: int = 1) -> Batch:
    """Items with `chosen_ids`, `rejected_ids` [T] to one right-padded batch [2B, T]: all chosen, then all rejected."""
    rows = [item["chosen_ids"] for item in items] + [item["rejected_ids"] for item in items]
    return _pad(rows, pad_id, pad_to_multiple_of)


def collate_answers(items: Sequence[Batch], pad_id: int | None, pad_to_multiple_of: int = 1) -> Batch:
    """Reward items, P pairs and S single answers in any order, to one right-padded batch of 2P + S rows.

    The rows are all chosen answers, all rejected ones, then the single ones, each kind in the order of the items.

    Returns:
        input_ids, attention_mask `[2P + S, T]`; response_mask `[2P + S, T]`, True on the answers with their end
        tokens; margins `[P]`; targets `[S]` and is_label `[S]` (else a score); sources `[P + S]`, pairs first.
    """
    pairs = [item for item in items if item["kind"] == "pair"]
    singles = [item for item in items if item["kind"] != "pair"]
    rows = [(item["chosen_ids"], item["chosen_start"]) for item in pairs]
    rows += [(item["rejected_ids"], item["rejected_start"]) for item in pairs]
    rows += [(item["answer_ids"], item["answer_start"]) for item in singles]
    batch = _pad([ids for ids, _ in rows], pad_id, pad_to_multiple_of)
    starts = torch.tensor([start for _, start in rows])
    behind = torch.arange(batch["input_ids"].shape[1]) >= starts.unsqueeze(1)
    return {
        **batch,
        "response_mask": batch["attention_mask"] & behind,
        "margins": torch.tensor([item["margin"] for item in pairs], dtype=torch.float32),
        "targets": torch.tensor([item["target"] for item in singles], dtype=torch.float32),
        "is_label": torch.tensor([item["kind"] == "label" for item in singles], dtype=torch.bool),
        "sources": torch.tensor([item["source"] for item in [*pairs, *singles]]),
    }


def collate_prompts(items: Sequence[Batch], pad_id: int | None, pad_to_multiple_of: int = 1) -> Batch:
    """Items with `prompt_ids` [T] to a LEFT-padded batch, ready for generation: input_ids, attention_mask [B, T]."""
    return _pad([item["prompt_ids"] for item in items], pad_id, pad_to_multiple_of, left=True)


def _pad(rows: Sequence[Tensor], pad_id: int | None, multiple: int, left: bool = False) -> Batch:
    if not rows:
        raise ValueError("no rows to make a batch of: skip empty batches, or run a dummy row where all ranks must run")
    longest = -(-max(len(row) for row in rows) // multiple) * multiple
    ids = torch.full((len(rows), longest), 0 if pad_id is None else pad_id, dtype=torch.long)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for number, row in enumerate(rows):
        place = slice(longest - len(row), longest) if left else slice(0, len(row))
        ids[number, place] = row
        mask[number, place] = True
    return {"input_ids": ids, "attention_mask": mask}
