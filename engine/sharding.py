"""Parameters sharded over ranks by FSDP2: ZeRO stages 1, 2 and 3.

Parameters rest as fp32 rows of dimension 0, with gradients and optimizer state sharded alike. What the
stages differ in:

| stage | gathered parameters live | gradients are reduced |
|---|---|---|
| 1 | from forward to the end of backward | once an optimizer step |
| 2 | from forward to the end of backward | at every micro-batch |
| 3 | while their layer runs | at every micro-batch |
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from engine.config import ZeroConfig
from engine.precision import fp32_modules


class ShardedParameters:
    """See the module's text. `trainable` lists (name, tensor the optimizer owns)."""

    # Each rank holds its rows of every gradient: a norm over them is summed over ranks.
    gradients_are_partial = True

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device, config: ZeroConfig):
        self.module = module
        self._stage = config.stage
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.float()
        # Offloaded, parameters, gradients and optimizer state all rest in CPU memory; layers visit the device.
        offload = config.offloads_parameters or config.offloads_optimizer
        policy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
        module.to("cpu" if offload else device)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        _shard(module, mesh, dtype, reshard_after_forward=self._stage == 3, offload_policy=policy)
        if offload:
            _move_buffers(module, device)
        self.trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]

    def optimizer_parameter(self, name: str, parameter: nn.Parameter) -> torch.Tensor:
        return parameter

    def before_backward(self, is_boundary: bool) -> None:
        if self._stage == 1:
            self.module.set_requires_gradient_sync(is_boundary)

    def after_forward(self) -> None:
        """Back to shards after a forward pass that no backward pass will follow."""
        for child in self.module.modules():
            if isinstance(child, FSDPModule):
                child.reshard()

    def reduce_gradients(self) -> None:
        """Nothing left to do: FSDP2 reduced them during the last backward pass."""
        # The optimizer writes to the shards; a gathered copy left over would be stale afterwards.
        self.after_forward()

    def gradients(self) -> list[torch.Tensor]:
        """The local rows of every gradient (an empty tensor where this rank has none of the rows)."""
        return [local(p.grad) for _, p in self.trainable if p.grad is not None]

    def zero_grad(self) -> None:
        for _, parameter in self.trainable:
            parameter.grad = None

    def after_update(self) -> None:
        pass

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor) of every parameter, gathered one at a time. Collective."""
        self.after_forward()
        for name, parameter in self.module.named_parameters():
            yield name, whole(parameter.detach())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a sharded one (collective), or the tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a sharded tensor, or the tensor itself; shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """The repeated layers of `module`, each of which is gathered and freed as one unit.

    Taken from the `_no_split_modules` class names of the transformers models inside; a module without
    them has its ModuleLists' elements taken; one without either is a single unit.
    """
    names = {name for child in module.modules() for name in (getattr(child, "_no_split_modules", None) or ())}
    blocks = [child for child in module.modules() if type(child).__name__ in names and _has_parameters(child)]
    if not blocks:
        blocks = [
            element
            for child in module.modules()
            if isinstance(child, nn.ModuleList)
            for element in child
            if _has_parameters(element)
        ]
    # an outer block swallows inner ones: nested units would gather twice
    inner = {id(child) for block in blocks for child in block.modules() if child is not block}
    return [block for block in blocks if id(block) not in inner]


def _has_parameters(module: nn.Module) -> bool:
    return next(iter(module.parameters()), None) is not None


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    """Buffers are small and whole on every rank: they stay where the computation is."""
    for child in module.modules():
        for name, buffer in child.named_buffers(recurse=False):
            setattr(child, name, buffer.to(device))


def _shard(
    module: nn.Module,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    reshard_after_forward: bool,
    offload_policy: OffloadPolicy,
) -> None:
    shared = {"mesh": mesh, "offload_policy": offload_policy}
    policy = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
    # A module that stays fp32 is a unit of its own with a policy of its own, and casts its input up.
    fp32_policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    if dtype != torch.float32:
        for child in fp32_modules(module):
            fully_shard(child, **shared, mp_policy=fp32_policy, reshard_after_forward=reshard_after_forward)
    for block in find_blocks(module):
        fully_shard(block, **shared, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    # Embedding, last norm and head (tied or not) form the root unit, which stays gathered between
    # forward and backward: its layers run first and last, so freeing it would gather it twice at once.
    fully_shard(module, **shared, mp_policy=policy, reshard_after_forward=False)
