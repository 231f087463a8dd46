"""Packed rows: nothing lost, nothing too long, and masks that keep dialogues apart."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.packing import collate_packs, own_dialogue_mask, plan_packs


@given(st.lists(st.integers(1, 20), max_size=60), st.integers(20, 50))
def test_packs_hold_every_item_once_and_fit(lengths, capacity):
    packs = plan_packs(lengths, capacity)
    assert sorted(item for pack in packs for item in pack) == list(range(len(lengths)))
    sums = [sum(lengths[item] for item in pack) for pack in packs]
    assert all(total <= capacity for total in sums)
    assert sum(2 * total <= capacity for total in sums) <= 1, "two packs that fit into one"


def test_packing_wastes_little():
    lengths = torch.randint(5, 100, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    assert sum(lengths) / (len(plan_packs(lengths, 512)) * 512) > 0.95


def test_too_long_item_is_named():
    with pytest.raises(ValueError, match="item 1 has 30 tokens and fits into no pack of 20"):
        plan_packs([5, 30], 20)


def item(*ids):
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)}


def test_collate_packs():
    first = item(5, 6, 7)
    batch = collate_packs([[first, item(8, 9)], [item(4)]], pad_id=9, pad_to_multiple_of=3)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 9], [4, 9, 9, 9, 9, 9]]
    assert batch["labels"].tolist() == [[-100, 6, 7, -100, 9, -100], [-100] * 6]
    assert batch["attention_mask"].long().tolist() == [[1, 1, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0], [0] * 6]
    assert batch["dialogue_ids"].tolist() == [[1, 1, 1, 2, 2, 0], [1, 0, 0, 0, 0, 0]]
    assert first["labels"].tolist() == [5, 6, 7], "an item serves the next epoch too"


def test_own_dialogue_mask():
    mask = own_dialogue_mask(torch.tensor([[1, 1, 2, 2, 0, 0]]))
    assert mask.shape == (1, 1, 6, 6)
    assert mask[0, 0].long().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]
