"""Scores brought to mean 0 and standard deviation 1 on the first actor's own answers, once.

A reward model's scale is arbitrary: the pair loss fixes no origin and no unit. Fixing both on what the
starting policy says makes one KL coefficient and one clip range mean the same for every reward model.
"""

from __future__ import annotations

import torch

from engine.distributed import all_reduce_sums

MIN_STD = 1e-4


class ScoreScale:
    """`apply` is the identity until `fit` has been called, and the same affine map ever after."""

    def __init__(self) -> None:
        self.mean, self.std, self.is_set = 0.0, 1.0, False

    def fit(self, scores: torch.Tensor) -> None:
        """Take mean and population standard deviation over `scores` `[B]` of all ranks.

        Scores that are all alike keep a standard deviation of 1: dividing by (nearly) nothing would blow
        rounding up to rewards.
        """
        scores = scores.double()
        total, count = all_reduce_sums([float(scores.sum()), len(scores)])
        self.mean = total / count
        squares = all_reduce_sums([float((scores - self.mean).square().sum())])[0]
        std = (squares / count) ** 0.5
        self.std = std if std > MIN_STD else 1.0
        self.is_set = True

    def apply(self, scores: torch.Tensor) -> torch.Tensor:
        return (scores - self.mean) / self.std

    def state_dict(self) -> dict[str, float | bool]:
        return {"mean": self.mean, "std": self.std, "is_set": self.is_set}

    def load_state_dict(self, state: dict[str, float | bool]) -> None:
        self.mean, self.std, self.is_set = state["mean"], state["std"], state["is_set"]
