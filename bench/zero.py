"""Training speed of the ZeRO engine beside a hand-written FSDP2 loop, DDP, plain torch and, where installed, DeepSpeed.

    python -m bench.zero [--ranks 1 2] [--stages 0 1 2 3] [--dtypes bf16 fp32] [--size 34m] [--rounds 7]

All contenders of one rank count and type live in the same processes and run in turn, round after round, on the same
batches; a line gives the median over rounds of tokens per second, of its ratio to each peer, and the last loss (the
same for all of one type, or they did not do the same). Peak memory comes from runs of each contender alone.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

import engine
from bench import zero_peers
from bench.common import SIZES, free_port, make_llama


def make_model(args: argparse.Namespace) -> torch.nn.Module:
    """A Llama with untied embeddings, the same on every rank and for every contender."""
    model = make_llama(args.size, tied=False).to(engine.distributed.device())
    model.config.use_cache = False
    return model


def make_batches(args: argparse.Namespace) -> list[torch.Tensor]:
    """Token ids `[micro, length]` of one optimizer step, this rank's own."""
    generator = torch.Generator().manual_seed(1 + engine.distributed.rank())
    shape = (args.accumulation, args.micro, args.length)
    ids = torch.randint(SIZES[args.size][-1], shape, generator=generator)
    return list(ids.to(engine.distributed.device()))


def contenders(args: argparse.Namespace, ranks: int) -> dict[str, Callable[..., Any]]:
    """Name -> maker of a function that takes one optimizer step."""
    stages = args.stages if ranks > 1 else args.stages[:1]  # over one rank all stages are one layout
    found: dict[str, Callable[..., Any]] = {}
    for stage in stages:
        found[f"engine-{stage}" if ranks > 1 else "engine"] = lambda *a, s=stage: zero_peers.engine_step(*a, stage=s)
    if ranks == 1:
        found["torch"] = zero_peers.torch_step
    else:
        found["ddp"] = zero_peers.ddp_step
        for stage in [stage for stage in stages if stage > 0]:
            found[f"fsdp2-{stage}"] = lambda *a, s=stage: zero_peers.fsdp2_step(*a, stage=s)
    if find_spec("deepspeed") is not None:
        for stage in stages:
            found[f"deepspeed-{stage}"] = lambda *a, s=stage: zero_peers.deepspeed_step(*a, stage=s)
    return found


def rank_main(
    rank: int, ranks: int, port: int, args: argparse.Namespace, dtype: str, only: str | None, out: Any
) -> None:
    """One rank's part: every contender in turn, or `only` one of them for its memory."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["WORLD_SIZE"] = str(ranks)
    torch.set_num_threads(args.threads)
    engine.init_distributed()
    before = peak_bytes()
    batches = make_batches(args)
    makers = contenders(args, ranks)
    steps = {
        name: make(make_model(args), getattr(torch, {"bf16": "bfloat16", "fp32": "float32"}[dtype]), args)
        for name, make in makers.items()
        if only in (None, name)
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, float] = {}
    for number in range((args.rounds if only is None else 1) + 1):  # the first round warms up
        # there and back, so that nobody always has the same one before it
        for name, step in list(steps.items())[:: 1 if number % 2 else -1]:
            engine.distributed.barrier()
            started = time.perf_counter()
            for _ in range(args.steps):
                losses[name] = float(step(batches))
            engine.distributed.barrier()
            if number:
                seconds[name].append((time.perf_counter() - started) / args.steps)
    peak = engine.distributed.all_reduce_max([peak_bytes() - before])[0]
    if rank == 0:
        out.send((seconds, losses, peak))
    if dist.is_initialized():
        dist.destroy_process_group()


def peak_bytes() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run(ranks: int, args: argparse.Namespace, dtype: str, only: str | None = None) -> tuple[dict, dict, float]:
    """Rank 0's figures of one set of processes."""
    # forked from a server that has imported everything once: seconds less for each of many short runs
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.zero_peers", "transformers.models.llama.modeling_llama"])
    port = free_port()
    ours, theirs = context.Pipe(duplex=False)
    processes = [
        context.Process(target=rank_main, args=(rank, ranks, port, args, dtype, only, theirs)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        raise SystemExit("error: a rank failed; its message is above") from None
    finally:
        for process in processes:
            process.join()


def report(ranks: int, dtype: str, args: argparse.Namespace) -> None:
    """Print one JSON line a contender."""
    seconds, losses, _ = run(ranks, args, dtype)
    tokens = args.micro * args.length * args.accumulation * ranks
    peers = [name for name in seconds if not name.startswith("engine")]
    for name, own in seconds.items():
        line: dict[str, Any] = {"ranks": ranks, "dtype": dtype, "name": name}
        line["tokens_per_second"] = round(tokens / statistics.median(own), 1)
        if name.startswith("engine"):
            for peer in peers:
                # of rounds side by side, so that a slow moment of the machine hits both
                ratios = [theirs / ours for ours, theirs in zip(own, seconds[peer], strict=True)]
                line[f"to_{peer}"] = round(statistics.median(ratios), 3)
        line["loss"] = round(losses[name], 4)
        if not args.no_memory:
            line["peak_mb"] = round(run(ranks, args, dtype, only=name)[2] / 2**20, 1)
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--dtypes", nargs="+", choices=["bf16", "fp32"], default=["bf16", "fp32"])
    parser.add_argument("--size", choices=list(SIZES), default="34m")
    parser.add_argument("--micro", type=int, default=4, help="rows a micro-batch")
    parser.add_argument("--length", type=int, default=256, help="tokens a row")
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches an optimizer step")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps a contender takes in a round")
    parser.add_argument("--threads", type=int, default=1, help="processor threads a rank")
    parser.add_argument("--no-memory", action="store_true", help="skip the runs that measure memory")
    args = parser.parse_args()
    for ranks in args.ranks:
        for dtype in args.dtypes:
            report(ranks, dtype, args)


if __name__ == "__main__":
    main()
