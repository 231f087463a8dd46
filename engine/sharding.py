"""Parameters sharded over ranks by FSDP2: ZeRO stages 1, 2 and 3.

Parameters rest as fp32 rows of dimension 0, with gradients and optimizer state sharded alike. What the
stages differ in:

| stage | gathered parameters live | gradients are reduced |
|---|---|---|
| 1 | from the first forward to the end of the last backward of an optimizer step | once an optimizer step |
| 2 | likewise | at every micro-batch |
| 3 | while their layer runs | at every micro-batch |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

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
from transformers import PreTrainedModel

from engine import distributed
from engine.config import ZeroConfig
from engine.exchange import ExchangeAllGather, ExchangeReduceScatter, whole
from engine.precision import fp32_modules


class ShardedParameters:
    """See the module's text. `trainable` lists (name, tensor the optimizer owns)."""

    # Each rank holds its rows of every gradient: a norm over them is summed over ranks.
    gradients_are_partial = True
    # What makes `gradients` the means over ranks: FSDP2 divides as it reduces, during the backward pass.
    gradient_scale = 1.0
    reduces_in_backward = True

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device, config: ZeroConfig):
        self.module = module
        self._stage = config.stage
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.float()
        # Offloaded, parameters, gradients and optimizer state all rest in CPU memory; layers visit the device.
        offload = config.offloads_parameters or config.offloads_optimizer
        asked = config.offload_param if config.offloads_parameters else config.offload_optimizer
        pin_memory = asked.pin_memory and device.type == "cuda"
        policy = CPUOffloadPolicy(pin_memory=pin_memory) if offload else OffloadPolicy()
        module.to("cpu" if offload else device)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        sent = sent_dtype(self._stage, dtype, device.type)
        _shard(module, mesh, dtype, sent, _reshard_after_forward(config, mesh.size()), policy)
        reduce_scatter = ExchangeReduceScatter()
        # gloo's own collectives are slow, and NCCL's are not
        for unit in self._units() if device.type == "cpu" else ():
            unit.set_custom_all_gather(ExchangeAllGather())
            unit.set_custom_reduce_scatter(reduce_scatter)
        if offload:
            _move_buffers(module, device)
        self.trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        # What one rank uses and another does not is reduced all the same, with zeros where there is no gradient.
        module.set_reduce_scatter_unused_params(True)
        self._used = dict.fromkeys((name for name, _ in self.trainable), False)  # on this rank, since the last update
        self._unwatched = set(self._used)

    def optimizer_parameter(self, name: str, parameter: nn.Parameter) -> torch.Tensor:
        return parameter

    def before_backward(self, is_boundary: bool) -> None:
        self._watch()
        if self._stage == 1:
            if is_boundary:
                self._complete_sums()
            for unit in self._units():
                # FSDP2 can put a reduction off only where there was a forward pass; elsewhere it has none to make
                unit.set_requires_gradient_sync(is_boundary or not _has_run(unit), recurse=False)
        if self._stage < 3:  # what the next micro-batch computes with is what this one did
            self.module.set_reshard_after_backward(is_boundary)

    def _watch(self) -> None:
        """Have backward note which parameters get a gradient: FSDP2 makes the tensors it sees as it first gathers."""
        for name, inner in self._inner_parameters() if self._unwatched else ():
            if name in self._unwatched and hasattr(inner, "_unsharded_param"):
                inner._unsharded_param.register_post_accumulate_grad_hook(partial(self._note, name))
                self._unwatched.remove(name)

    def _note(self, name: str, parameter: torch.Tensor) -> None:
        self._used[name] = True

    def _complete_sums(self) -> None:
        """Zeros for what no micro-batch before this one used: FSDP2 reduces the gradients of a unit in one type, and
        those that were added up are in fp32."""
        for unit in self._units():
            for group in _groups(unit):
                trained = [inner for inner in group.fsdp_params if inner.sharded_param.requires_grad]
                if any(inner.unsharded_accumulated_grad is not None for inner in trained):
                    for inner in trained:
                        if inner.unsharded_accumulated_grad is None:
                            zeros = torch.zeros_like(inner._unsharded_param, dtype=torch.float32, requires_grad=False)
                            inner.unsharded_accumulated_grad = zeros

    def to_rest(self) -> None:
        """See `to_shards`."""
        to_shards(self.module)

    def _units(self) -> Iterator[FSDPModule]:
        return (child for child in self.module.modules() if isinstance(child, FSDPModule))

    def reduce_gradients(self) -> None:
        """FSDP2 reduced them during the last backward pass. A parameter unused on every rank keeps none."""
        # The optimizer writes to the shards; a gathered copy left over would be stale afterwards.
        self.to_rest()
        for (_, parameter), is_used in zip(self.trainable, self._used_somewhere(), strict=True):
            if not is_used:
                parameter.grad = None

    def _used_somewhere(self) -> list[float]:
        return distributed.all_reduce_max(self._used.values())

    def gradients(self) -> list[torch.Tensor]:
        """The local rows of every gradient (an empty tensor where this rank has none of the rows)."""
        return [local(p.grad) for _, p in self.trainable if p.grad is not None]

    def zero_grad(self) -> None:
        for name, parameter in self.trainable:
            parameter.grad = None
            self._used[name] = False

    def accumulated_gradients(self) -> dict[str, torch.Tensor]:
        """The mean over ranks of what a step not yet taken has added up, by name. Collective."""
        used = zip(self.trainable, self._used_somewhere(), strict=True)
        means = {name: p.grad for (name, p), is_used in used if is_used and p.grad is not None}
        if self._stage == 1:
            for name, total in self._unreduced():
                dist.all_reduce(total)
                total.div_(dist.get_world_size())
                # rows that a resumed window brought along have been reduced before
                means[name] = total + whole(means[name]) if name in means else total
        return means

    def _unreduced(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, copy of the whole gradient) that stage 1 has added up on this rank alone; zeros where only
        other ranks have one."""
        found = list(self._inner_parameters())
        grads = [_unsharded_gradient(inner) for _, inner in found]
        used = torch.tensor([grad is not None for grad in grads], dtype=torch.int32)
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
        for (name, inner), grad, is_used in zip(found, grads, used.tolist(), strict=True):
            if is_used:
                total = torch.zeros(inner.sharded_param.shape, device=inner.device)
                yield name, total if grad is None else total.copy_(grad)

    def _inner_parameters(self) -> Iterator[tuple[str, Any]]:
        """(name, FSDP2's own object) of every trained parameter: it shows gradients that wait to nobody."""
        names = {id(p): name for name, p in self.trainable}
        for unit in self._units():
            for group in _groups(unit):
                for inner in group.fsdp_params:
                    if id(inner.sharded_param) in names:
                        yield names[id(inner.sharded_param)], inner

    def restore_gradients(self, means: dict[str, torch.Tensor]) -> None:
        """Go on from `accumulated_gradients`; FSDP2 adds what it reduces to what is there."""
        for name, parameter in self.trainable:
            self._used[name] = name in means
            if name in means:
                parameter.grad = means[name]
        for _, inner in self._inner_parameters():
            inner.unsharded_accumulated_grad = None
            if hasattr(inner, "_unsharded_param"):
                inner._unsharded_param.grad = None

    def after_update(self) -> None:
        pass

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor) of every parameter, gathered one at a time. Collective."""
        self.to_rest()
        for name, parameter in self.module.named_parameters():
            yield name, whole(parameter.detach())


def sent_dtype(stage: int, compute: torch.dtype, device_type: str) -> torch.dtype:
    """The type in which gradients travel: fp32, or on CPUs, where `ExchangeReduceScatter` adds up in fp32 what comes
    in another type, bf16 as backward made it (stage 1 has added up micro-batches in fp32 before)."""
    return compute if device_type == "cpu" and compute == torch.bfloat16 and stage > 1 else torch.float32


def _groups(unit: FSDPModule) -> list[Any]:
    """FSDP2's own objects of the parameters that a unit gathers together."""
    return unit._get_fsdp_state()._fsdp_param_groups


