"""Several short SFT items in one long row, so that no compute goes into padding.

A packed row is a row of dialogues, each with positions from 0 on; its first token has no label, since nothing of
its own stands before it. Transformers' attention keeps them apart when it is given those positions and no
attention mask: tokens see their own dialogue alone, and the losses are those of the dialogues by themselves.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import torch
from torch import Tensor

from data.chat import IGNORE


def plan_packs(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Item numbers of each pack: the longest first, each into the fullest pack it still fits (best-fit decreasing).

    Args:
        lengths: tokens of each item.
        capacity: most tokens of a pack.

    Raises:
        ValueError: an item longer than a pack.
    """
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, pack), ascending
    for item in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        length = int(lengths[item])
        if length > capacity:
            raise ValueError(f"item {item} has {length} tokens and fits into no pack of {capacity}: raise the capacity")
        place = bisect.bisect_left(rooms, (length, -1))
        if place == len(rooms):
            room, pack = capacity, len(packs)
            packs.append([])
        else:
            room, pack = rooms.pop(place)
        packs[pack].append(item)
        if room > length:
            bisect.insort(rooms, (room - length, pack))
    return packs


def pack_items(items: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """SFT items as one row: input_ids, labels, position_ids [1, T], with T the sum of their lengths."""
    labels = [item["labels"].clone() for item in items]
    for one in labels:
        one[0] = IGNORE
    rows = {
        "input_ids": torch.cat([item["input_ids"] for item in items]),
        "labels": torch.cat(labels),
        "position_ids": torch.cat([torch.arange(len(one)) for one in labels]),
    }
    return {name: row[None] for name, row in rows.items()}
