"""Deals of rows: disjoint, covering, of the right sizes, the same for the same seed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import split_rows
from data.splits import hold_out, repeats, split_bounds


@pytest.mark.parametrize(
    ("n", "ratios", "bounds"),
    [
        (10, "2,4,4", [0, 2, 6, 10]),
        (6, "2,4,4", [0, 1, 4, 6]),  # 1.2 and 3.6
        (4, "2,4,4", [0, 1, 2, 4]),  # 0.8 and 2.4
        (5, "1,1,2", [0, 1, 3, 5]),  # 1.25 and 2.5: halves go up
        (7, "1,0,0", [0, 7, 7, 7]),
        (3, "0.1,0.1,0.8", [0, 0, 1, 3]),  # 0.3 and 0.6, exactly, not in binary
        (0, "2,4,4", [0, 0, 0, 0]),
        (10, [2, 4, 4], [0, 2, 6, 10]),
        (10, (0.2, 0.4, 0.4), [0, 2, 6, 10]),
    ],
)
def test_bounds_by_cumulative_rounding(n, ratios, bounds):
    assert split_bounds(n, ratios) == bounds
    assert [len(part) for part in split_rows(n, ratios, 0)] == [b - a for a, b in zip(bounds, bounds[1:], strict=False)]


@given(st.integers(0, 300), st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any), st.integers(0, 2**40))
def test_parts_are_disjoint_and_cover(n, ratios, seed):
    parts = split_rows(n, ratios, seed)
    assert sorted(row for part in parts for row in part) == list(range(n))
    assert all(abs(len(part) - n * share / sum(ratios)) < 1 for part, share in zip(parts, ratios, strict=True))
    assert parts == split_rows(n, ratios, seed)


def test_seed_decides():
    assert split_rows(100, "2,4,4", 1) != split_rows(100, "2,4,4", 2)


@pytest.mark.parametrize("ratios", ["1,2", "a,b,c", "0,0,0", "1,-1,1", "", "1,2,3,4"])
def test_bad_ratios(ratios):
    with pytest.raises(ValueError, match="data_split"):
        split_rows(10, ratios, 0)


@pytest.mark.parametrize(("n", "fraction", "held"), [(100, 0.1, 10), (2, 0.1, 1), (1, 0.1, 0), (10, 0, 0), (3, 0.9, 2)])
def test_hold_out(n, fraction, held):
    train, evaluation = hold_out(range(n), fraction)
    assert len(evaluation) == held
    assert train + evaluation == list(range(n))


def test_hold_out_fraction_is_checked():
    with pytest.raises(ValueError, match="eval_fraction 1.5"):
        hold_out([1], 1.5)


@pytest.mark.parametrize(("weight", "total"), [(1, 10), (0.5, 5), (2.0, 20), (1.25, 13), (0, 0)])
def test_repeats(weight, total):
    counts = repeats(10, weight, 3, 0)
    assert counts.sum() == total
    assert counts.max() - counts.min() <= 1
