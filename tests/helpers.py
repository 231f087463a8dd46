"""Shared test helpers: gloo ranks in processes of their own, under a time limit.

The ranks are forked from a server process that has imported torch and transformers once: a fresh interpreter
for each would spend seconds on imports alone.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def _rank_main(
    fn: Callable, rank: int, world_size: int, port: int, folder: str, limit_seconds: float, args: tuple
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
        TORCH_FR_BUFFER_SIZE="0",  # torch's notes on the last 2000 collectives would look like memory leaking
    )
    faulthandler.enable()  # a rank that dies in native code says where it was
    import torch

    import engine

    torch.set_num_threads(1)
    outcome: tuple[str, Any]
    try:
        engine.init_distributed(timeout_seconds=limit_seconds)
        outcome = ("ok", fn(rank, world_size, *args))
    except BaseException:  # noqa: BLE001 - handed to the parent, which raises it
        outcome = ("error", traceback.format_exc())
    Path(folder, f"{rank}.tmp").write_bytes(pickle.dumps(outcome))
    Path(folder, f"{rank}.tmp").rename(Path(folder, f"{rank}.pkl"))  # whole or not there for who looks meanwhile
    if outcome[0] == "error":
        os._exit(1)
    torch.distributed.destroy_process_group()


def run_ranks(fn: Callable, world_size: int, *args: Any, timeout: float = 120, limit_seconds: float = 60) -> list[Any]:
    """Run top-level `fn(rank, world_size, *args)` on `world_size` gloo ranks, `limit_seconds` for each collective.

    Returns the ranks' results in order. Raises AssertionError with the traceback of the first rank that
    failed, and TimeoutError when a rank is still busy after `timeout` seconds; no process stays behind.
    """
    context = fork_server()
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        processes = [
            context.Process(target=_rank_main, args=(fn, rank, world_size, port, folder, limit_seconds, args))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(processes, Path(folder), timeout)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


@cache
def fork_server() -> BaseContext:
    """Where processes of tests come from."""
    os.environ["OMP_NUM_THREADS"] = "1"  # what the server starts with; more threads would not survive a fork
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    return context


def _collect(processes: list, folder: Path, timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    while any(process.is_alive() for process in processes):
        if any(process.exitcode not in (None, 0) for process in processes):
            break
        if time.monotonic() > deadline:
            raise TimeoutError(f"a rank is still busy after {timeout} s")
        time.sleep(0.05)
    outcomes = {
        rank: pickle.loads((folder / f"{rank}.pkl").read_bytes())
        for rank in range(len(processes))
        if (folder / f"{rank}.pkl").exists()
    }
    died = [
        f"rank {rank} (exit code {process.exitcode})"
        for rank, process in enumerate(processes)
        # with its work done too: a rank that crashes while it leaves fails a user's run
        if (rank not in outcomes and process.exitcode is not None)
        or (rank in outcomes and outcomes[rank][0] == "ok" and process.exitcode not in (None, 0))
    ]
    why = f"died without a word: {', '.join(died)}" if died else "no rank died"
    for rank, (kind, value) in sorted(outcomes.items()):
        if kind == "error":
            raise AssertionError(f"rank {rank} failed; {why}\n{value}")
    if died or len(outcomes) < len(processes):
        raise AssertionError(why)
    return [value for _, (_, value) in sorted(outcomes.items())]
