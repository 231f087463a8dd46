"""How a stage's processes are to be started: how many on this machine, and on which machines."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf.flags import flags_of, non_negative_int, positive_int, spelled


@dataclass(frozen=True)
class Nodes:
    """Where a run of several machines meets. With one node nothing needs to be set.

    Args:
        count: number of machines; each of them starts the same command with its own ``rank``.
        rank: this machine's number, from 0.
        address, port: of node 0; the port must be free there.
    """

    count: int = 1
    rank: int = 0
    address: str = "127.0.0.1"
    port: int = 29500


ONE_NODE = Nodes()


def add_launch_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that say how many processes to start, and where."""
    add = parser.add_argument_group("processes").add_argument
    add("--nproc", type=positive_int, help="processes on this machine; else NPROC, else one per GPU, else 1")
    add("--nnodes", type=positive_int, default=1, help="machines; start the same command on each of them")
    add("--node_rank", type=non_negative_int, default=0, help="this machine's number, from 0")
    add("--master_addr", default="127.0.0.1", help="address of machine 0")
    add("--master_port", type=positive_int, default=29500, help="free port on machine 0")


def take_launch_flags(argv: Sequence[str]) -> tuple[int, Nodes, list[str]]:
    """Split a stage's command line into how to start it, ``(nproc, nodes)``, and the stage's own flags."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_launch_flags(parser)
    args, rest = parser.parse_known_args(spelled(argv, flags_of(parser)))
    return (*launch_plan(args), rest)


def launch_plan(args: argparse.Namespace) -> tuple[int, Nodes]:
    """What the flags of ``add_launch_flags`` ask for.

    Raises:
        ValueError: a machine's number outside of their count.
    """
    if args.node_rank >= args.nnodes:
        raise ValueError(f"--node_rank {args.node_rank} of --nnodes {args.nnodes}: numbers run from 0")
    nodes = Nodes(args.nnodes, args.node_rank, args.master_addr, args.master_port)
    return args.nproc or default_nproc(), nodes


def default_nproc() -> int:
    """Processes of one machine when nobody said: ``NPROC`` in the environment, else one per GPU, else 1."""
    text = os.environ.get("NPROC")
    if text:
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"NPROC is the number of processes, at least 1, got {text!r}")
        return int(text)
    if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")):
        return 1  # without loading torch, which takes seconds
    import torch

    return max(1, torch.cuda.device_count())
