"""AUC, intervals and calibration against definitions written out, literals, and simulated samples."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from rlhf.ranking import auc, auc_interval, calibration, share_interval


def test_auc_counts_pairs_with_ties_as_halves():
    draw = np.random.default_rng(3)
    good, bad = draw.integers(0, 6, 23), draw.integers(-1, 5, 31)
    wins = sum(1.0 if g > b else 0.5 if g == b else 0.0 for g, b in itertools.product(good, bad))
    assert auc(good, bad) == pytest.approx(wins / (23 * 31), abs=1e-12)
    assert auc(np.array([2.0]), np.array([1.0])) == 1.0
    assert auc(np.array([1.0]), np.array([])) is None and auc(np.array([]), np.array([1.0])) is None


def test_interval_of_a_share_is_wilsons():
    # the closed form of Wilson's interval
    right, count, z = 17, 20, 1.959963984540054
    middle = (right / count + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(right / count * 3 / 20 / count + z * z / (4 * count * count))
    assert share_interval(right, count) == pytest.approx((middle - half, middle + half), abs=1e-9)
    low, high = share_interval(10, 10)
    assert (low, high) == (pytest.approx(0.7224672, abs=1e-6), 1.0)


def test_interval_of_an_auc_holds_its_truth():
    """Normal scores 1 apart: the true AUC is Phi(1 / sqrt 2)."""
    truth = 0.5 * (1 + math.erf(0.5))
    draw = np.random.default_rng(0)
    inside, widths = 0, []
    for _ in range(400):
        good, bad = draw.normal(1, 1, 40), draw.normal(0, 1, 25)
        low, high = auc_interval(auc(good, bad), 40, 25)
        inside += low <= truth <= high
        widths.append(high - low)
    assert 0.92 <= inside / 400 <= 0.985
    assert 0.18 < np.mean(widths) < 0.28


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_interval_of_an_extreme_auc(value):
    low, high = auc_interval(value, 12, 8)
    assert 0 <= low <= value <= high <= 1 and 0.1 < high - low < 0.6


def test_calibration_by_hand():
    confidences = np.array([0.5, 0.54, 0.93, 0.94, 1.0])
    right = np.array([True, False, True, True, False])
    error, table = calibration(confidences, right)
    assert table == [pytest.approx([0.52, 0.5, 2]), pytest.approx([0.935, 1.0, 2]), pytest.approx([1.0, 0.0, 1])]
    assert error == pytest.approx((0.02 * 2 + 0.065 * 2 + 1.0) / 5)
