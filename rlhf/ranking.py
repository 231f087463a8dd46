"""How well scores tell good answers from bad ones: AUC and accuracy with their intervals, and calibration.

Plain functions of arrays, in float64; what is not defined (an AUC without bad answers) is None.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

Interval = tuple[float, float]
Z95 = 1.959963984540054  # the normal distribution's 97.5% quantile


def auc(good: np.ndarray, bad: np.ndarray) -> float | None:
    """The share of (good, bad) pairs in which the good answer has the higher score; a tie is half a pair.

    Args:
        good, bad: scores `[M]` and `[N]`.
    """
    if not len(good) or not len(bad):
        return None
    ordered = np.sort(np.asarray(bad, dtype=np.float64))
    below = np.searchsorted(ordered, good, side="left")
    not_above = np.searchsorted(ordered, good, side="right")
    return float((below + not_above).sum() / 2 / (len(good) * len(bad)))


def auc_interval(value: float, goods: int, bads: int) -> Interval:
    """The 95% interval of an AUC of `goods` good and `bads` bad answers, each taken as independent.

    The AUCs from which `value` lies no farther than 1.96 standard errors, with the variance of Hanley and McNeil
    (1982) at each of them, both sample sizes in its two middle terms replaced by their mean (Newcombe 2006,
    method 5). So the interval lies within 0 to 1 and is not empty at an AUC of 1.
    """
    middle = (goods + bads) / 2 - 1

    def error(theta: float) -> float:
        spread = 1 + middle * ((1 - theta) / (2 - theta) + theta / (1 + theta))
        return math.sqrt(theta * (1 - theta) * spread / (goods * bads))

    return _inverted(value, error)


def share_interval(right: int, count: int) -> Interval:
    """The 95% interval of a share, `right` of `count`: Wilson's."""
    return _inverted(right / count, lambda share: math.sqrt(share * (1 - share) / count))


def _inverted(value: float, error: Callable[[float], float]) -> Interval:
    """The least and the greatest parameter that `value` does not contradict, by bisection."""

    def bound(end: float) -> float:
        inside, outside = value, end
        for _ in range(60):
            middle = (inside + outside) / 2
            if abs(middle - value) <= Z95 * error(middle):
                inside = middle
            else:
                outside = middle
        return inside

    return bound(0.0), bound(1.0)


def calibration(confidences: np.ndarray, right: np.ndarray, bins: int = 10) -> tuple[float, list[list[float]]]:
    """Expected calibration error, and the reliability of each bin.

    Args:
        confidences: `[N]`, the probability the model gives to its own verdict, 0.5 to 1.
        right: `[N]` bool, whether the verdict was right.
        bins: of equal width between 0.5 and 1.

    Returns:
        The mean over all verdicts of |mean confidence - share right| in its bin, and for each bin that is not
        empty [mean confidence, share right, count].
    """
    places = np.clip(((confidences - 0.5) * 2 * bins).astype(int), 0, bins - 1)
    table = []
    for place in range(bins):
        inside = places == place
        if inside.any():
            table.append([float(confidences[inside].mean()), float(right[inside].mean()), int(inside.sum())])
    count = sum(row[2] for row in table)
    return sum(abs(row[0] - row[1]) * row[2] for row in table) / max(count, 1), table
