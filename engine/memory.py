"""Bytes a rank will need, before anything is allocated: by formula, or by a dry run in a simulated world.

The formula is the ZeRO paper's (Rajbhandari et al. 2020, sections 3 and 5) for the layout this engine has:
the weights that the optimizer updates, their gradients and its moments are fp32, and what forward and
backward read is in the compute type. Activations, temporaries of one operation and the allocator's waste come
on top.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from engine.config import EngineConfig, OffloadConfig, ZeroConfig
from engine.optimizers import build_optimizer, state_tensors
from engine.precision import compute_dtype, fp32_modules
from engine.replicated import ReplicatedParameters
from engine.sharding import ShardedParameters, find_blocks, find_ends, local, sent_dtype

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
    `working`: what comes on top while a layer runs, at the fullest moment of backward: at stage 3 gathered
    copies of the layer, of the one fetched ahead of it and of what is in no layer (an embedding and a head that
    are not tied count as layers), with `zero_hpz_partition_size` also what the group keeps of the layers between
    forward and backward; at stages 1 to 3 room for the largest layer's gradient on its way to its ranks.
    `host`: how much of all these lies in the CPU's memory when they are offloaded from a device.
    """

    parameters: int
    masters: int
    gradients: int
    moments: int
    working: int
    host: int

    @property
    def optimizer_states(self) -> int:
        """Masters and moments: what the ZeRO paper calls optimizer states (12 bytes a parameter for Adam)."""
        return self.masters + self.moments

    @property
    def total(self) -> int:
        return self.parameters + self.masters + self.gradients + self.moments + self.working

    @property
    def device(self) -> int:
        """What must fit on the rank's own device."""
        return self.total - self.host

    def as_dict(self) -> dict[str, int]:
        sums = {"optimizer_states": self.optimizer_states, "total": self.total, "device": self.device}
        return {**asdict(self), **sums}


def estimate_memory(
    model_or_numel: nn.Module | int,
    config: dict | str | Path | EngineConfig,
    world_size: int,
    largest_layer: int = 0,
    device_type: str = "cuda",
) -> MemoryEstimate:
    """Bytes a rank needs for a model under a config, by formula.

    Args:
        model_or_numel: a module on any device, "meta" included (frozen parameters are counted as such), or a
            number of parameters, all trainable.
        world_size: number of ranks.
        largest_layer: parameters of the largest layer, for `working` when only a number is given.
        device_type: where it will run: bf16 gradients are sent as fp32, between CPUs as bf16.
    """
    config = EngineConfig.load(config, world_size)
    compute = compute_dtype(config).itemsize
    if isinstance(model_or_numel, nn.Module):
        sizes = _sizes_of(model_or_numel, world_size, compute)
    else:
        sizes = _sizes_of_number(model_or_numel, largest_layer, world_size, compute)
    states = 0
    if config.optimizer is None or config.optimizer.type is None:
        sizes = replace(sizes, trainable=0, trainable_share=0, with_master=0, unit_gradient=0)
    else:
        states = state_tensors(config.optimizer.type, config.optimizer.params)
    stage = config.zero_optimization.stage
    if _is_replicated(config, world_size):
        return MemoryEstimate(
            parameters=sizes.whole,
            masters=FP32_BYTES * sizes.with_master,
            gradients=FP32_BYTES * sizes.trainable,
            moments=FP32_BYTES * states * sizes.trainable,
            working=0,
            host=0,
        )
    sent = sent_dtype(stage, compute_dtype(config), device_type)
    shards = FP32_BYTES * sizes.share
    whole_gradients = stage == 1 and config.gradient_accumulation_steps > 1
    gradients = FP32_BYTES * (sizes.trainable if whole_gradients else sizes.trainable_share)
    moments = FP32_BYTES * states * sizes.trainable_share
    return MemoryEstimate(
        parameters=shards if stage == 3 else sizes.whole,
        masters=0 if stage == 3 else shards,
        gradients=gradients,
        moments=moments,
        working=_working(sizes, config.zero_optimization, world_size, sent.itemsize),
        host=shards + moments + (0 if whole_gradients else gradients) if _offloads(config) else 0,
    )


def _offloads(config: EngineConfig) -> bool:
    # one policy of FSDP2 moves shards, gradients and moments together
    return config.zero_optimization.offloads_parameters or config.zero_optimization.offloads_optimizer


def _is_replicated(config: EngineConfig, world_size: int) -> bool:
    return config.zero_optimization.stage == 0 or (world_size == 1 and not _offloads(config))


@dataclass(frozen=True)
class _Sizes:
    """Parameters by number, on the fullest rank; and by bytes in the compute type."""

    trainable: int
    trainable_share: int
    share: int  # trainable and frozen
    with_master: int  # trainable ones that forward reads in another type than the optimizer
    unit_gradient: int  # trainable ones of the largest unit: a layer, an embedding, a head, or what is in neither
    whole: int  # bytes from here on
    layer: int
    two_layers: int
    embedding: int
    head: int
    rest: int


