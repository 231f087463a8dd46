"""Cutting: every row once, in the order and sizes that are promised, as many micro-batches on every rank."""

from __future__ import annotations

import pytest
import torch

from rlhf.experience import Experience, response_mask_from
from rlhf.micro_batches import Cut, update_parts
from tests.helpers import run_ranks

PROMPTS = [4, 1, 3, 2, 4, 1, 2]
ANSWERS = [2, 5, 1, 1, 3, 5, 2]


def experience(prompts=PROMPTS, answers=ANSWERS, width: int = 4, length: int = 5) -> Experience:
    prompts, answers = torch.tensor(prompts), torch.tensor(answers)
    mask = torch.cat([torch.arange(width) >= width - prompts[:, None], response_mask_from(answers, length)], 1)
    return Experience(
        input_ids=torch.arange(len(prompts)).repeat(width + length, 1).T,  # a row's number everywhere in it
        attention_mask=mask,
        response_mask=mask[:, width:],
    )


def rows_of(batch: Experience) -> list[int]:
    return batch.input_ids[:, 0].tolist()


def dealt(cut: Cut, window: int = 1, epochs: int = 1, seed: int = 3, **shape):
    generator = torch.Generator().manual_seed(seed)
    return list(update_parts(experience(**shape), cut, epochs=epochs, window=window, generator=generator))


def test_every_epoch_has_every_row_once_in_an_order_of_its_own():
    parts = dealt(Cut(2), epochs=2)
    assert [len(batch) for batch, *_ in parts] == [2, 2, 2, 1] * 2
    assert {part.is_last for part in parts} == {None}
    order = [row for batch, *_ in parts for row in rows_of(batch)]
    assert sorted(order[:7]) == sorted(order[7:]) == list(range(7)) and order[:7] != order[7:]
    assert order[:7] == torch.randperm(7, generator=torch.Generator().manual_seed(3)).tolist()


def test_an_update_holds_the_same_rows_however_it_is_cut_sorted_by_length():
    one = [rows_of(batch) for batch, *_ in dealt(Cut(4))]
    cut = [rows_of(batch) for batch, *_ in dealt(Cut(2), window=2)]
    budget = [rows_of(batch) for batch, *_ in dealt(Cut(4, max_tokens=14))]
    lengths = [p + a for p, a in zip(PROMPTS, ANSWERS, strict=True)]
    assert [len(rows) for rows in cut] == [2, 2, 2, 1]
    together = [cut[0] + cut[1], cut[2] + cut[3]]
    for update, parts in zip(one, together, strict=True):
        assert sorted(update) == sorted(parts)
        assert [lengths[row] for row in parts] == sorted(lengths[row] for row in parts)
    flat = [row for part in budget for row in part]
    assert sorted(flat[:4]) == sorted(one[0]) and sorted(flat[4:]) == sorted(one[1])
    for part in dealt(Cut(2), window=2):
        update = sorted(rows_of(part.update))
        assert set(rows_of(part.batch)) < set(update) and update in (sorted(one[0]), sorted(one[1]))


def test_updates_that_reach_over_the_end_are_dealt_as_they_come():
    """3 micro-batches of 2 in windows of 2: rows sorted within an update would not be a fair mix."""
    shape = {"prompts": [1, 2, 3, 4, 4, 4], "answers": [1, 1, 1, 1, 2, 3]}
    order = torch.randperm(6, generator=torch.Generator().manual_seed(7)).tolist()
    assert order != sorted(order)
    assert all(part.update is None for part in dealt(Cut(2), 2, seed=7, **shape))
    for window, expected in ((3, [0, 1, 2, 3, 4, 5]), (2, order), (1, order)):
        assert [row for batch, *_ in dealt(Cut(2), window, seed=7, **shape) for row in rows_of(batch)] == expected


@pytest.mark.parametrize("budget", [9, 14, 20, 63])
def test_a_budget_counts_padding_and_is_never_passed(budget):
    parts = dealt(Cut(7, max_tokens=budget), epochs=2)
    assert all(batch.input_ids.numel() <= budget for batch, *_ in parts)
    assert sorted(row for batch, *_ in parts for row in rows_of(batch)) == sorted([*range(7)] * 2)
    lasts = [part.is_last for part in parts]
    assert sum(lasts) == 2 and lasts[-1] and (len(parts) == 2) == (budget == 63)


def test_a_row_beyond_the_budget_is_refused():
    with pytest.raises(ValueError, match="7 tokens, more than --max_tokens_per_micro_batch 6"):
        Cut(2, max_tokens=6).sorted_parts(experience())


def uneven(rank, world):
    """The second rank's rows are longer: it alone needs four parts."""
    mine = experience([4] * 4, [1, 1, 1, 1] if rank == 0 else [4, 4, 5, 5])
    parts = Cut(4, max_tokens=10).sorted_parts(mine)
    return [part.tolist() for part in parts]


def test_ranks_make_as_many_micro_batches():
    short, long = run_ranks(uneven, 2)
    assert len(short) == len(long) == 4
    assert sorted(row for part in short for row in part) == [0, 1, 2, 3] and all(short)
