"""Training speed of the ZeRO engine beside a hand-written FSDP2 loop, DDP, plain torch and, where installed, DeepSpeed.

    python -m bench.zero [--ranks 1 2] [--stages 0 1 2 3] [--dtypes bf16 fp32] [--size 34m] [--rounds 7]

Every contender has processes of its own, as its users have it, and those of one stage step in turn, round after round,
on the same batches; a line gives the median over rounds of tokens per second, of its ratio to each peer, the last loss
(the same for all of one type, or they did not do the same) and the peak memory of its fullest rank.
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
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
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


def contenders(ranks: int, stage: int) -> dict[str, Callable[..., Any]]:
    """Name -> maker of a function that takes one optimizer step."""
    found: dict[str, Callable[..., Any]] = {}
    found[f"engine-{stage}" if ranks > 1 else "engine"] = partial(zero_peers.engine_step, stage=stage)
    if ranks == 1:
        found["torch"] = zero_peers.torch_step
    elif stage == 0:
        found["ddp"] = zero_peers.ddp_step
    else:
        found[f"fsdp2-{stage}"] = partial(zero_peers.fsdp2_step, stage=stage)
    if find_spec("deepspeed") is not None:
        found[f"deepspeed-{stage}"] = partial(zero_peers.deepspeed_step, stage=stage)
    return found


def rank_main(
    rank: int, ranks: int, port: int, args: argparse.Namespace, dtype: str, make: Callable[..., Any], pipe: Connection
) -> None:
    """One rank of one contender: a round whenever it is told to, answered with seconds a step, last loss, peak."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["WORLD_SIZE"] = str(ranks)
    torch.set_num_threads(args.threads)
    engine.init_distributed()
    before = peak_bytes()
    batches = make_batches(args)
    step = make(make_model(args), getattr(torch, {"bf16": "bfloat16", "fp32": "float32"}[dtype]), args)
    while pipe.recv():
        engine.distributed.barrier()
        started = time.perf_counter()
        for _ in range(args.steps):
            loss = float(step(batches))
        engine.distributed.barrier()
        pipe.send(((time.perf_counter() - started) / args.steps, loss, peak_bytes() - before))
    if dist.is_initialized():
        dist.destroy_process_group()


def peak_bytes() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Contender:
    """The processes of one contender."""

    def __init__(self, ranks: int, args: argparse.Namespace, dtype: str, make: Callable[..., Any]):
        # forked from a server that has imported everything once: seconds less for each
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["bench.zero_peers", "transformers.models.llama.modeling_llama"])
        port = free_port()
        self.pipes, self.processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            parts = (rank, ranks, port, args, dtype, make, theirs)
            self.processes.append(context.Process(target=rank_main, args=parts, daemon=True))
            self.processes[-1].start()
            theirs.close()
            self.pipes.append(ours)

    def round(self) -> tuple[float, float, float]:
        """Seconds a step, last loss and peak bytes, the most of all ranks."""
        for pipe in self.pipes:
            pipe.send(True)
        try:
            seconds, losses, peaks = zip(*(pipe.recv() for pipe in self.pipes), strict=True)
        except EOFError:
            raise SystemExit("error: a rank failed; its message is above") from None
        return max(seconds), losses[0], max(peaks)

    def leave(self) -> None:
        for pipe in self.pipes:
            pipe.send(False)
        for process in self.processes:
            process.join()


def report(ranks: int, dtype: str, stage: int, args: argparse.Namespace) -> None:
    """Print one JSON line a contender."""
    group = {name: Contender(ranks, args, dtype, make) for name, make in contenders(ranks, stage).items()}
    seconds: dict[str, list[float]] = {name: [] for name in group}
    last: dict[str, tuple[float, float]] = {}
    for number in range(args.rounds + 1):  # the first round warms up
        # there and back, so that nobody always has the same one before it
        for name, contender in list(group.items())[:: 1 if number % 2 else -1]:
            took, *last[name] = contender.round()
            if number:
                seconds[name].append(took)
    for contender in group.values():
        contender.leave()
    tokens = args.micro * args.length * args.accumulation * ranks
    own_name, *peers = seconds
    for name, own in seconds.items():
        line: dict[str, Any] = {"ranks": ranks, "dtype": dtype, "name": name}
        line["tokens_per_second"] = round(tokens / statistics.median(own), 1)
        if name == own_name:
            for peer in peers:
                # of rounds side by side, so that a slow moment of the machine hits both
                ratios = [theirs / ours for ours, theirs in zip(own, seconds[peer], strict=True)]
                line[f"to_{peer}"] = round(statistics.median(ratios), 3)
        loss, peak = last[name]
        line.update(loss=round(loss, 4), peak_mb=round(peak / 2**20, 1))
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
    args = parser.parse_args()
    for ranks in args.ranks:
        for dtype in args.dtypes:
            for stage in args.stages if ranks > 1 else args.stages[:1]:  # over one rank all stages are one layout
                report(ranks, dtype, stage, args)


if __name__ == "__main__":
    main()
