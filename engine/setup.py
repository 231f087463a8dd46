"""What `Engine` does once, at the start: parameter groups, optimizer and schedule, the same weights on all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine import distributed
from engine.config import EngineConfig
from engine.cpu_linear import use_fast_products
from engine.host_memory import keep_freed_memory
from engine.optimizers import build_optimizer, parameter_groups
from engine.replicated import ReplicatedParameters
from engine.schedules import build_scheduler
from engine.sharding import ShardedParameters


def named_groups(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, model_parameters: Any, config: EngineConfig
) -> list[dict] | None:
    """Parameter groups by name, taken before sharding replaces the tensors; None for no optimizer."""
    if optimizer is not None:
        if optimizer.state:
            raise ValueError("the optimizer given to initialize has already stepped: give a fresh one")
        groups = optimizer.param_groups
    elif config.optimizer is None or config.optimizer.type is None:
        return None
    elif model_parameters is not None:
        groups = list(model_parameters)
        if groups and not isinstance(groups[0], dict):
            groups = [{"params": groups}]
    else:
        groups = parameter_groups(model, (config.optimizer.params or {}).get("weight_decay", 0.0))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    named = []
    for group in groups:
        parameters = [p for p in group["params"] if p.requires_grad]
        foreign = [list(p.shape) for p in parameters if id(p) not in names]
        if foreign:
            raise ValueError(f"the optimizer holds parameters that are not the model's, of shapes {foreign[:3]}")
        named.append({**{k: v for k, v in group.items() if k != "params"}, "names": [names[id(p)] for p in parameters]})
    named = [group for group in named if group["names"]] if optimizer is None else named
    if not any(group["names"] for group in named):
        raise ValueError("no parameter has requires_grad: unfreeze some, or leave the optimizer out of the config")
    return named


def place_parameters(
    model: nn.Module, config: EngineConfig, dtype: torch.dtype, device: torch.device
) -> ReplicatedParameters | ShardedParameters:
    """Lay the model's parameters out as the ZeRO stage says, from the main rank's values."""
    _broadcast_from_main(model, device)
    if device.type == "cpu":
        keep_freed_memory()
        use_fast_products(model)
    zero = config.zero_optimization
    offload = zero.offloads_parameters or zero.offloads_optimizer
    if zero.stage == 0 or (distributed.world_size() == 1 and not offload):
        # Over one rank a shard is the whole, so every stage is the replicated layout there.
        predivide = None if config.prescale_gradients else config.gradient_predivide_factor
        return ReplicatedParameters(model, dtype, device, predivide)
    distributed.require_process_group()
    return ShardedParameters(model, dtype, device, zero)


def take_optimizer(
    groups: list[dict] | None,
    optimizer: torch.optim.Optimizer | None,
    parameters: ReplicatedParameters | ShardedParameters,
    config: EngineConfig,
) -> torch.optim.Optimizer | None:
    """The optimizer over the tensors that the layout made; `groups` are those of `named_groups`."""
    if groups is None:
        return None
    by_name = dict(parameters.module.named_parameters())
    owned = []
    for group in groups:
        names = group.pop("names")
        owned.append({**group, "params": [parameters.optimizer_parameter(n, by_name[n]) for n in names]})
    if optimizer is None:
        return build_optimizer(owned, config.optimizer.type, config.optimizer.params)
    for group, replacement in zip(optimizer.param_groups, owned, strict=True):
        group["params"] = replacement["params"]
    return optimizer


def take_scheduler(lr_scheduler: Any, optimizer: torch.optim.Optimizer | None, config: EngineConfig) -> Any:
    """The schedule: the caller's, the config's, or none."""
    if optimizer is None:
        return None
    if lr_scheduler is not None:
        return lr_scheduler(optimizer) if callable(lr_scheduler) else lr_scheduler
    spec = config.scheduler
    if spec is None or spec.type is None:
        return None
    return build_scheduler(optimizer, spec.type, spec.params)


def _broadcast_from_main(model: nn.Module, device: torch.device) -> None:
    """Start every rank from rank 0's values: ranks that built a random head each would train another model."""
    if distributed.world_size() == 1:
        return
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            moved = tensor.detach().to(device).contiguous()
            torch.distributed.broadcast(moved, src=0)
            tensor.copy_(moved)
