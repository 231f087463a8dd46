"""DeepSpeed's five learning-rate schedules, by formula, and the base class of all schedules.

`i` is the number of `step()` calls minus one: -1 before the first. `engine.schedules` says which update uses
which `i`, and builds a schedule by its name.
"""

from __future__ import annotations

import logging
import math

import torch

logger = logging.getLogger(__name__)


class Schedule:
    """Base: keeps the step count and writes the rates of `rates(i)` into the optimizer's groups."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self.last_batch_iteration = -1
        # a resumed optimizer brings the rate it was built with under this name, as with torch's schedules
        self.base_rates = [group.setdefault("initial_lr", group["lr"]) for group in optimizer.param_groups]

    def rates(self, i: int) -> list[float]:
        """The rate of each parameter group at `i` (see the module's text)."""
        raise NotImplementedError

    def step(self) -> None:
        self.last_batch_iteration += 1
        self.apply()

    def apply(self) -> None:
        """Write the present step's values into the optimizer."""
        for group, rate in zip(self.optimizer.param_groups, self.rates(self.last_batch_iteration), strict=True):
            group["lr"] = rate

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.last_batch_iteration = state["last_batch_iteration"]
        self.apply()

    def _per_group(self, value: float | list[float], name: str) -> list[float]:
        count = len(self.optimizer.param_groups)
        if not isinstance(value, list | tuple):
            return [value] * count
        if len(value) != count:
            raise ValueError(
                f"scheduler.params.{name} has {len(value)} values for {count} parameter groups: give {count}"
            )
        return list(value)


class WarmupLR(Schedule):
    """From `warmup_min_lr` up to `warmup_max_lr` (each group's own rate if None), then constant.

    N = max(2, warmup_num_steps); lr(i) = min + (max - min) * gamma(i), with gamma(i) = log(i + 1) / log(N)
    ("log") or i / N ("linear") for i < N and 1 from there on; lr(-1) = min.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: float | list[float] = 0.0,
        warmup_max_lr: float | list[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ):
        super().__init__(optimizer)
        self._minima = self._per_group(warmup_min_lr, "warmup_min_lr")
        maxima = self.base_rates if warmup_max_lr is None else warmup_max_lr
        self._maxima = self._per_group(maxima, "warmup_max_lr")
        self._warmup = _Warmup(warmup_num_steps, warmup_type)
        self.apply()

    def rates(self, i: int) -> list[float]:
        gamma = self._gamma(i) if i >= 0 else 0.0
        return [low + (high - low) * gamma for low, high in zip(self._minima, self._maxima, strict=True)]

    def _gamma(self, i: int) -> float:
        return self._warmup.fraction(i) if i < self._warmup.steps else 1.0


class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, then down in a straight line to `warmup_min_lr` at step T = `total_num_steps`.

    For i >= N: gamma(i) = max(0, (T - i) / max(1, T - N)).
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: float | list[float] = 0.0,
        warmup_max_lr: float | list[float] | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ):
        self._total = _total_steps(total_num_steps, warmup_num_steps)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)

    def _gamma(self, i: int) -> float:
        steps = self._warmup.steps
        if i < steps:
            return self._warmup.fraction(i)
        return max(0.0, (self._total - i) / max(1, self._total - steps))


class WarmupCosineLR(Schedule):
    """Each group's own rate times a ratio: warm-up from `warmup_min_ratio`, then a cosine to `cos_min_ratio`.

    ratio(-1) = 0; for i < N: m + (1 - m) * gamma(i); then with p = min(1, (i - N + 1) / max(1, T - N)):
    max(0, c + (1 - c) * (1 + cos(pi p)) / 2).
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
    ):
        super().__init__(optimizer)
        self._total = _total_steps(total_num_steps, warmup_num_steps)
        self._warmup = _Warmup(warmup_num_steps, warmup_type)
        self._min_ratio = warmup_min_ratio
        self._cos_min_ratio = cos_min_ratio
        self.apply()

    def rates(self, i: int) -> list[float]:
        ratio = self._ratio(i)
        return [rate * ratio for rate in self.base_rates]

    def _ratio(self, i: int) -> float:
        steps = self._warmup.steps
        if i < 0:
            return 0.0
        if i < steps:
            return self._min_ratio + (1.0 - self._min_ratio) * self._warmup.fraction(i)
        progress = min(1.0, (i - steps + 1) / max(1, self._total - steps))
        cosine = (1.0 + math.cos(math.pi * progress)) / 2.0
        return max(0.0, self._cos_min_ratio + (1.0 - self._cos_min_ratio) * cosine)


