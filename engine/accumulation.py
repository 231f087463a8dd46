"""The right average: how the micro-batches of one optimizer step, on all ranks, add up to one mean.

Each rank adds up `loss * factor`, and ranks are averaged. With weights (see `Engine.backward`) the factor is
weight / unit, so that the sum divided by the sum of all weights is the mean over all units of the global batch;
without, it is 1 / (micro-batches a step).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from engine import distributed


class Accumulation:
    """What one rank has added up since the last optimizer step.

    Args:
        window: micro-batches an optimizer step.
        track_loss: whether `mean_loss` is wanted.
    """

    def __init__(self, window: int, track_loss: bool = False):
        self.window = window
        self._track_loss = track_loss
        self._weighted: bool | None = None
        self._weight_sum = 0.0
        self._loss_sum: torch.Tensor | float = 0.0
        self._unit: float | None = None

    def add(self, loss: torch.Tensor, weight: float | torch.Tensor | None, is_start: bool) -> float:
        """Count one micro-batch in; returns the factor on its loss.

        Raises:
            ValueError: weighted and plain micro-batches in one step, or a weight that counts nothing.
        """
        is_weighted = weight is not None
        if is_weighted and not 0 <= float(weight) < math.inf:
            raise ValueError(f"weight is {float(weight)}: it counts units, so give a finite number of 0 or more")
        if is_start:
            self._weighted, self._weight_sum, self._loss_sum = is_weighted, 0.0, 0.0
        elif is_weighted != self._weighted:
            raise ValueError("backward was called with `weight` in one micro-batch and without in another of one step")
        if is_weighted:
            weight = float(weight)
            if self._unit is None:
                self._set_unit(sum(distributed.all_reduce_sums([weight])) * self.window)
            self._weight_sum += weight
            factor = weight / self._unit
        else:
            weight = factor = 1.0 / self.window
        if self._track_loss and weight:  # the mean over no token is NaN
            self._loss_sum = self._loss_sum + loss.detach().float() * weight
        return factor

    def finish(self, square_sum: float, is_partial: bool) -> tuple[float, float, float]:
        """Close the step: one sum over ranks for all that needs one.

        Args:
            square_sum: sum of squares of the reduced gradients that this rank holds.
            is_partial: whether other ranks hold other ones.

        Returns:
            The sum of squares of all gradients; what makes a mean over ranks of gradients the gradient of the
            global mean; the mean loss (NaN where it is not tracked).
        """
        weight_sum, loss_sum = self._weight_sum, float(self._loss_sum)
        if is_partial or self._weighted or self._track_loss:
            total, weight_sum, loss_sum = distributed.all_reduce_sums([square_sum, weight_sum, loss_sum])
            square_sum = total if is_partial else square_sum
        world = distributed.world_size()
        multiplier, divisor = 1.0, float(world)
        if self._weighted:
            multiplier, divisor = (world * self._unit / weight_sum if weight_sum else 0.0), weight_sum
            self._set_unit(weight_sum)
        loss = loss_sum / divisor if self._track_loss and divisor else math.nan
        return square_sum, multiplier, loss

    # -- in checkpoints: independent of the rank count, the loss scale and the unit --------------------------

    def state_dict(self) -> dict[str, Any]:
        """Collective: sums over all ranks."""
        weight_sum, loss_sum = distributed.all_reduce_sums([self._weight_sum, float(self._loss_sum)])
        return {"weighted": self._weighted, "weight_sum": weight_sum, "loss_sum": loss_sum, "unit": self._unit}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._weighted, self._unit = state["weighted"], state["unit"]
        share = 1.0 if distributed.is_main() else 0.0
        self._weight_sum, self._loss_sum = state["weight_sum"] * share, state["loss_sum"] * share

    def to_saved(self, gradients: dict[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
        """Means over ranks of scaled gradients -> sums of weight * gradient (or what they add to the plain mean)."""
        return {name: gradient * (self._units() / scale) for name, gradient in gradients.items()}

    def from_saved(self, gradients: dict[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
        """The inverse, for this run's rank count and scale."""
        return {name: gradient * (scale / self._units()) for name, gradient in gradients.items()}

    def _units(self) -> float:
        return distributed.world_size() * self._unit if self._weighted else 1.0

    def _set_unit(self, weight_sum: float) -> None:
        # A power of two near the expected sum of weights on a rank: it keeps the scaled loss near the plain
        # mean's size (fp16 would overflow on a sum) and, being a power of two, changes no rounding.
        expected = weight_sum / distributed.world_size()
        self._unit = 2.0 ** round(math.log2(expected)) if expected > 0 else 1.0