def _has_run(unit: FSDPModule) -> bool:
    return all(hasattr(inner, "_unsharded_param") for group in _groups(unit) for inner in group.fsdp_params)


def _unsharded_gradient(inner: Any) -> torch.Tensor | None:
    if inner.unsharded_accumulated_grad is not None:
        return inner.unsharded_accumulated_grad
    return inner._unsharded_param.grad if hasattr(inner, "_unsharded_param") else None


def to_shards(module: nn.Module) -> None:
    """Give gathered copies back: after a forward pass that no backward pass will follow or an error in either, and
    before shards are read or written. Gradients that were added up stay."""
    # Nothing is gathered before the first forward pass. `reshard` of each unit would leave those as they are that an
    # error stopped in the middle of their forward pass.
    if isinstance(module, FSDPModule) and module._get_fsdp_state()._is_root:
        module.reset_iter_state()


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


def find_ends(module: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """Embedding and head of the transformers model inside `module`: units of their own, used at one end each.

    None for one that is not there, shares a parameter (tied) or lies in a layer.
    """
    uses = Counter(id(p) for child in module.modules() for p in child.parameters(recurse=False))
    in_layers = {id(child) for block in find_blocks(module) for child in block.modules()}
    ends: list[nn.Module | None] = []
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        owners = (child for child in module.modules() if isinstance(child, PreTrainedModel))
        found = [end for end in (_asked(owner, getter) for owner in owners) if end is not None]
        end = found[0] if found else None
        alone = end is not None and _has_parameters(end) and all(uses[id(p)] == 1 for p in end.parameters())
        ends.append(end if alone and id(end) not in in_layers else None)
    return ends[0], ends[1]


def _asked(owner: PreTrainedModel, getter: str) -> nn.Module | None:
    try:
        return getattr(owner, getter)()
    except NotImplementedError:  # how transformers says that there is none
        return None


def _reshard_after_forward(config: ZeroConfig, ranks: int) -> bool | int:
    """Whether layers give their copy back after forward: at stage 3, down to a part in each group of hpZ's size."""
    if config.stage < 3:
        return False
    return config.zero_hpz_partition_size if 1 < config.zero_hpz_partition_size < ranks else True


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
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool | int,
    offload_policy: OffloadPolicy,
) -> None:
    shared = {"mesh": mesh, "offload_policy": offload_policy}
    policy = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=reduce_dtype)
    # A module that stays fp32 is a unit of its own with a policy of its own, and casts its input up.
    fp32_policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    if dtype != torch.float32:
        for child in fp32_modules(module):
            fully_shard(child, **shared, mp_policy=fp32_policy, reshard_after_forward=reshard_after_forward)
    embedding, head = find_ends(module)
    has_unit = embedding is None or isinstance(embedding, FSDPModule)
    units = [*([] if has_unit else [embedding]), *find_blocks(module)]
    for unit in units:
        fully_shard(unit, **shared, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    # What runs last in forward runs first in backward: freeing it between would gather it twice at once.
    if head is not None and not isinstance(head, FSDPModule):
        fully_shard(head, **shared, mp_policy=policy, reshard_after_forward=False)
        units.append(head)
    # The rest is the root unit: the last norm, and embedding and head where they are one parameter.
    fully_shard(module, **shared, mp_policy=policy, reshard_after_forward=False)
    # Each unit asks for the next one's parameters before it computes; backward does so by itself.
    for unit, following in pairwise(units):
        unit.set_modules_to_forward_prefetch([following])
