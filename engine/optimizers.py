"""Optimizers by the names of DeepSpeed's config, and the parameter groups they work on.

Each is torch's own, in its fused form where torch has one for the parameters' device, or `engine.lion.Lion`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from engine.lion import Lion

logger = logging.getLogger(__name__)

_ADAM = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "amsgrad",
    "bias_correction",
    "adam_w_mode",
    "torch_adam",
    "fused",
)
_KNOWN: dict[str, tuple[str, ...]] = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov", "fused"),
    "Adagrad": ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps", "fused"),
    "Lion": ("lr", "betas", "weight_decay"),
}
# Names that DeepSpeed knows too -> what to do instead.
_REFUSED: dict[str, str] = {
    "Lamb": "use AdamW",
    "Muon": "use AdamW, or give initialize an optimizer of your own",
    "OneBitAdam": "use Adam",
    "ZeroOneAdam": "use Adam",
    "OneBitLamb": "use Adam",
    "MuAdam": "use Adam with parameter groups that carry muP's learning rates",
    "MuAdamW": "use AdamW with parameter groups that carry muP's learning rates",
    "MuSGD": "use SGD with parameter groups that carry muP's learning rates",
}


def build_optimizer(
    params_or_groups: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
    type_name: str,
    params: dict[str, Any] | None = None,
) -> torch.optim.Optimizer:
    """The optimizer that the config's `optimizer` section describes.

    Args:
        params_or_groups: tensors or parameter groups, plain or `DTensor`; a group's own values win over
            `params`.
        type_name: Adam, AdamW, SGD, Adagrad or Lion, in any case.
        params: `optimizer.params`. As in DeepSpeed, "Adam" decays weights apart from the gradient too unless
            `adam_w_mode` is false, weight decay is 0 unless given, and `torch_adam` takes torch's defaults
            (0.01 for AdamW).

    Raises:
        ValueError: a name or parameter that is unknown or does not exist here, or a value out of range.
    """
    params = dict(params or {})
    name = check_params(type_name, params)
    if isinstance(params.get("betas"), list):
        params["betas"] = tuple(params["betas"])
    groups = _as_groups(params_or_groups)
    fused = params.pop("fused", None)
    if name == "Lion":
        return Lion(groups, **params)
    if name in ("Adam", "AdamW"):
        kind = _adam(name, params)
    else:
        kind = {"SGD": torch.optim.SGD, "Adagrad": torch.optim.Adagrad}[name]
    _choose_kernels(groups, kind, fused)
    return kind(groups, **params)


def check_params(type_name: str, params: dict[str, Any]) -> str:
    """The optimizer's name in its usual spelling, after a look at the names and values of its parameters.

    Raises:
        ValueError: one of them is unknown or impossible; the line says what to write instead.
    """
    spellings = {name.lower(): name for name in (*_KNOWN, *_REFUSED)}
    name = spellings.get(type_name.lower())
    if name in _REFUSED:
        raise ValueError(f"optimizer.type {type_name!r} does not exist here: {_REFUSED[name]}")
    if name is None:
        nearest = get_close_matches(type_name.lower(), [known.lower() for known in _KNOWN], n=1, cutoff=0.0)[0]
        raise ValueError(f"optimizer.type {type_name!r} is unknown: did you mean {spellings[nearest]}?")
    for key, value in params.items():
        if key == "max_grad_norm":
            raise ValueError(f"optimizer.params.max_grad_norm is {value!r}: set gradient_clipping to it instead")
        if key not in _KNOWN[name]:
            nearest = get_close_matches(key, _KNOWN[name], n=1, cutoff=0.0)[0]
            raise ValueError(f"optimizer.params.{key} is not a parameter of {name}: did you mean {nearest}?")
        _check_value(key, value)
    if params.get("nesterov") and not params.get("momentum"):
        raise ValueError("optimizer.params.nesterov is true: set optimizer.params.momentum above 0 with it")
    if params.get("nesterov") and params.get("dampening"):
        raise ValueError("optimizer.params.nesterov is true: set optimizer.params.dampening to 0 with it")
    return name


def state_tensors(type_name: str, params: dict[str, Any]) -> int:
    """How many tensors of a parameter's size the optimizer keeps for it."""
    match check_params(type_name, params):
        case "Adam" | "AdamW":
            return 3 if params.get("amsgrad") else 2
        case "SGD":
            return 1 if params.get("momentum") else 0
        case _:
            return 1


