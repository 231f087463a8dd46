"""All-gather and reduce-scatter between ranks on CPUs, in the form that FSDP2 takes them, and tensors made whole.

gloo's own send through rings with whole copies in between: on two ranks and 34 million numbers they took 4 and 2 times
as long as these, in which each rank sends each peer the part that is meant for it and adds up what comes in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

# Numbers that a reduction receives at once, from all peers together: few enough for memory that the allocator has at
# hand (new pages cost as much as the sending), enough that a message's own cost is lost in them.
_PIECE = 2**22


class ExchangeAllGather:
    """For `FSDPModule.set_custom_all_gather`."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """`output_tensor` `[ranks * n]` becomes all ranks' `input_tensor` `[n]` in order; done on return."""
        parts = output_tensor.chunk(group.size())
        own = parts[group.rank()]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        for work in _exchange([own] * group.size(), parts, group):
            work.wait()


class ExchangeReduceScatter:
    """For `FSDPModule.set_custom_reduce_scatter`, one for all units.

    Sums are made in fp32 whatever type is sent, so bf16 gradients travel as they are and lose nothing. What is sent
    lies in memory for the largest unit that is taken once, as new pages for each unit cost as much as the sending.
    """

    def __init__(self):
        self._is_input = True
        self._room = torch.empty(0, dtype=torch.uint8)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """FSDP2 asks by turns for what it will send, and for the sums, which it keeps as gradients."""
        is_input, self._is_input = self._is_input, not self._is_input
        if not is_input:
            return torch.empty(*size, device=device)
        needed = math.prod(size) * dtype.itemsize
        if self._room.numel() < needed:
            self._room = torch.empty(needed, dtype=torch.uint8)
        return self._room[:needed].view(dtype).view(*size)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """`output_tensor` `[n]` becomes the sum or mean over ranks of their `input_tensor` `[ranks * n]`'s part that
        has this rank's number, added up in the ranks' order; done on return.

        Raises:
            ValueError: `op` is neither SUM nor AVG.
        """
        self._is_input = True
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"reduce-scatter adds up or averages, it knows no {op}")
        length = -(-_PIECE // group.size())
        pieces = zip(*(part.split(length) for part in input_tensor.chunk(group.size())), strict=True)
        waiting = None
        for sums, sent in zip(output_tensor.split(length), pieces, strict=True):
            received = [part if rank == group.rank() else torch.empty_like(part) for rank, part in enumerate(sent)]
            works = _exchange(sent, received, group)
            # one piece is on its way while the one before it is added up
            if waiting is not None:
                _add_up(*waiting, op)
            waiting = sums, received, works
        if waiting is not None:
            _add_up(*waiting, op)


@torch.no_grad()
def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a sharded one (collective, no gradient goes through it), or the tensor itself.

    One that is not dealt to more ranks than this one shares its memory.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    dealt = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if tensor.device.type != "cpu" or len(dealt) > 1 or any(tensor.placements[dim] != Shard(0) for dim in dealt):
        return tensor.full_tensor()
    own = tensor.to_local()
    if not dealt or tensor.device_mesh.size(dealt[0]) == 1:
        return own
    group = tensor.device_mesh.get_group(dealt[0])
    full = torch.empty(tensor.shape, dtype=tensor.dtype)
    parts = list(full.chunk(group.size()))
    parts += [full[:0]] * (group.size() - len(parts))  # rows did not suffice for the last ranks
    parts[group.rank()].copy_(own)
    for work in _exchange([own.contiguous()] * group.size(), parts, group):
        work.wait()
    return full


def _add_up(sums: torch.Tensor, received: list[torch.Tensor], works: list[dist.Work], op) -> None:
    for work in works:
        work.wait()
    sums.copy_(received[0])
    for part in received[1:]:
        sums.add_(part)
    if op == dist.ReduceOp.AVG:
        sums.div_(len(received))


def _exchange(sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list:
    """Begin to send `sent[peer]` to, and to fill `received[peer]` from, every other rank of the group. What has no
    numbers is not sent."""
    works = []
    # begin with the next rank up, so that not all ranks send to the same one first
    for distance in range(1, group.size()):
        to, source = ((group.rank() + step) % group.size() for step in (distance, -distance))
        if sent[to].numel():
            works.append(dist.isend(sent[to], group=group, group_dst=to))
        if received[source].numel():
            works.append(dist.irecv(received[source], group=group, group_src=source))
    return works
