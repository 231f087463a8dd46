"""How many optimizer steps a run makes, and after which of them something is due. Imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import NamedTuple


class Done(NamedTuple):
    """What a run with another global batch than its checkpoint's begins with: optimizer steps made, and batches of its
    feed that they took, counted in this run's size."""

    steps: int = 0
    batches: int = 0


NOTHING = Done()


def count_steps(batches_per_epoch: int | None, args: argparse.Namespace, done: Done = NOTHING) -> int:
    """Optimizer steps of a run: whole accumulation windows over all epochs, at most `--max_steps`. A stream, which
    does not know its epochs (None), runs for `--max_steps`. After `done` it is what that made and what remains makes.

    Raises:
        ValueError: there is not one whole step in the data, or a stream without `--max_steps`.
    """
    if batches_per_epoch is None:
        if not args.max_steps:
            raise ValueError("--streaming does not know how many rows there are: say with --max_steps when to stop")
        return args.max_steps
    remaining = max(0, args.num_train_epochs * batches_per_epoch - done.batches)
    steps = done.steps + remaining // args.gradient_accumulation_steps
    if steps == 0:
        raise ValueError(
            f"{args.num_train_epochs} epoch(s) of {batches_per_epoch} micro-batch(es) make no optimizer step with "
            f"--gradient_accumulation_steps {args.gradient_accumulation_steps}: lower it or the batch size"
        )
    return min(steps, args.max_steps) if args.max_steps else steps


def evaluation_interval(batches_per_epoch: int | None, args: argparse.Namespace) -> int:
    """Optimizer steps between evaluations: as asked for, else an epoch; 0, none before the end, for a stream."""
    if args.eval_interval or batches_per_epoch is None:
        return args.eval_interval
    return max(1, batches_per_epoch // args.gradient_accumulation_steps)


def is_due(step: int, interval: int) -> bool:
    """True after every `interval`-th step; never for 0."""
    return interval > 0 and step % interval == 0
