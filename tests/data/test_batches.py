"""Batches: every row once an epoch on any number of ranks, and padding that only the mask knows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data import BatchSampler, collate_pairs, collate_prompts, collate_sft


def samplers(n, batch_size, world_size, **options):
    return [BatchSampler(n, batch_size, rank=rank, world_size=world_size, **options) for rank in range(world_size)]


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_every_row_once_an_epoch(n, batch_size, world_size, shuffle):
    ranks = samplers(n, batch_size, world_size, seed=3, shuffle=shuffle, drop_last=False)
    lists = [list(sampler.iter(epoch=1)) for sampler in ranks]
    assert sorted(row for batches in lists for rows in batches for row in rows) == list(range(n))
    assert {len(batches) for batches in lists} == {len(ranks[0])}
    assert all(len(rows) <= batch_size for batches in lists for rows in batches)
    for step in zip(*lists, strict=True):
        sizes = [len(rows) for rows in step]
        assert max(sizes) - min(sizes) <= 1


@given(st.integers(8, 60), st.integers(0, 5))
def test_global_batches_do_not_depend_on_the_number_of_ranks(n, epoch):
    def steps(batch_size, world_size):
        lists = [list(s.iter(epoch)) for s in samplers(n, batch_size, world_size, seed=5)]
        return [sorted(row for rows in step for row in rows) for step in zip(*lists, strict=True)]

    assert steps(8, 1) == steps(4, 2) == steps(2, 4)
    assert len(steps(8, 1)) == n // 8


def test_order_depends_on_seed_and_epoch_alone():
    one, again, other = (BatchSampler(20, 4, seed=seed) for seed in (1, 1, 2))
    assert one.order(0) == again.order(0) != one.order(1)
    assert one.order(0) != other.order(0)
    assert list(one.iter(2)) == list(one.iter(2))


def test_resume_goes_on_where_it_stopped():
    sampler = BatchSampler(50, 4, rank=1, world_size=2, seed=9)
    assert list(sampler.iter(3, start_batch=2)) == list(sampler.iter(3))[2:]
    assert list(sampler.iter(3, start_batch=len(sampler))) == []


def test_grouped_by_length_saves_padding_and_keeps_every_row():
    lengths = [int(n) for n in torch.randint(1, 100, (400,), generator=torch.Generator().manual_seed(0))]

    def padding(sampler):
        return sum(
            max(lengths[i] for i in rows) * len(rows) - sum(lengths[i] for i in rows) for rows in sampler.iter(0)
        )

    grouped = BatchSampler(400, 8, seed=1, lengths=lengths)
    assert padding(grouped) < 0.2 * padding(BatchSampler(400, 8, seed=1))
    assert sorted(row for rows in grouped.iter(0) for row in rows) == list(range(400))
    assert grouped.order(0) != grouped.order(1)
    for epoch in range(3):
        assert max(lengths) in [lengths[i] for i in next(grouped.iter(epoch))], "the longest first"
    with pytest.raises(ValueError, match="2 lengths for 400 rows"):
        BatchSampler(400, 8, lengths=[1, 2])


def test_rows_that_fill_no_grouped_batch_are_a_random_lot():
    lengths = list(range(1, 104))
    left = []
    for seed in (1, 2):
        given = sum(BatchSampler(103, 10, seed=seed, lengths=lengths).iter(0), [])
        left.append(sorted(set(range(103)) - set(given)))
    assert [len(rows) for rows in left] == [3, 3] and left[0] != left[1]
    assert max(max(rows) for rows in left) > 20, "not the shortest ones"
    kept = BatchSampler(103, 10, seed=1, lengths=lengths, drop_last=False)
    assert sorted(sum(kept.iter(0), [])) == list(range(103))
    few = BatchSampler(3, 10, seed=1, lengths=[1, 2, 3], drop_last=False)
    assert sorted(sum(few.iter(0), [])) == [0, 1, 2]


def test_too_few_rows_for_one_batch_is_an_error():
    with pytest.raises(ValueError, match="7 rows do not fill one batch of 4 rows x 2 ranks = 8"):
        BatchSampler(7, 4, world_size=2)
    assert [list(s.iter()) for s in samplers(1, 4, 2, shuffle=False, drop_last=False)] == [[[]], [[0]]]


def ids(*values):
    return torch.tensor(values)


def test_collate_sft():
    items = [
        {"input_ids": ids(5, 6, 7), "labels": ids(-100, 6, 7)},
        {"input_ids": ids(8), "labels": ids(8)},
    ]
    batch = collate_sft(items, pad_id=7)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 7, 7]]
    assert batch["attention_mask"].tolist() == [[True, True, True], [True, False, False]]
    assert batch["attention_mask"].dtype == torch.bool
    assert batch["labels"].tolist() == [[-100, 6, 7], [8, -100, -100]]
    assert collate_sft(items, pad_id=None)["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert collate_sft(items, 7, pad_to_multiple_of=4)["labels"].tolist() == [[-100, 6, 7, -100], [8] + [-100] * 3]


def test_collate_pairs_puts_all_chosen_first():
    items = [{"chosen_ids": ids(1), "rejected_ids": ids(2, 2)}, {"chosen_ids": ids(3, 3, 3), "rejected_ids": ids(4)}]
    batch = collate_pairs(items, pad_id=0)
    assert batch["input_ids"].tolist() == [[1, 0, 0], [3, 3, 3], [2, 2, 0], [4, 0, 0]]
    assert batch["attention_mask"].sum(1).tolist() == [1, 3, 2, 1]


def test_collate_prompts_pads_left():
    batch = collate_prompts([{"prompt_ids": ids(1, 2)}, {"prompt_ids": ids(3)}], pad_id=9, pad_to_multiple_of=3)
    assert batch["input_ids"].tolist() == [[9, 1, 2], [9, 9, 3]]
    assert batch["attention_mask"].tolist() == [[False, True, True], [False, False, True]]


def test_no_rows_is_an_error():
    with pytest.raises(ValueError, match="no rows to make a batch of"):
        collate_prompts([], 0)