def _check_value(key: str, value: Any) -> None:
    where = f"optimizer.params.{key} is {value!r}"
    if key in ("amsgrad", "bias_correction", "adam_w_mode", "torch_adam", "nesterov", "fused"):
        if not isinstance(value, bool):
            raise ValueError(f"{where}: use true or false")
        if key == "bias_correction" and not value:
            raise ValueError(f"{where}: Adam without bias correction does not exist here; leave it out")
    elif key == "betas":
        if not isinstance(value, list | tuple) or len(value) != 2 or not all(_number(b) and 0 <= b < 1 for b in value):
            raise ValueError(f"{where}: use two numbers from 0 up to but not 1")
    elif not _number(value) or value < 0:
        raise ValueError(f"{where}: use a number of 0 or more")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _adam(name: str, params: dict[str, Any]) -> type[torch.optim.Optimizer]:
    decoupled = params.pop("adam_w_mode", True) or name == "AdamW"
    params.pop("bias_correction", None)
    if not params.pop("torch_adam", False):
        params.setdefault("weight_decay", 0.0)
    return torch.optim.AdamW if decoupled else torch.optim.Adam


def _as_groups(params_or_groups: Iterable[Any]) -> list[dict[str, Any]]:
    entries = list(params_or_groups)
    if entries and isinstance(entries[0], dict):
        return [{**group, "params": list(group["params"])} for group in entries]
    return [{"params": entries}]


def _choose_kernels(groups: list[dict[str, Any]], kind: type[torch.optim.Optimizer], fused: bool | None) -> None:
    """Fused unless it cannot be: one pass over memory instead of one per operation of the formula."""
    reasons = set()
    for group in groups:
        reason = "optimizer.params.fused is false" if fused is False else _why_not_fused(kind, group["params"])
        # both spelled out: torch's own choice on a CPU is a loop over parameters
        group["fused"] = reason is None
        group["foreach"] = reason is not None and not _is_mixed(group["params"])
        reasons.add(reason)
    for reason in reasons - {None}:
        logger.info("%s runs unfused: %s", kind.__name__, reason)


def _why_not_fused(kind: type[torch.optim.Optimizer], parameters: Sequence[torch.Tensor]) -> str | None:
    supported = ("cpu", "cuda", "mps", "xpu")
    devices = {p.device.type for p in parameters}
    if not devices <= set(supported):
        return f"torch has no fused form on {', '.join(sorted(devices - set(supported)))}"
    if not all(p.is_floating_point() for p in parameters):
        return "a parameter is not floating-point"
    if kind in (torch.optim.SGD, torch.optim.Adagrad) and any(isinstance(p, DTensor) for p in parameters):
        return "torch has no fused form of it for sharded tensors"
    if _is_mixed(parameters):
        return "one group holds sharded and whole tensors"
    return None


def _is_mixed(parameters: Sequence[torch.Tensor]) -> bool:
    # no batched kernel takes both in one call
    return len({isinstance(p, DTensor) for p in parameters}) > 1


def parameter_groups(
    model: nn.Module, weight_decay: float, lora_lr: float | None = None, no_decay: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Trainable parameters in groups: decayed, adapters with a rate of their own, and not decayed.

    Biases and norm weights (every parameter of fewer than two dimensions), and those with one of `no_decay`
    in their name, get no weight decay; adapter matrices ("lora_" in the name) get `lora_lr` if it is given.
    Groups that would be empty are left out, and groups that would be treated alike are one.
    """
    decayed: list[nn.Parameter] = []
    adapters: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if weight_decay and (parameter.ndim < 2 or any(part in name for part in no_decay)):
            others.append(parameter)
        elif lora_lr is not None and "lora_" in name:
            adapters.append(parameter)
        else:
            decayed.append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": adapters, "weight_decay": weight_decay, "lr": lora_lr},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
