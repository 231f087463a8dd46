"""A reward model's figures against hand means on crafted batches, in one process and over ranks."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf.reward_metrics import Judged, RewardEvaluation, RewardMeter
from tests.helpers import run_ranks


def judged(loss, pairs, singles, sources, tokens=10):
    """`pairs`: (chosen, rejected); `singles`: (score, target, is it a label)."""
    return Judged(
        loss=loss,
        chosen=torch.tensor([pair[0] for pair in pairs], dtype=torch.float32),
        rejected=torch.tensor([pair[1] for pair in pairs], dtype=torch.float32),
        single=torch.tensor([one[0] for one in singles], dtype=torch.float32),
        targets=torch.tensor([one[1] for one in singles], dtype=torch.float32),
        is_label=torch.tensor([one[2] for one in singles], dtype=torch.bool),
        sources=torch.tensor(sources),
        tokens=tokens,
    )


FIRST = judged(0.5, [(2.0, 1.0), (0.5, 0.5)], [(1.5, 1.0, True), (3.0, 2.0, False)], [0, 1, 0, 2])
SECOND = judged(2.0, [], [(0.2, 0.0, True), (-1.0, 0.0, True), (1.0, 1.5, False)], [0, 1, 2], tokens=5)


def check(means):
    # a tie is not right: 1 of 2 pairs, 2 of 3 labels
    assert means["loss"] == pytest.approx((0.5 * 4 + 2.0 * 3) / 7)
    assert means["accuracy"] == pytest.approx(3 / 5)
    assert means["chosen_score"] == pytest.approx((2.0 + 0.5 + 1.5) / 3)
    assert means["rejected_score"] == pytest.approx((1.0 + 0.5 + 0.2 - 1.0) / 4)
    assert means["tokens"] == 15


def test_means_of_a_step():
    meter = RewardMeter()
    meter.add(FIRST)
    meter.add(SECOND)
    check(meter.reduce())
    assert RewardMeter().reduce()["accuracy"] is None


def check_evaluation(found):
    check(found)
    assert (found["pairs"], found["labels"], found["scores"]) == (2, 3, 2)
    assert found["accuracy_by_source"] == pytest.approx({"a": 2 / 3, "b": 1 / 2})
    # good 2, 0.5, 1.5 against bad 1, 0.5, 0.2, -1
    assert found["auc"] == pytest.approx((4 + 2.5 + 4) / 12)
    assert found["auc_low"] < found["auc"] < found["auc_high"]
    assert found["accuracy_low"] < 0.6 < found["accuracy_high"]
    assert found["score_error"] == pytest.approx(math.sqrt((1 + 0.25) / 2))
    assert found["score_correlation"] == pytest.approx(1.0)
    sure = [1 / (1 + math.exp(-gap)) for gap in (0.0, 0.2, 1.0, 1.5, 1.0)]
    assert sum(row[2] for row in found["calibration"]) == 5
    assert sum(row[0] * row[2] for row in found["calibration"]) == pytest.approx(sum(sure), abs=1e-6)


def test_an_evaluation():
    evaluation = RewardEvaluation()
    evaluation.add(FIRST)
    evaluation.add(SECOND)
    check_evaluation(evaluation.result(["a", "b", "c"]))


def on_a_rank(rank, world):
    evaluation = RewardEvaluation()
    evaluation.add((FIRST, SECOND)[rank])
    return evaluation.result(["a", "b", "c"])


def test_an_evaluation_over_ranks():
    left, right = run_ranks(on_a_rank, 2)
    check_evaluation(left)
    assert left == right
