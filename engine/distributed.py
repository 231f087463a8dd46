"""Where this process stands among its peers: set-up of the process group and small collectives.

One process without torchrun is a world of one and needs no process group; everything here then
answers for that world, so that callers never branch on whether torch.distributed is up.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from engine.peers import collective

DEFAULT_TIMEOUT_SECONDS = 1800
SETTLE_SECONDS = 0.1


def init_distributed(timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> None:
    """Join the process group that torchrun's environment describes; do nothing without one.

    gloo carries CPU tensors and NCCL carries CUDA tensors. `timeout_seconds` bounds every collective:
    a rank that died or took another path makes its peers fail after that long instead of hanging.
    Calling it twice is harmless.

    Raises:
        ValueError: torchrun's variables are set only in part, or the time limit is not a positive number.
    """
    if not timeout_seconds > 0:
        raise ValueError(f"timeout_seconds is {timeout_seconds}: it bounds collectives, so give a positive number")
    if dist.is_initialized() or "WORLD_SIZE" not in os.environ:
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} is set but not {', '.join(missing)}: start it with torchrun"
        )
    backend = "gloo"
    device_id = None
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank())
        device_id = torch.device("cuda", local_rank())
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds), device_id=device_id)
    atexit.register(_settle)


def require_process_group() -> None:
    """Make a process group of one where none was started: sharding needs one, offloading from one GPU too."""
    if not is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(_settle)


def _settle() -> None:
    """Let gloo's threads drop the tensors of the last collectives before the interpreter goes away.

    A thread that does so later asks for a lock of the interpreter that is gone, and takes the whole process down
    with "terminate called without an active exception", after all its work was done.
    """
    time.sleep(SETTLE_SECONDS)


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if is_initialized() else 1


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def is_main() -> bool:
    """True on the one process that writes files and talks to the user."""
    return rank() == 0


def device() -> torch.device:
    """The device this rank computes on: its own GPU where there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank())
    return torch.device("cpu")


@collective
def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Until every rank is here."""
    if world_size() > 1:
        dist.barrier(group)


@collective
def all_reduce_sums(values: Iterable[float]) -> list[float]:
    """Element-wise sums over ranks, in float64: the numerators and denominators of global means."""
    values = [float(value) for value in values]
    if world_size() == 1:
        return values
    # float64 on the CPU: counts beyond 2^24 stay exact, and gloo takes it on every machine.
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.tolist()


@collective
def all_reduce_max(values: Iterable[float]) -> list[float]:
    """Element-wise maxima over ranks."""
    values = [float(value) for value in values]
    if world_size() == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


@collective
def broadcast_object(value: object, source: int = 0) -> object:
    """The source rank's picklable `value`, on every rank."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=source)
    return box[0]


@collective
def gather_objects(value: object) -> list:
    """Every rank's picklable `value`, in the ranks' order, on every rank."""
    if world_size() == 1:
        return [value]
    values: list = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def shutdown() -> None:
    """Leave the process group, so that the interpreter ends without a warning."""
    if is_initialized():
        dist.destroy_process_group()
