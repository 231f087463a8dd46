"""Data larger than memory or disk: rows read, dealt, shuffled, tokenized on the way, with no cache and no end.

    stream = data.stream_stage_data("sft", tokenizer, data_path=["big.jsonl.zst"], rank=rank, world_size=world)
    for items in stream.batches(8):
        ...
        state = stream.state_dict()     # exact: a stream that loads it goes on with the next item

How many rows there are is not known, so a row's number and the seed decide its stage (shares hold on average, and
the stages stay disjoint and covering), and whether it is held out. Every source starts again when it ends, in a
new order; within one pass every row comes exactly once, on exactly one rank. The order is that of a shuffle
buffer: the larger, the better mixed. Several sources are mixed by their weights. Single answers with scores are not
paired up, as that takes all answers to a prompt at once.

A stream goes on from a saved position over the same data only. All of it cannot be hashed for that: the position
holds the flags, the tokenizer, of every file the size, beginning and end, and a hash of all rows of this pass that
were read on the way to it. Those rows are read again to go on, so the hash is checked at no cost: whatever has been
used or stands in the shuffle buffer is the same, or the stream stops. A change in the middle of what is yet to come,
of the same size, is not seen; it cannot bring any row twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import torch.distributed as dist

from data.cache import tokenizer_hash
from data.identity import Identity, identity_of, refuse_other, source_identity
from data.items import make_rules
from data.loading import BadRows
from data.opening import open_source
from data.report import combined, summary, totals
from data.sources import SourceLike, dealt_sources
from data.splits import Ratios, hold_out
from data.stream_source import Dealer, Flow, SourceStream


def stream_stage_data(
    stage: str,
    tokenizer: Any,
    *,
    data_path: SourceLike | Sequence[SourceLike] = ("sample",),
    data_split: Ratios = "2,4,4",
    sft_only_data_path: SourceLike | Sequence[SourceLike] = (),
    max_seq_len: int | None = None,
    max_prompt_len: int | None = None,
    train_on_prompt: bool = False,
    seed: int = 1234,
    eval_fraction: float = 0.1,
    truncation: str | None = None,
    on_bad_row: str = "drop",
    max_bad_rows: float = BadRows.limit,
    data_format: str | None = None,
    single_answers: str = "auto",
    buffer_rows: int = 10_000,
    rank: int = 0,
    world_size: int = 1,
) -> ItemStream:
    """The endless stream of a stage's training items for one rank.

    Args: as of `data.load_stage_data`, and
        buffer_rows: records in the shuffle buffer.
        rank, world_size: of this process; each record goes to one rank.

    Raises:
        FileNotFoundError: a path with nothing there. ValueError: an argument that does not fit.
    """
    rules = make_rules(stage, max_seq_len, max_prompt_len, truncation, train_on_prompt, single_answers)
    hold_out([], eval_fraction)
    if buffer_rows < 1 or not 0 <= rank < world_size:
        raise ValueError(
            f"buffer_rows {buffer_rows}, rank {rank} of {world_size}: need buffer_rows >= 1, 0 <= rank < ranks"
        )
    flow = Flow(seed, BadRows(on_bad_row, max_bad_rows), buffer_rows, rank, world_size)
    shares = dealt_sources(stage, data_path, data_split, sft_only_data_path, data_format)
    streams, described = [], []
    for source, ratios in shares:
        if source.weight > 0:
            opened = open_source(source, streaming=True)
            # an evaluation part of its own serves instead of training rows
            dealer = Dealer(stage, ratios, seed, 0.0 if opened.eval is not None else eval_fraction)
            streams.append(SourceStream(opened, dealer, tokenizer, rules, flow, len(streams)))
            one = source_identity(opened.source, opened.content_mark(), ratios)
            described.append({**one, "an evaluation part": opened.eval is not None})
    shared = {"seed": seed, "eval_fraction": eval_fraction, "shuffle_buffer": buffer_rows}
    return ItemStream(streams, identity_of(shared, rules, tokenizer_hash(tokenizer), described))


class ItemStream:
    """An endless stream of one rank's training items; see this module."""

    def __init__(self, sources: list[SourceStream], identity: Identity):
        if not sources:
            raise ValueError("every source of data_path has weight 0: give one of them a weight above 0")
        self.sources, self.identity = sources, identity
        self._credit = [Fraction(0)] * len(sources)
        self._running: list[Iterator[dict[str, Any]]] | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        weights = [Fraction(str(source.opened.source.weight)) for source in self.sources]
        while True:
            if self._running is None:
                self._running = [source.items() for source in self.sources]
            # The source that is furthest behind its share is next: a mix without a dice, easy to resume.
            self._credit = [have + weight for have, weight in zip(self._credit, weights, strict=True)]
            pick = max(range(len(weights)), key=lambda number: (self._credit[number], -number))
            self._credit[pick] -= sum(weights)
            yield next(self._running[pick])

    def batches(self, size: int) -> Iterator[list[dict[str, Any]]]:
        """Lists of `size` items, without end."""
        items = iter(self)
        while True:
            yield [next(items) for _ in range(size)]

    @property
    def passes(self) -> int:
        """Whole passes over the source that has been gone through least often."""
        return min(source.position.passes for source in self.sources)

    def held_out(self, count: int) -> list[dict[str, Any]]:
        """At most `count` evaluation items: of the sources' evaluation parts, else of what the deal holds out.

        Every source gives an equal share; what one lacks of it, those after it may give.
        """
        found: list[dict[str, Any]] = []
        for number, source in enumerate(self.sources):
            found += source.held_out(-(-(count - len(found)) // (len(self.sources) - number)))
        return found

    def report(self) -> dict[str, Any]:
        """The account so far, over all ranks and passes, as in data_report.json. Collective when ranks are up."""
        counted: list[Any] = [[source.counted() for source in self.sources]]
        if dist.is_available() and dist.is_initialized():
            counted *= dist.get_world_size()
            dist.all_gather_object(counted, counted[0])
        reports = [combined(list(of_ranks)) for of_ranks in zip(*counted, strict=True)]
        first = self.sources[0]
        return {
            "stage": first.rules.stage,
            "seed": first.flow.seed,
            "truncation": first.rules.truncation,
            "max_tokens": first.rules.limit,
            "streaming": True,
            "sources": [report.as_dict() for report in reports],
            "totals": totals(reports),
            "lines": [summary(report) for report in reports],
        }

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, and what it has counted so far: JSON-ready."""
        return {
            "identity": self.identity,
            "credit": [str(credit) for credit in self._credit],
            "sources": [source.state_dict() for source in self.sources],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where the saved stream stood, and counts on from there. The rows before it in this pass are read
        again, not tokenized.

        Raises:
            ValueError: a state of other data, see this module; that of rows that are not those read before comes
                with the next item.
        """
        refuse_other(state["identity"], self.identity)
        self._credit = [Fraction(credit) for credit in state["credit"]]
        for source, saved in zip(self.sources, state["sources"], strict=True):
            source.load_state_dict(saved)
        self._running = None
