"""Bytes a rank will need, before anything is allocated: by formula, or by a dry run in a simulated world.

The formula is the ZeRO paper's (Rajbhandari et al. 2020, sections 3 and 5) for the layout this engine has: the
weights that the optimizer updates, their gradients and its moments are fp32, and what forward and backward
read is in the compute type. Activations, temporaries of one operation and the allocator's waste come on top.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from engine import sharding
from engine.config import EngineConfig
from engine.optimizers import build_optimizer, state_tensors
from engine.precision import compute_dtype, fp32_modules
from engine.replicated import ReplicatedParameters

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FP32_BYTES = 4


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the fullest rank, by kind.

    `parameters`: the weights that forward and backward read, in the compute type; at stage 3 the fp32 shards.
    `masters`: fp32 weights that the optimizer updates, where they are not the parameters themselves.
    `gradients`: as they are held between micro-batches and before the update.
    `moments`: the optimizer's own state.
    `gathered`: compute-type copies that exist while a layer runs (stage 3): the layer, the one fetched ahead
    of it, and what is in no layer.
    """

    parameters: int
    masters: int
    gradients: int
    moments: int
    gathered: int

    @property
    def optimizer_states(self) -> int:
        """Masters and moments: what the ZeRO paper calls optimizer states (12 bytes a parameter for Adam)."""
        return self.masters + self.moments

    @property
    def total(self) -> int:
        return self.parameters + self.masters + self.gradients + self.moments + self.gathered

    def as_dict(self) -> dict[str, int]:
        return {**asdict(self), "optimizer_states": self.optimizer_states, "total": self.total}


