"""All-gather and reduce-scatter between ranks on CPUs, in the form that FSDP2 takes them.

gloo's own send through rings with whole copies in between: on two ranks and 34 million numbers they took 4 and 2 times
as long as these, in which each rank sends each peer the part that is meant for it and adds up what comes in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


class _Allocator:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class ExchangeAllGather(_Allocator):
    """For `FSDPModule.set_custom_all_gather`."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """`output_tensor` `[ranks * n]` becomes all ranks' `input_tensor` `[n]` in order; done on return."""
        parts = output_tensor.chunk(group.size())
        own = parts[group.rank()]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        _exchange([own] * group.size(), parts, group)


class ExchangeReduceScatter(_Allocator):
    """For `FSDPModule.set_custom_reduce_scatter`."""

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
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"reduce-scatter adds up or averages, it knows no {op}")
        sent = input_tensor.chunk(group.size())
        received = [part if peer == group.rank() else torch.empty_like(part) for peer, part in enumerate(sent)]
        _exchange(sent, received, group)
        first, *others = received
        total = torch.add(first, others[0], out=output_tensor) if others else output_tensor.copy_(first)
        for part in others[1:]:
            total.add_(part)
        if op == dist.ReduceOp.AVG:
            total.div_(group.size())


def _exchange(sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Send `sent[peer]` to, and fill `received[peer]` from, every other rank of the group."""
    works = []
    # begin with the next rank up, so that not all ranks send to the same one first
    for distance in range(1, group.size()):
        to, source = ((group.rank() + step) % group.size() for step in (distance, -distance))
        works.append(dist.isend(sent[to], group=group, group_dst=to))
        works.append(dist.irecv(received[source], group=group, group_src=source))
    for work in works:
        work.wait()