class OneCycle(Schedule):
    """One triangle up and down between `cycle_min_lr` and `cycle_max_lr`, then a decay below the minimum.

    With b = i + 1, f and s the two half lengths, total = f + s, a = f / total and x = frac(b / total), while
    i < total: scale = x / a up to a, (x - 1) / (a - 1) behind it; lr = min + (max - min) * scale. With c
    stairs in a half, scale = floor(position) / c, position = (b mod total) * c / f upwards and
    (total - b mod total) * c / s downwards. From i = total on, with d = i - total + 1:
    lr = min / (1 + decay_lr_rate * d / decay_step_size). Momentum (the first of Adam's betas; the second is
    set to 0.99) mirrors the rate: max - (max - min) * scale, and after the cycle
    max * (1 + decay_mom_rate * d / decay_step_size). A `decay_step_size` or rate of 0 holds that value then.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: float | list[float],
        cycle_max_lr: float | list[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: float = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | list[float] = 0.8,
        cycle_max_mom: float | list[float] = 0.9,
        decay_mom_rate: float = 0.0,
    ):
        super().__init__(optimizer)
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        if cycle_first_step_size <= 0:
            raise ValueError(f"scheduler.params.cycle_first_step_size is {cycle_first_step_size}: use a number above 0")
        if second < 0:
            raise ValueError(f"scheduler.params.cycle_second_step_size is {second}: use 0 or more")
        self._first, self._second = cycle_first_step_size, second
        self._total = cycle_first_step_size + second
        self._first_stairs = cycle_first_stair_count
        self._second_stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self._decay_step_size = decay_step_size
        self._decay_lr_rate, self._decay_mom_rate = decay_lr_rate, decay_mom_rate
        self._minima = self._per_group(cycle_min_lr, "cycle_min_lr")
        self._maxima = self._per_group(cycle_max_lr, "cycle_max_lr")
        self._min_moms = self._per_group(cycle_min_mom, "cycle_min_mom")
        self._max_moms = self._per_group(cycle_max_mom, "cycle_max_mom")
        self._cycles_momentum = cycle_momentum
        if cycle_momentum and "betas" not in optimizer.defaults:
            logger.warning("cycle_momentum is off: %s has no betas", type(optimizer).__name__)
            self._cycles_momentum = False
        self.apply()

    def rates(self, i: int) -> list[float]:
        if i < self._total:
            scale = self._scale(i + 1)
            return [low + (high - low) * scale for low, high in zip(self._minima, self._maxima, strict=True)]
        return [low / (1.0 + self._decayed(i, self._decay_lr_rate)) for low in self._minima]

    def momenta(self, i: int) -> list[float]:
        """The first beta of each parameter group at `i`."""
        if i < self._total:
            scale = self._scale(i + 1)
            return [high - (high - low) * scale for low, high in zip(self._min_moms, self._max_moms, strict=True)]
        return [high * (1.0 + self._decayed(i, self._decay_mom_rate)) for high in self._max_moms]

    def apply(self) -> None:
        super().apply()
        if self._cycles_momentum:
            momenta = self.momenta(self.last_batch_iteration)
            for group, momentum in zip(self.optimizer.param_groups, momenta, strict=True):
                group["betas"] = (momentum, 0.99)

    def _scale(self, batch: int) -> float:
        position = batch % self._total
        if position <= self._first:
            height, half, stairs = position, self._first, self._first_stairs
        else:
            height, half, stairs = self._total - position, self._second, self._second_stairs
        if stairs > 0:
            # floor of the product, not of the quotient: an ulp under a stair's edge would fall a whole stair
            return math.floor(height * stairs / half) / stairs
        return height / half

    def _decayed(self, i: int, rate: float) -> float:
        return rate * (i - self._total + 1) / self._decay_step_size if self._decay_step_size else 0.0


class LRRangeTest(Schedule):
    """lr = min * (1 + rate * t) with t = (i + 1) / step_size, rounded down when `lr_range_test_staircase`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: float | list[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
    ):
        super().__init__(optimizer)
        self._step_size = _positive_int(lr_range_test_step_size, "lr_range_test_step_size")
        self._minima = self._per_group(lr_range_test_min_lr, "lr_range_test_min_lr")
        self._rate = lr_range_test_step_rate
        self._staircase = lr_range_test_staircase
        self.apply()

    def rates(self, i: int) -> list[float]:
        interval = (i + 1) / self._step_size
        if self._staircase:
            interval = math.floor(interval)
        return [low * (1.0 + self._rate * interval) for low in self._minima]


class _Warmup:
    """How far a warm-up of max(2, steps) steps has come: 0 at i = 0, towards 1."""

    def __init__(self, steps: int, kind: str):
        self.steps = max(2, _positive_int(steps, "warmup_num_steps"))
        if kind not in ("log", "linear"):
            logger.warning("scheduler.params.warmup_type %r is neither 'log' nor 'linear': using 'log'", kind)
            kind = "log"
        self._kind = kind

    def fraction(self, i: int) -> float:
        return math.log(i + 1) / math.log(self.steps) if self._kind == "log" else i / self.steps


def _positive_int(value: int, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"scheduler.params.{name} is {value!r}: use a whole number of 1 or more")
    return value


def _total_steps(total: int, warmup: int) -> int:
    _positive_int(total, "total_num_steps")
    if isinstance(warmup, int) and total < warmup:
        logger.warning("scheduler.params.total_num_steps %d is less than warmup_num_steps %d", total, warmup)
    return total
