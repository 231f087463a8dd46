"""Packed rows: nothing lost, nothing too long, and each dialogue's loss as if it were alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from data.packing import pack_items, plan_packs


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


def test_dialogues_do_not_see_each_other():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).eval()
    items = []
    for length in (7, 3, 5):
        ids = torch.randint(50, (length,))
        items.append({"input_ids": ids, "labels": ids.clone()})
    packed = pack_items(items)
    assert packed["position_ids"][0].tolist() == [*range(7), *range(3), *range(5)]
    assert packed["labels"][0][[0, 7, 10]].tolist() == [-100] * 3
    logits = model(input_ids=packed["input_ids"], position_ids=packed["position_ids"], use_cache=False).logits[0]
    alone = torch.cat([model(input_ids=item["input_ids"][None]).logits[0] for item in items])
    torch.testing.assert_close(logits, alone, atol=1e-5, rtol=1e-5)
