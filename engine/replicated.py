"""Parameters held whole on every rank: ZeRO stage 0, and every stage in a world of one.

In bf16 and fp16 the module computes with parameters in that type, and an fp32 master of each trainable
one is what the optimizer updates. Gradients are added up in fp32 as each becomes ready, since a sum of
bf16 micro-batch gradients would lose the small ones, and are averaged over ranks once an optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from engine import distributed
from engine.precision import fp32_modules

# A bucket big enough that a collective's latency does not count, small enough not to double the gradients.
BUCKET_ELEMENTS = 16 * 1024 * 1024


class ReplicatedParameters:
    """See the module's text. `trainable` lists (name, tensor the optimizer owns)."""

    # Every rank holds every gradient after `reduce_gradients`, so a norm over them needs no sum over ranks.
    gradients_are_partial = False

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device):
        self.module = module.to(device)
        self._masters: dict[str, torch.Tensor] = {}
        fp32 = {id(p) for child in fp32_modules(module) for p in child.parameters(recurse=False)}
        for name, parameter in module.named_parameters():
            # parameters alone are cast: buffers such as rotary frequencies keep their precision
            own_dtype = torch.float32 if id(parameter) in fp32 else dtype
            if parameter.requires_grad and own_dtype != torch.float32:
                master = nn.Parameter(parameter.detach().float().clone())
                self._masters[name] = master
                parameter.data = parameter.data.to(own_dtype)
                parameter.register_post_accumulate_grad_hook(_adder(master))
            elif parameter.is_floating_point():
                parameter.data = parameter.data.to(own_dtype)
        self.trainable = [
            (name, self._masters.get(name, parameter))
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        ]

    def optimizer_parameter(self, name: str, parameter: nn.Parameter) -> torch.Tensor:
        """The tensor the optimizer owns in place of the module's `parameter`."""
        return self._masters.get(name, parameter)

    def before_backward(self, is_boundary: bool) -> None:
        pass

    def after_forward(self) -> None:
        pass

    def reduce_gradients(self) -> None:
        """Average the gradients over ranks. A parameter unused on every rank keeps none."""
        world = distributed.world_size()
        if world == 1:
            return
        used = torch.tensor([p.grad is not None for _, p in self.trainable], dtype=torch.int32)
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
        bucket: list[torch.Tensor] = []
        for (_, parameter), is_used in zip(self.trainable, used.tolist(), strict=True):
            if not is_used:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            bucket.append(parameter.grad)
            if sum(grad.numel() for grad in bucket) >= BUCKET_ELEMENTS:
                _all_reduce_mean(bucket, world)
                bucket = []
        if bucket:
            _all_reduce_mean(bucket, world)

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for _, p in self.trainable if p.grad is not None]

    def zero_grad(self) -> None:
        for _, parameter in self.trainable:
            parameter.grad = None
        for parameter in self.module.parameters():
            parameter.grad = None

    def after_update(self) -> None:
        """Bring the updated masters into the module."""
        if not self._masters:
            return
        targets = dict(self.module.named_parameters())
        with torch.no_grad():
            torch._foreach_copy_([targets[name] for name in self._masters], list(self._masters.values()))

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor) of every parameter; masters where there are any."""
        for name, parameter in self.module.named_parameters():
            yield name, self._masters.get(name, parameter).detach()


def _adder(master: torch.Tensor):
    def add(parameter: nn.Parameter) -> None:
        grad = parameter.grad
        if master.grad is None:
            master.grad = grad.float()
        else:
            master.grad.add_(grad)
        parameter.grad = None

    return add


def _all_reduce_mean(grads: list[torch.Tensor], world: int) -> None:
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    dist.all_reduce(flat)
    flat.div_(world)
    pieces = flat.split([grad.numel() for grad in grads])
    torch._foreach_copy_(grads, [p.view_as(g) for p, g in zip(pieces, grads, strict=True)])
