"""The contenders of `bench.zero`: the same AdamW, clipping and loss, each written as its users write it.

Each function takes (model, dtype, args) and returns a function from one step's micro-batches to the last loss.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import engine

LR, BETAS, CLIP = 1e-4, (0.9, 0.95), 1.0
Step = Callable[[list[torch.Tensor]], torch.Tensor]


def loss_of(model: Callable, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids).logits[:, :-1].float()
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


def _adamw(parameters) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=LR, betas=BETAS, weight_decay=0.0, fused=True)


def _config(dtype: torch.dtype, args: argparse.Namespace, stage: int) -> dict:
    return {
        "train_micro_batch_size_per_gpu": args.micro,
        "gradient_accumulation_steps": args.accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": list(BETAS), "weight_decay": 0.0}},
        "gradient_clipping": CLIP,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {"stage": stage},
    }


def engine_step(model: nn.Module, dtype: torch.dtype, args: argparse.Namespace, stage: int) -> Step:
    return _stepper(engine.initialize(model, _config(dtype, args, stage)))


def deepspeed_step(model: nn.Module, dtype: torch.dtype, args: argparse.Namespace, stage: int) -> Step:
    import deepspeed

    config = {**_config(dtype, args, stage), "zero_allow_untested_optimizer": True}
    groups = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return _stepper(deepspeed.initialize(model=model, optimizer=_adamw(groups), config=_without_optimizer(config))[0])


def _without_optimizer(config: dict) -> dict:
    # its own CPU Adam is compiled at the first use; torch's fused one is what the others run
    return {key: value for key, value in config.items() if key != "optimizer"}


def _stepper(eng) -> Step:
    def step(batches: list[torch.Tensor]) -> torch.Tensor:
        for ids in batches:
            loss = loss_of(eng, ids)
            eng.backward(loss)
            eng.step()
        return loss.detach()

    return step


def torch_step(model: nn.Module, dtype: torch.dtype, args: argparse.Namespace) -> Step:
    """One process; in bf16 with fp32 masters by hand."""
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()] if dtype != torch.float32 else None
    model.to(dtype)
    parameters = list(model.parameters())
    optimizer = _adamw(parameters if masters is None else masters)

    def step(batches: list[torch.Tensor]) -> torch.Tensor:
        for ids in batches:
            loss = loss_of(model, ids)
            (loss / len(batches)).backward()
        if masters is not None:
            for master, parameter in zip(masters, parameters, strict=True):
                master.grad, parameter.grad = parameter.grad.float(), None
        nn.utils.clip_grad_norm_(parameters if masters is None else masters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if masters is not None:
            with torch.no_grad():
                torch._foreach_copy_(parameters, masters)
        return loss.detach()

    return step


def ddp_step(model: nn.Module, dtype: torch.dtype, args: argparse.Namespace) -> Step:
    """fp32 parameters; in bf16 under autocast, as DDP's users have it."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = _adamw(wrapped.parameters())
    device = next(model.parameters()).device.type

    def step(batches: list[torch.Tensor]) -> torch.Tensor:
        for number, ids in enumerate(batches):
            wrapped.require_backward_grad_sync = number == len(batches) - 1
            with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
                loss = loss_of(wrapped, ids)
            (loss / len(batches)).backward()
        nn.utils.clip_grad_norm_(wrapped.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def fsdp2_step(model: nn.Module, dtype: torch.dtype, args: argparse.Namespace, stage: int) -> Step:
    """A hand-written loop: each layer a unit, then the rest; stages as `engine.sharding` maps them."""
    mesh = dist.device_mesh.init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=stage == 3)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    optimizer = _adamw(model.parameters())

    def step(batches: list[torch.Tensor]) -> torch.Tensor:
        for number, ids in enumerate(batches):
            if stage == 1:
                model.set_requires_gradient_sync(number == len(batches) - 1)
            loss = loss_of(model, ids)
            (loss / len(batches)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
