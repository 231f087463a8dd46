"""Several short SFT items in one long row, so that no compute goes into padding.

A packed row holds dialogues one behind the other, each with positions from 0 on; its first token has no label, since
nothing of its own stands before it. `own_dialogue_mask` keeps attention within a dialogue, so that the losses are
those of the dialogues by themselves.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import torch
from torch import Tensor

from data.batches import collate_sft
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


def collate_packs(
    packs: Sequence[Sequence[dict[str, Tensor]]], pad_id: int | None, pad_to_multiple_of: int = 1
) -> dict[str, Tensor]:
    """Packs of SFT items to a right-padded batch, one row a pack.

    Returns:
        input_ids, labels, attention_mask as of `data.collate_sft`; position_ids, from 0 on in each dialogue;
        dialogue_ids, which count a row's dialogues from 1, 0 on padding. All `[B, T]`.
    """
    batch = collate_sft([_joined(pack) for pack in packs], pad_id, pad_to_multiple_of)
    positions = torch.zeros_like(batch["input_ids"])
    dialogues = torch.zeros_like(batch["input_ids"])
    for row, pack in enumerate(packs):
        start = 0
        for number, item in enumerate(pack, 1):
            end = start + len(item["input_ids"])
            positions[row, start:end] = torch.arange(end - start)
            dialogues[row, start:end] = number
            start = end
    return {**batch, "position_ids": positions, "dialogue_ids": dialogues}


def _joined(pack: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    labels = [item["labels"].clone() for item in pack]
    for one in labels:
        one[0] = IGNORE
    return {"input_ids": torch.cat([item["input_ids"] for item in pack]), "labels": torch.cat(labels)}


def own_dialogue_mask(dialogue_ids: Tensor) -> Tensor:
    """`[B, T] -> [B, 1, T, T]` bool: True where a query (third axis) may see a key (last axis), which is of its own
    dialogue and not behind it. Padding sees padding, so that no row of attention is empty."""
    length = dialogue_ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=dialogue_ids.device).tril()
    return ((dialogue_ids.unsqueeze(2) == dialogue_ids.unsqueeze(1)) & causal).unsqueeze(1)
