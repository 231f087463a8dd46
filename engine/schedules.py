"""Learning-rate schedules by name: DeepSpeed's five by formula, and every one of Hugging Face's.

A schedule sets the rate of the first update when it is built, and the engine calls `step()` after each update
that was applied, so a skipped one does not move it. `get_last_lr()` is the rate the next update will use, one
number a parameter group: log it before `step()` to log the rate that was used.

Which value update number k (from 0) uses:

- DeepSpeed's formulas are written in `i`, -1 when the schedule is built: **update k uses i = k - 1**. So
  `WarmupLR` runs its first two updates at the lowest rate (i = -1, and i = 0 where log(1) = 0), and
  `WarmupCosineLR` its first at 0.
- Hugging Face's functions are written in a step, 0 when the schedule is built: **update k uses step k**.
"""

from __future__ import annotations

import inspect
import math
from difflib import get_close_matches
from typing import Any

import torch

from engine.schedule_curves import LRRangeTest, OneCycle, Schedule, WarmupCosineLR, WarmupDecayLR, WarmupLR

DEEPSPEED: dict[str, type[Schedule]] = {
    curve.__name__: curve for curve in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}
# these follow a metric, and the engine has none to give
_NEED_A_METRIC = ("reduce_lr_on_plateau", "greedy")
_TEXTS = ("warmup_type", "decay_type")
_SWITCHES = ("cycle_momentum", "lr_range_test_staircase")
_BY_GROUP = (
    "warmup_min_lr warmup_max_lr cycle_min_lr cycle_max_lr cycle_min_mom cycle_max_mom lr_range_test_min_lr"
).split()


class HuggingFaceSchedule(Schedule):
    """A `transformers` schedule: each group's own rate times the function that `get_scheduler` applies."""

    def __init__(self, optimizer: torch.optim.Optimizer, name: str, params: dict[str, Any]):
        from transformers import get_scheduler

        super().__init__(optimizer)
        params = dict(params)
        warmup, total = params.pop("num_warmup_steps", 0), params.pop("num_training_steps", None)
        # A stand-in receives the schedule's hooks, and only its functions are kept: torch's scheduler would
        # replace the `step` of the real optimizer.
        stand_in = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": rate} for rate in self.base_rates])
        inner = get_scheduler(
            name,
            stand_in,
            num_warmup_steps=warmup,
            num_training_steps=total,
            scheduler_specific_kwargs=params,
        )
        self._factors = inner.lr_lambdas
        self.apply()

    def rates(self, i: int) -> list[float]:
        return [rate * factor(i + 1) for rate, factor in zip(self.base_rates, self._factors, strict=True)]


def build_scheduler(
    optimizer: torch.optim.Optimizer,
    type_name: str,
    params: dict[str, Any] | None = None,
    total_steps: int | None = None,
) -> Schedule:
    """The schedule called `type_name`, with its first rate already written into `optimizer`.

    Args:
        type_name: WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest, or one of Hugging Face's
            `lr_scheduler_type` names ("linear", "cosine", ...).
        params: the config's `scheduler.params`: DeepSpeed's, or `num_warmup_steps` (0 if not given),
            `num_training_steps` and that schedule's own.
        total_steps: optimizer steps of the whole run, for a schedule that takes them and has none in
            `params`.

    Raises:
        ValueError: an unknown name or parameter (with the nearest known one), a missing or an impossible one.
    """
    params = dict(params or {})
    check_params(type_name, params)
    known, required = _parameters(type_name)
    name_of_total = "total_num_steps" if type_name in DEEPSPEED else "num_training_steps"
    if type_name == "warmup_stable_decay" and "num_stable_steps" not in params:
        required.append(name_of_total)  # the one or the other says where its decay starts
    if total_steps is not None and name_of_total in known:
        params.setdefault(name_of_total, total_steps)
    missing = [name for name in required if name not in params]
    if missing:
        raise ValueError(f"scheduler.params.{missing[0]} is missing: {type_name} needs it")
    if type_name in DEEPSPEED:
        return DEEPSPEED[type_name](optimizer, **params)
    return HuggingFaceSchedule(optimizer, type_name, params)


def check_params(type_name: str, params: dict[str, Any]) -> None:
    """Whether the name and the names of its parameters are known, and the values of a possible kind.

    Raises:
        ValueError: an unknown name (the line offers the nearest), or a value that is not a number where one
            is needed.
    """
    known, _ = _parameters(type_name)
    for name, value in params.items():
        if name not in known:
            nearest = _nearest(name, known)
            raise ValueError(f"scheduler.params.{name} is not a parameter of {type_name}: did you mean {nearest}?")
        _check_value(name, value)


def _check_value(name: str, value: Any) -> None:
    if name in _TEXTS:
        allowed, fits = "a text", isinstance(value, str)
    elif name in _SWITCHES:
        allowed, fits = "true or false", isinstance(value, bool)
    elif name in _BY_GROUP and isinstance(value, list | tuple):
        allowed, fits = "numbers, one a parameter group", all(map(_is_number, value))
    else:
        allowed, fits = "a number", value is None or _is_number(value)
    if not fits:
        raise ValueError(f"scheduler.params.{name} is {value!r}: use {allowed}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _parameters(type_name: str) -> tuple[list[str], list[str]]:
    """Names of all parameters of a schedule, and of those it cannot do without."""
    if type_name in DEEPSPEED:
        function, own = DEEPSPEED[type_name].__init__, []
    else:
        function, own = _hugging_face(type_name), ["num_warmup_steps", "num_training_steps"]
    parameters = [
        p
        for name, p in inspect.signature(function).parameters.items()
        if name not in ("self", "optimizer", "last_epoch")
    ]
    known = list(dict.fromkeys([*own, *(p.name for p in parameters)]))
    required = [p.name for p in parameters if p.default is p.empty and p.name != "num_warmup_steps"]
    return known, required


def _hugging_face(type_name: str) -> Any:
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

    functions = {kind.value: function for kind, function in TYPE_TO_SCHEDULER_FUNCTION.items()}
    if type_name in _NEED_A_METRIC:
        raise ValueError(f"scheduler.type {type_name!r} follows a metric, and the engine has none: use 'cosine'")
    if type_name not in functions:
        names = [*DEEPSPEED, *(name for name in functions if name not in _NEED_A_METRIC)]
        nearest = _nearest(type_name, names)
        raise ValueError(f"scheduler.type {type_name!r} is unknown: did you mean {nearest}?")
    return functions[type_name]


def _nearest(name: str, known: list[str]) -> str:
    return get_close_matches(name, known, n=1, cutoff=0.0)[0]
