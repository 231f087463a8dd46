"""The swap from ZeRO shards to the inference layout, beside gathering whole tensors and slicing them.

    python -m bench.swap [--ranks 2] [--tp 1 2] [--sizes 34m 134m] [--rounds 7]

Each rank holds its rows of a stage-3 Llama in fp32 and computes in bf16. In turn, round after round: `swap`, the
engine's bucketed all-to-all (its time ends with the tensors in the layout; packing them for the matrix units is left
out, since whoever slices would pack too); `gather`, `full_tensor()` of each parameter, cast, and sliced into the same
layout. A line gives the median seconds of the slowest rank, the bytes a rank took from others, and for the swap its
speed to `gather` and `link_share`: the part of the bandwidth that one all-to-all of as many bytes in one piece reaches
between the same ranks.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import engine
from bench.common import SIZES, free_port, make_llama
from engine.hybrid.layout import Target
from engine.sharding import whole


def config(tp: int) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "hybrid_engine": {"enabled": True, "inference_tp_size": tp},
    }


def gather_and_slice(eng: engine.HybridEngine) -> tuple[Callable[[], list[torch.Tensor]], int]:
    """What takes whole tensors to the same layout, and the bytes that it takes from others."""
    swap = eng._core.swap
    parameters = dict(eng.module.named_parameters())
    local = sum(p.to_local().nbytes for p in parameters.values())

    def run() -> list[torch.Tensor]:
        full = {name: whole(p.detach()).to(torch.bfloat16) for name, p in parameters.items()}
        return [filled(target, full) for target in swap.targets]

    return run, sum(p.nbytes for p in parameters.values()) - local


def filled(target: Target, full: dict[str, torch.Tensor]) -> torch.Tensor:
    out = torch.zeros(target.shape, dtype=torch.bfloat16)
    for piece in target.pieces:
        block = full[piece.source][slice(*piece.rows)]
        block = block[:, slice(*piece.cols)] if block.dim() == 2 else block[:, None]
        region = out if out.dim() == 2 else out[:, None]
        row, col = piece.at
        block = block.t() if piece.flipped else block
        region[row : row + block.shape[0], col : col + block.shape[1]] = block
    return out


def all_to_all(received: int) -> Callable[[], None]:
    """As many bytes a rank, in one piece: those of the rank that receives most."""
    ranks = dist.get_world_size()
    each = int(engine.distributed.all_reduce_max([received])[0]) // (ranks - 1)
    sizes = [0 if rank == dist.get_rank() else each for rank in range(ranks)]
    send, receive = (torch.zeros(sum(sizes), dtype=torch.uint8) for _ in range(2))
    return lambda: dist.all_to_all_single(receive, send, sizes, sizes)


def rank_main(rank: int, ranks: int, port: int, tp: int, args: argparse.Namespace, size: str, out: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["WORLD_SIZE"] = str(ranks)
    torch.set_num_threads(args.threads)
    engine.init_distributed()
    eng = engine.initialize(make_llama(size, tied=True), config(tp))
    swap = eng._core.swap

    def swapped() -> list[torch.Tensor]:
        return [tensor for bucket in swap.run() for tensor in bucket.values()]

    gather, gathered_bytes = gather_and_slice(eng)
    with torch.no_grad():
        ours, theirs = swapped(), gather()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), "the two layouts differ"
        received = swap.bytes_received
        runs = {"swap": swapped, "gather": gather, "link": all_to_all(received)}
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(args.rounds):
            for name, run in runs.items():
                engine.distributed.barrier()
                started = time.perf_counter()
                run()
                slowest = engine.distributed.all_reduce_max([time.perf_counter() - started])[0]
                seconds[name].append(slowest)
    if rank == 0:
        out.send((seconds, received, gathered_bytes))
    dist.destroy_process_group()


def compare(size: str, ranks: int, tp: int, args: argparse.Namespace) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    port = free_port()
    processes = [
        context.Process(target=rank_main, args=(rank, ranks, port, tp, args, size, theirs)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    theirs.close()
    try:
        seconds, received, gathered = ours.recv()
    except EOFError:
        raise SystemExit("error: a rank failed; its message is above") from None
    finally:
        for process in processes:
            process.join()
    median = {name: statistics.median(values) for name, values in seconds.items()}
    same = {"size": size, "ranks": ranks, "tp": tp}
    ratio = statistics.median(g / s for g, s in zip(seconds["gather"], seconds["swap"], strict=True))
    share = statistics.median(link / s for link, s in zip(seconds["link"], seconds["swap"], strict=True))
    swap = {"seconds": round(median["swap"], 4), "bytes": received, "to_gather": round(ratio, 2)}
    print(json.dumps({**same, "name": "swap", **swap, "link_share": round(share, 3)}), flush=True)
    print(json.dumps({**same, "name": "gather", "seconds": round(median["gather"], 4), "bytes": gathered}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["34m", "134m"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2], help="each that divides the ranks is measured")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="processor threads a rank")
    args = parser.parse_args()
    for size in args.sizes:
        for ranks in args.ranks:
            for tp in [tp for tp in args.tp if ranks % tp == 0]:
                compare(size, ranks, tp, args)


if __name__ == "__main__":
    main()
