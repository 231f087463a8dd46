"""Which rows go where: to the three stages, to training or evaluation, once or several times.

All of it is a function of the number of rows and the seed, never of what is in the rows, so that every stage
deals the same rows in the same way and no row is ever in two stages. Rows that are equal are different rows here; see
`data.duplicates`.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

Ratios = str | Sequence[float | int | str]


def parse_ratios(ratios: Ratios) -> list[Fraction]:
    """Shares of the three stages, from "2,4,4" or three numbers; they need not sum to anything.

    Raises:
        ValueError: not three numbers of at least 0, or all of them 0.
    """
    parts = ratios.split(",") if isinstance(ratios, str) else list(ratios)
    try:
        shares = [Fraction(str(part).strip()) for part in parts]
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"data_split {ratios!r} is not three numbers: write it like 2,4,4") from error
    if len(shares) != 3 or min(shares) < 0 or sum(shares) == 0:
        raise ValueError(f"data_split {ratios!r} must be three shares of at least 0, not all 0, like 2,4,4")
    return shares


def split_bounds(n: int, ratios: Ratios) -> list[int]:
    """Four bounds of the three parts of `n` rows: 0, round(n a), round(n (a + b)), n; halves go up.

    Rounding the cumulative shares keeps every part within one row of its share, and the parts add up to n.
    """
    shares = parse_ratios(ratios)
    total, passed, bounds = sum(shares), Fraction(0), [0]
    for share in shares:
        passed += share
        bounds.append(int((n * passed / total + Fraction(1, 2)) // 1))
    return bounds


def shuffled(n: int, *seed: int) -> np.ndarray:
    """The numbers below `n` in an order that depends on `seed` alone, int64. The generator's stream is frozen."""
    return np.random.RandomState([part % 2**32 for part in seed]).permutation(n)


def split_rows(n: int, ratios: Ratios, seed: int) -> list[list[int]]:
    """Three disjoint lists of row numbers that together are all of `range(n)`, each in shuffled order.

    Args:
        n: number of rows.
        ratios: shares of SFT, reward and PPO, "2,4,4" or numbers.
        seed: the same seed deals the same rows.
    """
    order = shuffled(n, seed)
    bounds = split_bounds(n, ratios)
    return [order[start:end].tolist() for start, end in zip(bounds, bounds[1:], strict=False)]


def hold_out(rows: Sequence[int], fraction: float) -> tuple[list[int], list[int]]:
    """(train, eval): the last `fraction` of the dealt `rows`, at least one of two or more rows, is held out.

    Raises:
        ValueError: a fraction outside [0, 1).
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"eval_fraction {fraction} must be at least 0 and below 1")
    count = int(len(rows) * Fraction(str(fraction)) + Fraction(1, 2))
    if fraction > 0 and len(rows) > 1:
        count = min(max(count, 1), len(rows) - 1)
    cut = len(rows) - count
    return list(rows[:cut]), list(rows[cut:])


def repeats(n: int, weight: float, *seed: int) -> np.ndarray:
    """How often each of `n` rows is used under `weight`: all of them floor(weight) times, and a shuffled
    fraction of them once more, so that round(n weight) rows are used in all. int64 [n].
    """
    whole = int(weight // 1)
    extra = int(n * (weight - whole) + 0.5)
    counts = np.full(n, whole, dtype=np.int64)
    counts[shuffled(n, *seed)[:extra]] += 1
    return counts
