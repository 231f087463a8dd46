"""Who is to blame when a collective fails: ranks that died or took another path are named in one line.

gloo and NCCL only say that a connection closed or a time limit passed. After such an error each rank writes what
it was doing into the store that torchrun keeps, waits a moment for the others to do the same, and reads who was
elsewhere and who said nothing at all.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

GRACE_SECONDS = 3.0
_SIGNS = ("gloo", "NCCL", "Connection closed", "Connection reset", "Timed out waiting", "Broken pipe")

# Of calls within calls, the outermost is the one that a reader knows.
_outermost = threading.local()

F = TypeVar("F", bound=Callable[..., Any])


class PeerError(RuntimeError):
    """A collective failed because of another rank."""


def collective(function: F) -> F:
    """Decorator of what all ranks call together: its failures name the ranks that were not there."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if getattr(_outermost, "is_taken", False):
            return function(*args, **kwargs)
        _outermost.is_taken = True
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            if not _is_of_peers(error):
                raise
            raise PeerError(_explain(function.__name__, str(error))) from error
        finally:
            _outermost.is_taken = False

    return call


def _is_of_peers(error: RuntimeError) -> bool:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return False
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in _SIGNS)


def _explain(place: str, cause: str) -> str:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    timed_out = "imed out" in cause or "imeout" in cause
    why = "a time limit passed" if timed_out else "a connection closed"
    line = f"rank {rank}: {place} failed because {why}"
    try:
        places = _ask_peers(place, rank, ranks)
    except (dist.DistError, RuntimeError):
        return f"{line} and the rank that keeps the store (0 without torchrun) is gone"
    silent = [str(other) for other in range(ranks) if other not in places]
    elsewhere = [f"rank {other} was in {there}" for other, there in places.items() if there != place]
    if silent:
        word = "rank" if len(silent) == 1 else "ranks"
        return f"{line}: {word} {', '.join(silent)} died or is still busy with something else"
    if elsewhere:
        return f"{line}: the ranks took different paths: {', '.join(elsewhere)}"
    return f"{line}: all ranks were there, so the network between them failed or their data differ in shape"


def _ask_peers(place: str, rank: int, ranks: int) -> dict[int, str]:
    """What each rank that reports within the grace time was doing."""
    store = dist.distributed_c10d._get_default_store()
    keys = {other: f"failed_call/{other}" for other in range(ranks)}
    store.set(keys[rank], place)
    deadline = time.monotonic() + GRACE_SECONDS
    missing = set(keys) - {rank}
    while missing and time.monotonic() < deadline:
        missing = {other for other in missing if not store.check([keys[other]])}
        if missing:
            time.sleep(0.1)
    places = {other: store.get(key).decode() for other, key in keys.items() if other not in missing}
    if rank == 0:
        time.sleep(0.5)  # without torchrun the store ends with this process, and others may still ask
    return places
