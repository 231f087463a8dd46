"""The exchanges that carry FSDP2 on CPUs, against torch.distributed's own and sums in float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from engine import exchange
from engine.exchange import ExchangeAllGather, ExchangeReduceScatter, whole
from tests.helpers import run_ranks

SIZES = (0, 1, 7, 1000, 300_001)


def _numbers(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * size + rank), dtype=torch.float64).to(dtype)


def _gather_everything(rank: int, ranks: int) -> None:
    gather = ExchangeAllGather()
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        for size in SIZES:
            own = _numbers(rank, size, dtype)
            expected = torch.cat([_numbers(peer, size, dtype) for peer in range(ranks)])
            output = gather.allocate((ranks * size,), dtype=dtype, device=torch.device("cpu"))
            gather(output, own, dist.group.WORLD)
            assert torch.equal(output, expected)
            # as FSDP2 has it: the input is this rank's part of the output
            output.fill_(3)
            part = output[rank * size : (rank + 1) * size].copy_(own)
            gather(output, part, dist.group.WORLD)
            assert torch.equal(output, expected)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_gather_puts_every_part_in_its_place(ranks):
    run_ranks(_gather_everything, ranks)


def _reduce_everything(rank: int, ranks: int, piece: int) -> list[torch.Tensor]:
    exchange._PIECE = piece
    reduce = ExchangeReduceScatter()
    results = []
    for size in SIZES:
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            own = _numbers(rank, ranks * size, torch.float32)
            before = own.clone()
            output = torch.full((size,), 3.0)
            reduce(output, own, dist.group.WORLD, op)
            assert torch.equal(own, before)
            parts = [_numbers(p, ranks * size, torch.float32)[rank * size : (rank + 1) * size] for p in range(ranks)]
            expected = torch.stack(parts).double().sum(0) / (ranks if op == dist.ReduceOp.AVG else 1)
            torch.testing.assert_close(output.double(), expected, rtol=1e-6, atol=1e-6)
            results.append(output)
    part = torch.full((3,), 256.0 if rank == 0 else 1.0).bfloat16()  # their sum is no bf16 number
    output = torch.empty(3)
    reduce(output, part.repeat(ranks), dist.group.WORLD, dist.ReduceOp.SUM)
    assert output.tolist() == [256.0 + ranks - 1] * 3
    _allocates_by_turns(reduce)
    with pytest.raises(ValueError, match="adds up or averages"):
        reduce(output, own, dist.group.WORLD, dist.ReduceOp.MAX)
    return results


def _allocates_by_turns(reduce: ExchangeReduceScatter) -> None:
    place = {"dtype": torch.bfloat16, "device": torch.device("cpu")}
    sent, sums = reduce.allocate((8,), **place), reduce.allocate((4,), **place)
    sent_next, sums_next = reduce.allocate((6,), **place), reduce.allocate((3,), **place)
    assert (sent.dtype, sums.dtype) == (torch.bfloat16, torch.float32)
    assert sent.data_ptr() == sent_next.data_ptr() and sums.data_ptr() != sums_next.data_ptr()
    bigger = reduce.allocate((2, 40), **place)
    assert bigger.shape == (2, 40) and bigger.dtype == torch.bfloat16
    reduce.allocate((40,), **place)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_reduce_scatter_adds_up_or_averages_this_ranks_part(ranks):
    run_ranks(_reduce_everything, ranks, exchange._PIECE)


@pytest.mark.parametrize("ranks", [2, 3])
def test_reduce_scatter_in_pieces(ranks):
    run_ranks(_reduce_everything, ranks, 997)


def _in_pairs(rank: int, ranks: int) -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    group = groups[0] if rank in (0, 2) else groups[1]
    peers = [0, 2] if rank in (0, 2) else [1, 3]  # torch sorts a group's ranks
    output = torch.empty(6)
    ExchangeAllGather()(output, torch.full((3,), float(rank)), group)
    assert output.tolist() == [float(peers[0])] * 3 + [float(peers[1])] * 3
    total = torch.empty(3)
    ExchangeReduceScatter()(total, torch.arange(6.0) * (rank + 1), group, dist.ReduceOp.SUM)
    start = 3 * peers.index(rank)
    factor = sum(peer + 1 for peer in peers)
    assert total.tolist() == [factor * float(start + i) for i in range(3)]


def test_in_groups_that_are_not_the_world():
    run_ranks(_in_pairs, 4)


def _make_whole(rank: int, ranks: int) -> None:
    meshes = [init_device_mesh("cpu", (ranks,))]
    if ranks == 4:
        meshes.append(init_device_mesh("cpu", (2, 2)))
    for number, mesh in enumerate(meshes):
        ways = [[Shard(0)], [Shard(1)], [Replicate()]]
        if number:
            ways = [[Replicate(), Shard(0)], [Shard(0), Replicate()], [Shard(0), Shard(1)], [Replicate(), Replicate()]]
        for shape in ((8, 3), (5, 3), (1, 4), (0, 3), (7,), (3, 2, 2)):
            for dtype in (torch.float32, torch.bfloat16, torch.int64):
                tensor = torch.arange(100.0)[: torch.Size(shape).numel()].view(shape).to(dtype)
                for placements in ways:
                    if len(shape) < 2 and Shard(1) in placements:
                        continue
                    dealt = distribute_tensor(tensor, mesh, placements)
                    assert torch.equal(whole(dealt), tensor), (shape, placements)
    parameter = torch.nn.Parameter(distribute_tensor(torch.arange(6.0).view(3, 2), meshes[0], [Shard(0)]))
    assert isinstance(parameter.data, DTensor) and not whole(parameter).requires_grad
    plain = torch.arange(3)
    assert whole(plain) is plain


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_dealt_tensor_is_made_whole(ranks):
    run_ranks(_make_whole, ranks)