def _sizes_of(module: nn.Module, world_size: int, compute: int) -> _Sizes:
    parameters = list(module.parameters())
    trainable = [p for p in parameters if p.requires_grad]
    kept = {id(p) for child in fp32_modules(module) for p in child.parameters(recurse=False)}

    def in_compute_type(some: Iterable[nn.Parameter]) -> int:
        return sum(p.numel() * (FP32_BYTES if id(p) in kept else compute) for p in some)

    def gradient(some: Iterable[nn.Parameter]) -> int:
        return sum(p.numel() for p in some if p.requires_grad)

    blocks = [list(block.parameters()) for block in find_blocks(module)]
    embedding, head = ([] if end is None else list(end.parameters()) for end in find_ends(module))
    layers = sorted(map(in_compute_type, blocks), reverse=True)
    layer_gradients = [gradient(block) for block in blocks]
    whole, numel = in_compute_type(parameters), sum(p.numel() for p in trainable)
    ends = [gradient(embedding), gradient(head)]
    return _Sizes(
        trainable=numel,
        trainable_share=sum(_share(p, world_size) for p in trainable),
        share=sum(_share(p, world_size) for p in parameters),
        with_master=sum(p.numel() for p in trainable if id(p) not in kept) if compute < FP32_BYTES else 0,
        unit_gradient=max(*layer_gradients, *ends, numel - sum(layer_gradients) - sum(ends)),
        whole=whole,
        layer=sum(layers[:1]),
        two_layers=sum(layers[:2]),
        embedding=in_compute_type(embedding),
        head=in_compute_type(head),
        rest=whole - sum(layers) - in_compute_type(embedding) - in_compute_type(head),
    )


def _sizes_of_number(numel: int, largest_layer: int, world_size: int, compute: int) -> _Sizes:
    share = -(-numel // world_size)
    return _Sizes(
        trainable=numel,
        trainable_share=share,
        share=share,
        with_master=numel if compute < FP32_BYTES else 0,
        unit_gradient=largest_layer,
        whole=numel * compute,
        layer=largest_layer * compute,
        two_layers=2 * largest_layer * compute,
        embedding=0,
        head=0,
        rest=0,
    )


def _working(sizes: _Sizes, zero: ZeroConfig, world_size: int, sent_bytes: int) -> int:
    # gradients leave a unit at a time, from room that is kept for the largest
    sent = sent_bytes * sizes.unit_gradient
    if zero.stage < 3:
        return sent
    # backward begins with the head, goes through the layers and ends with the embedding
    group = zero.zero_hpz_partition_size
    # with hpZ each group keeps one copy of what it gathered in forward until backward gathers it again
    share = 1 / group if 1 < group < world_size else 0
    between = sizes.whole - sizes.rest - sizes.head
    gathered = (
        sizes.head + sizes.layer + share * between,
        sizes.two_layers + share * (between - sizes.layer),
        sizes.embedding,
    )
    return sizes.rest + int(max(gathered)) + sent


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
    """Bytes a rank needs, counted on a model that is built, sharded and updated without room for its numbers.

    The model lives on torch's "meta" device and the other ranks are simulated, so a laptop answers for 175
    billion parameters on 64 ranks in seconds. `parameters` at stages 1 and 2, `working` and `host` are by
    formula: they come and go, or lie elsewhere, only in a real run.

    Args:
        model: a function that builds the module (called under `torch.device("meta")`), or a transformers
            config of a causal language model.
        world_size: number of simulated ranks; the report is for rank 0, the fullest.

    Raises:
        ValueError: torch.distributed is already set up in this process.
    """
    if dist.is_initialized():
        raise ValueError("dry_run simulates a world of its own: call it where torch.distributed is not set up")
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
        resting, owned = _place(module, config, world_size)
    finally:
        dist.destroy_process_group()
    moments = 0
    if is_trained:
        for tensor in owned:
            tensor.grad = torch.zeros_like(tensor)
        optimizer = build_optimizer(owned, spec.type, spec.params)
        optimizer.step()
        moments = _bytes(value for state in optimizer.state.values() for value in state.values())
    stage = config.zero_optimization.stage
    is_replicated = _is_replicated(config, world_size)
    module_tensors = {id(tensor) for tensor in resting}
    masters = _bytes(tensor for tensor in owned if id(tensor) not in module_tensors)
    return replace(
        formula,
        parameters=_bytes(resting) if is_replicated or stage == 3 else formula.parameters,
        masters=masters if is_replicated or stage == 3 else _bytes(resting),
        gradients=formula.gradients if stage == 1 else _bytes(t.grad for t in owned if is_trained),
        moments=moments,
    )


def _place(module: nn.Module, config: EngineConfig, world_size: int) -> tuple[list[torch.Tensor], list[nn.Parameter]]:
    """Lay the module out over the ranks: the tensors that rest on this one, and those the optimizer owns."""
    dtype = compute_dtype(config)
    if _is_replicated(config, world_size):
        replicated = ReplicatedParameters(module, dtype, torch.device("meta"))
        return list(module.parameters()), [tensor for _, tensor in replicated.trainable]
    # Sharded as for a CPU, since FSDP2 knows no "meta" ranks; there are no numbers that could be moved there.
    module.to = lambda *_: module
    on_device = {"offload_param": OffloadConfig(), "offload_optimizer": OffloadConfig()}
    sharded = ShardedParameters(
        module, dtype, torch.device("cpu"), config.zero_optimization.model_copy(update=on_device)
    )
    # plain tensors of this rank's rows: on DTensors of a large model the optimizer alone takes a minute
    shards = {name: nn.Parameter(local(p.detach())) for name, p in module.named_parameters()}
    return list(shards.values()), [shards[name] for name, _ in sharded.trainable]


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


def _causal_model(config: PretrainedConfig) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config)
