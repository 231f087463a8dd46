"""The ranks that generate together: a tensor-parallel group of neighbours, and its collectives."""

from __future__ import annotations

import torch
import torch.distributed as dist


class TensorParallel:
    """Group of `size` neighbouring ranks that this rank belongs to; size 1 has no group and no traffic.

    Neighbours, so that a group stays inside a node. Building it is collective over all ranks.
    """

    def __init__(self, size: int = 1):
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world % size:
            raise ValueError(
                f"hybrid_engine.inference_tp_size={size} does not divide the {world} ranks: use a divisor of {world}"
            )
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.size, self.rank, self.index = size, rank % size, rank // size
        self.group = None
        if size > 1:
            for first in range(0, world, size):
                group = dist.new_group(list(range(first, first + size)))
                if first == self.index * size:
                    self.group = group

    def sum_(self, x: torch.Tensor) -> torch.Tensor:
        """`x` summed over the group, in place."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def concatenate(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's `x` `[rows, part]` side by side: `[rows, size * part]`."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)

    def smallest(self, number: int) -> int:
        """The least of the group's numbers."""
        return min(self.gather_objects(number))

    def gather_objects(self, value: object) -> list:
        """Every rank's picklable `value`, in rank order."""
        if self.size == 1:
            return [value]
        values: list = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values