def estimate_memory(
    model_or_numel: nn.Module | int,
    config: dict | str | Path | EngineConfig,
    world_size: int,
    largest_layer: int = 0,
) -> MemoryEstimate:
    """Bytes a rank needs for a model under a config, by formula.

    Args:
        model_or_numel: a module on any device, "meta" included (frozen parameters are counted as such), or a
            number of parameters, all trainable.
        world_size: number of ranks.
        largest_layer: parameters of the largest layer, for `gathered` when only a number is given.
    """
    config = EngineConfig.load(config, world_size)
    compute = compute_dtype(config).itemsize
    if isinstance(model_or_numel, nn.Module):
        sizes = _sizes_of(model_or_numel, world_size, compute)
    else:
        numel, share = model_or_numel, -(-model_or_numel // world_size)
        sizes = _Sizes(
            numel, share, share, numel * (compute < FP32_BYTES), numel * compute, 2 * largest_layer * compute
        )
    optimizer = config.optimizer
    if optimizer is None or optimizer.type is None:  # forward-only: nothing is trained
        sizes = _Sizes(0, 0, sizes.share, 0, sizes.compute_bytes, sizes.working_bytes)
        states = 0
    else:
        states = state_tensors(optimizer.type, optimizer.params)
    stage = config.zero_optimization.stage
    if stage == 0 or world_size == 1:
        return MemoryEstimate(
            parameters=sizes.compute_bytes,
            masters=FP32_BYTES * sizes.with_master,
            gradients=FP32_BYTES * sizes.trainable,
            moments=FP32_BYTES * states * sizes.trainable,
            gathered=0,
        )
    shards = FP32_BYTES * sizes.share
    whole_gradients = stage == 1 and config.gradient_accumulation_steps > 1
    return MemoryEstimate(
        parameters=shards if stage == 3 else sizes.compute_bytes,
        masters=0 if stage == 3 else shards,
        gradients=FP32_BYTES * (sizes.trainable if whole_gradients else sizes.trainable_share),
        moments=FP32_BYTES * states * sizes.trainable_share,
        gathered=sizes.working_bytes if stage == 3 else 0,
    )


@dataclass(frozen=True)
class _Sizes:
    """Counts of parameters on the fullest rank, and bytes in the compute type."""

    trainable: int
    trainable_share: int
    share: int  # trainable and frozen
    with_master: int  # trainable ones that forward reads in another type than the optimizer
    compute_bytes: int
    working_bytes: int


def _sizes_of(module: nn.Module, world_size: int, compute: int) -> _Sizes:
    parameters = list(module.parameters())
    trainable = [p for p in parameters if p.requires_grad]
    kept = {id(p) for child in fp32_modules(module) for p in child.parameters(recurse=False)}

    def compute_bytes(some: Iterable[nn.Parameter]) -> int:
        return sum(p.numel() * (FP32_BYTES if id(p) in kept else compute) for p in some)

    blocks = [compute_bytes(block.parameters()) for block in sharding.find_blocks(module)]
    everything = compute_bytes(parameters)
    return _Sizes(
        trainable=sum(p.numel() for p in trainable),
        trainable_share=sum(_share(p, world_size) for p in trainable),
        share=sum(_share(p, world_size) for p in parameters),
        with_master=sum(p.numel() for p in trainable if id(p) not in kept) if compute < FP32_BYTES else 0,
        compute_bytes=everything,
        working_bytes=everything - sum(blocks) + sum(sorted(blocks)[-2:]),
    )


def _share(parameter: nn.Parameter, world_size: int) -> int:
    """Numbers in the largest shard: rows of dimension 0 are dealt out whole."""
    if parameter.ndim == 0 or parameter.numel() == 0:
        return parameter.numel()
    rows = parameter.shape[0]
    return -(-rows // world_size) * (parameter.numel() // rows)


def dry_run(
    model: Callable[[], nn.Module] | PretrainedConfig,
    config: dict | str | Path | EngineConfig,
    world_size: int,
) -> MemoryEstimate:
    """Bytes a rank needs, counted on a model that is built, sharded and updated without memory for its numbers.

    The model lives on torch's "meta" device and the other ranks are simulated, so a laptop answers for 175
    billion parameters on 64 ranks in seconds. The process must not be in a process group of its own.

    Args:
        model: a function that builds the module (called under `torch.device("meta")`), or a transformers config
            of a causal language model.
        world_size: number of simulated ranks; the report is for rank 0, the fullest.

    Raises:
        ValueError: torch.distributed is already initialised.
    """
    if dist.is_initialized():
        raise ValueError(
            "dry_run simulates a world of its own: call it where torch.distributed is not set up"
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    config = EngineConfig.load(config, world_size)
    with torch.device("meta"):
        module = model() if callable(model) else _causal_model(model)
    spec = config.optimizer
    is_trained = spec is not None and spec.type is not None
    if not is_trained:
        module.requires_grad_(False)
    formula = estimate_memory(module, config, world_size)
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        owned, parameters, masters = _place(module, config, world_size)
    finally:
        dist.destroy_process_group()
    moments = 0
    if is_trained:
        for tensor in owned:
            tensor.grad = torch.zeros_like(tensor)
        optimizer = build_optimizer(owned, spec.type, spec.params)
        optimizer.step()
        moments = _bytes(value for state in optimizer.state.values() for value in state.values())
    whole_gradients = formula.gradients if config.zero_optimization.stage == 1 else 0
    gradients = max(_bytes(tensor.grad for tensor in owned if tensor.grad is not None), whole_gradients)
    return MemoryEstimate(parameters, masters, gradients, moments, formula.gathered)


def _place(module: nn.Module, config: EngineConfig, world_size: int) -> tuple[list[nn.Parameter], int, int]:
    """Lay the module out over the ranks: what the optimizer owns, and bytes of parameters and masters."""
    dtype, stage = compute_dtype(config), config.zero_optimization.stage
    if stage == 0 or world_size == 1:
        replicated = ReplicatedParameters(module, dtype, torch.device("meta"))
        own = {id(p) for p in module.parameters()}
        owned = [tensor for _, tensor in replicated.trainable]
        return owned, _bytes(module.parameters()), _bytes(t for t in owned if id(t) not in own)
    compute_bytes = estimate_memory(module, config, world_size).parameters
    module.float()
    mesh = init_device_mesh("cpu", (world_size,))
    sharding._shard(module, mesh, dtype, reshard_after_forward=stage == 3)
    shards = [(p.requires_grad, nn.Parameter(sharding.local(p.detach()))) for p in module.parameters()]
    owned = [shard for is_trainable, shard in shards if is_trainable]
    resting = _bytes(shard for _, shard in shards)
    return owned, *((resting, 0) if stage == 3 else (compute_bytes, resting))


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


def _causal_model(config: PretrainedConfig) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config)
