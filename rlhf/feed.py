"""What a stage trains on, micro-batch by micro-batch without end: this rank's share of stored items, or of a stream.

    feed = open_feed(data.train, batch_size, args)
    epoch, numbers, items = next(feed)

`feed.given` counts the micro-batches. `numbers` tell items apart: a stored item keeps its number, an item of a stream
has a new one each time. The state of a feed goes into the checkpoint, and a feed that loads it goes on with the next
item.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from data import BatchSampler, ItemStream, plan_packs
from data.identity import refuse_other
from engine import distributed
from engine.checkpoint import read_counters
from rlhf.steps import NOTHING, Done
from rlhf.training import batch_stream, sampler_for


class MicroBatch(NamedTuple):
    """Items of one rank's micro-batch in `epoch`; with packing each is a list of items that share a row."""

    epoch: int
    numbers: list[int]
    items: list[Any]


def open_feed(items: Any, batch_size: int, args: argparse.Namespace) -> Feed:
    """The feed that `args` ask for, `batch_size` items (or packed rows) at a time.

    Raises:
        ValueError: too few items for one batch of all ranks, or flags that exclude each other.
    """
    packing = getattr(args, "packing", False)
    if isinstance(items, ItemStream):
        wrong = "--packing" if packing else "--group_by_length" if args.group_by_length else None
        if wrong:
            raise ValueError(f"{wrong} needs all rows' lengths, unknown with --streaming: leave out one of the two")
        return StreamFeed(items, batch_size)
    if packing and args.group_by_length:
        raise ValueError("--packing fills rows from dialogues of all lengths: leave out --group_by_length")
    packs = plan_packs(items.lengths(), args.max_seq_len) if packing else None
    lengths = items.lengths() if args.group_by_length else None
    sampler = sampler_for(packs or items, batch_size, args.seed, lengths=lengths)
    order = {"packing": packing, "group_by_length": args.group_by_length}
    if args.group_by_length:  # rows are grouped by batches of all ranks
        order["global_batch_size"] = sampler.global_size
    return StoredFeed(items, sampler, {**items.identity, "order": order}, packs)


class StoredFeed:
    """Of items that are known in number: every epoch deals all of them, in an order of its own, which hangs on
    `identity` (see `data.identity`) and the epoch."""

    def __init__(
        self, items: Any, sampler: BatchSampler, identity: dict[str, Any], packs: list[list[int]] | None = None
    ):
        self.batches_per_epoch: int | None = len(sampler)
        self._items, self._sampler, self._identity, self._packs = items, sampler, identity, packs
        self.given = 0
        self._running: Iterator[tuple[int, list[int]]] | None = None

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        if self._running is None:
            self._running = batch_stream(self._sampler, self.given)
        epoch, numbers = next(self._running)
        self.given += 1
        if self._packs is None:
            return MicroBatch(epoch, numbers, [self._items[i] for i in numbers])
        return MicroBatch(epoch, numbers, [[self._items[i] for i in self._packs[pack]] for pack in numbers])

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and how many rows of it all ranks together have been given: the same for any number of ranks."""
        epoch, batches = divmod(self.given, len(self._sampler))
        return {"epoch": epoch, "rows": batches * self._sampler.global_size, "identity": self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where the saved feed stood; with another size of the global batch, at the batch that holds the
        next row.

        Raises:
            ValueError: the state of a stream, or of other items or another order of them.
        """
        if "rows" not in state:
            raise ValueError("the checkpoint is of a run with --streaming: resume it with the same flag")
        refuse_other(state.get("identity"), self._identity)
        self.given = state["epoch"] * len(self._sampler) + state["rows"] // self._sampler.global_size
        self._running = None


class StreamFeed:
    """Of a stream: `epoch` counts whole passes over its sources, whose number of rows is not known."""

    batches_per_epoch: int | None = None

    def __init__(self, stream: ItemStream, batch_size: int):
        self._stream, self._batch_size = stream, batch_size
        self.given = 0
        self._running: Iterator[list[dict[str, Any]]] | None = None

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        if self._running is None:
            self._running = self._stream.batches(self._batch_size)
        items = next(self._running)
        first = (self.given * distributed.world_size() + distributed.rank()) * self._batch_size
        self.given += 1
        return MicroBatch(self._stream.passes, list(range(first, first + len(items))), items)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream of every rank stands. Collective."""
        streams = [self._stream.state_dict()] * distributed.world_size()
        if distributed.world_size() > 1:
            dist.all_gather_object(streams, streams[0])
        return {"batches": self.given, "streams": streams}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with the next item of this rank.

        Raises:
            ValueError: the state of stored items, of another number of ranks, or of other sources.
        """
        if "streams" not in state:
            raise ValueError("the checkpoint is of a run without --streaming: resume it without")
        if len(state["streams"]) != distributed.world_size():
            raise ValueError(
                f"the checkpoint's stream was dealt to {len(state['streams'])} process(es), this run has "
                f"{distributed.world_size()}: resume with as many"
            )
        self._stream.load_state_dict(state["streams"][distributed.rank()])
        self.given = state["batches"]
        self._running = None


Feed = StoredFeed | StreamFeed


def take_up(feed: Feed, folder: Path, micro_batch: int, args: argparse.Namespace) -> Done:
    """With `--resume`, bring `feed` to where the run whose checkpoints lie in `folder` stopped. Collective.

    Returns:
        What the plan of optimizer steps has to begin with where that run had another global batch; nothing where it
        had the same, for then its plan is this run's.
    """
    if not args.resume:
        return NOTHING
    counters = read_counters(folder)
    feed.load_state_dict(counters["client_state"]["data"])
    global_batch = micro_batch * args.gradient_accumulation_steps * distributed.world_size()
    # checkpoints written before it was saved do not tell
    if counters.get("train_batch_size", global_batch) == global_batch:
        return NOTHING
    return Done(counters["global_steps"], feed.given)
