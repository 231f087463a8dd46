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

# A piece big enough that a collective's latency does not count, small enough that the pieces overlap.
PIECE_ELEMENTS = 16 * 1024 * 1024


class ReplicatedParameters:
    """See the module's text. `trainable` lists (name, tensor the optimizer owns).

    Args:
        predivide: what gradients are divided by before the sum over ranks, the rest of the mean's division
            following after it; None divides by the rank count before. Only rounding and range differ.
    """

    # Every rank holds every gradient after `reduce_gradients`, so a norm over them needs no sum over ranks.
    gradients_are_partial = False
    reduces_in_backward = False

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device, predivide: float | None = 1.0):
        self.module = module.to(device)
        world = distributed.world_size()
        self._predivide = world if predivide is None else predivide
        # What makes `gradients` the means over ranks: left to the engine, which multiplies them anyway.
        self.gradient_scale = self._predivide / world if world > 1 else 1.0
        self._masters: dict[str, torch.Tensor] = {}
        fp32 = {id(p) for child in fp32_modules(module) for p in child.parameters(recurse=False)}
        self._computed_with: list[torch.Tensor] = []  # in the masters' order
        for name, parameter in module.named_parameters():
            # parameters alone are cast: buffers such as rotary frequencies keep their precision
            own_dtype = torch.float32 if id(parameter) in fp32 else dtype
            if parameter.requires_grad and own_dtype != torch.float32:
                self._masters[name] = nn.Parameter(parameter.detach().float().clone())
                self._computed_with.append(parameter)
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(own_dtype)
        self.trainable = [
            (name, self._masters.get(name, parameter))
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        ]
        # Alone and in fp32, torch's own gradients are all that is needed.
        self._sums: _GradientSums | None = None
        if self._masters or (self.trainable and world > 1):
            self._sums = _GradientSums([tensor for _, tensor in self.trainable])
            trained = (parameter for parameter in module.parameters() if parameter.requires_grad)
            for index, parameter in enumerate(trained):
                parameter.register_post_accumulate_grad_hook(self._sums.adder(index))

    def optimizer_parameter(self, name: str, parameter: nn.Parameter) -> torch.Tensor:
        """The tensor the optimizer owns in place of the module's `parameter`."""
        return self._masters.get(name, parameter)

    def before_backward(self, is_boundary: bool) -> None:
        pass

    def to_rest(self) -> None:
        pass

    def reduce_gradients(self) -> None:
        """Sum the gradients over ranks. A parameter unused on every rank keeps none."""
        if self._sums is None:
            return
        used = self._sums.reduce(self._predivide)
        for (_, tensor), total, is_used in zip(self.trainable, self._sums.views, used, strict=True):
            tensor.grad = total if is_used else None

    def gradients(self) -> list[torch.Tensor]:
        """Of every used parameter; the mean over ranks is `gradient_scale` times it."""
        return [tensor.grad for _, tensor in self.trainable if tensor.grad is not None]

    def zero_grad(self) -> None:
        for _, tensor in self.trainable:
            tensor.grad = None
        if self._sums is not None:
            self._sums.clear()

    def accumulated_gradients(self) -> dict[str, torch.Tensor]:
        """The mean over ranks of what a step not yet taken has added up, by name. Collective."""
        if self._sums is None:
            return {name: tensor.grad for name, tensor in self.trainable if tensor.grad is not None}
        means, used = self._sums.mean_of_copy()
        return {name: mean for (name, _), mean, is_used in zip(self.trainable, means, used, strict=True) if is_used}

    def restore_gradients(self, means: dict[str, torch.Tensor]) -> None:
        """Go on from `accumulated_gradients`: a mean on every rank has itself as its mean."""
        for index, (name, tensor) in enumerate(self.trainable):
            if name in means and self._sums is None:
                tensor.grad = means[name]
            elif name in means:
                self._sums.add(index, means[name])

    def after_update(self) -> None:
        """Bring the updated masters into the module."""
        if self._masters:
            with torch.no_grad():
                torch._foreach_copy_(self._computed_with, list(self._masters.values()))

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor) of every parameter; masters where there are any."""
        for name, parameter in self.module.named_parameters():
            yield name, self._masters.get(name, parameter).detach()


class _GradientSums:
    """The fp32 sums of all gradients, side by side in one tensor that collectives take without a copy.

    Behind them lies one number a parameter: on how many ranks it was used.
    """

    def __init__(self, like: list[torch.Tensor]):
        self._like = like
        self._used = [False] * len(like)
        self._flat: torch.Tensor | None = None
        self.views: list[torch.Tensor] = []

    def adder(self, index: int):
        """A hook that moves a parameter's gradient here as soon as backward has it."""

        def add(parameter: nn.Parameter) -> None:
            self.add(index, parameter.grad)
            parameter.grad = None

        return add

    def add(self, index: int, grad: torch.Tensor) -> None:
        if self._flat is None:
            self._allocate()
        if self._used[index]:
            self.views[index].add_(grad)
        else:
            self.views[index].copy_(grad)
            self._used[index] = True

    def clear(self) -> None:
        # the numbers stay: the first `add` of each parameter overwrites them
        self._used = [False] * len(self._like)

    def reduce(self, predivide: float) -> list[bool]:
        """Divide, sum over ranks in place; which parameters any rank used."""
        if distributed.world_size() == 1 and self._flat is not None:
            return self._used
        self._complete()
        if predivide != 1.0:
            self._flat.div_(predivide)
        return _sum_over_ranks(self._flat, len(self._used))

    def mean_of_copy(self) -> tuple[list[torch.Tensor], list[bool]]:
        """The means over ranks and which parameters any rank used, with nothing here changed."""
        self._complete()
        copy = self._flat.clone()
        used = _sum_over_ranks(copy, len(self._used))
        return self._split(copy.div_(distributed.world_size())), used

    def _complete(self) -> None:
        if self._flat is None:
            self._allocate()
        for view, is_used in zip(self.views, self._used, strict=True):
            if not is_used:
                view.zero_()
        self._flat[-len(self._used) :] = self._flat.new_tensor(self._used)

    def _allocate(self) -> None:
        device = self._like[0].device
        numel = sum(tensor.numel() for tensor in self._like)
        self._flat = torch.empty(numel + len(self._like), dtype=torch.float32, device=device)
        self.views = self._split(self._flat)

    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        sizes = [tensor.numel() for tensor in self._like]
        pieces = flat[: sum(sizes)].split(sizes)
        return [piece.view(tensor.shape) for piece, tensor in zip(pieces, self._like, strict=True)]


def _sum_over_ranks(flat: torch.Tensor, flags: int) -> list[bool]:
    if distributed.world_size() > 1:
        works = [dist.all_reduce(piece, async_op=True) for piece in flat.split(PIECE_ELEMENTS)]
        for work in works:
            work.wait()
    return (flat[-flags:] > 0).tolist()
