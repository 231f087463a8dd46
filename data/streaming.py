"""Data larger than memory or disk: rows read, dealt, shuffled, tokenized on the way, with no cache and no end.

    stream = data.stream_stage_data("sft", tokenizer, data_path=["big.jsonl.zst"], rank=rank, world_size=world)
    for items in stream.batches(8):
        ...
        state = stream.state_dict()     # exact: a stream that loads it goes on with the next item

How many rows there are is not known, so a row's number and the seed decide its stage (shares hold on average, and
the stages stay disjoint and covering), and whether it is held out. Every source starts again when it ends, in a
new order; within one pass every row comes exactly once, on exactly one rank. The order is that of a shuffle
buffer: the larger, the better mixed. Several sources are mixed by their weights.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from data.items import STAGES, Refused, Rules, make_items, make_rules
from data.loading import BadRows, new_report, read_rows
from data.report import OTHER_STAGES, SourceReport
from data.shapes import Row
from data.sources import Opened, Records, SourceLike, as_list, open_source
from data.splits import Ratios, parse_ratios
from data.store import item_tensors

HELD_OUT = "held out for evaluation"
ENCODE_ROWS = 64


class Dealer:
    """Deals records by number: to one stage, and there to training or to evaluation."""

    def __init__(self, stage: str, ratios: Ratios, seed: int, eval_fraction: float):
        shares = parse_ratios(ratios)
        number, total = STAGES.index(stage), sum(shares)
        self.low, self.high = sum(shares[:number]) / total, sum(shares[: number + 1]) / total
        self.cut = self.high - (self.high - self.low) * Fraction(str(eval_fraction))
        self.seed = seed

    def part(self, number: int) -> str | None:
        """ "train", "eval", or None for another stage's record."""
        digest = hashlib.blake2b(f"{self.seed}:{number}".encode(), digest_size=8).digest()
        place = Fraction(int.from_bytes(digest), 2**64)
        if not self.low <= place < self.high:
            return None
        return "train" if place < self.cut else "eval"


def stream_stage_data(
    stage: str,
    tokenizer: Any,
    *,
    data_path: SourceLike | Sequence[SourceLike] = ("sample",),
    data_split: Ratios = "2,4,4",
    max_seq_len: int | None = None,
    max_prompt_len: int | None = None,
    train_on_prompt: bool = False,
    seed: int = 1234,
    eval_fraction: float = 0.1,
    truncation: str | None = None,
    on_bad_row: str = "drop",
    max_bad_rows: float = BadRows.limit,
    buffer_rows: int = 10_000,
    rank: int = 0,
    world_size: int = 1,
) -> ItemStream:
    """The endless stream of a stage's training items for one rank.

    Args: as of `data.load_stage_data`, and
        buffer_rows: rows in the shuffle buffer.
        rank, world_size: of this process; each row goes to one rank.

    Raises:
        FileNotFoundError: a path with nothing there. ValueError: an argument that does not fit.
    """
    rules = make_rules(stage, max_seq_len, max_prompt_len, truncation, train_on_prompt)
    if buffer_rows < 1 or not 0 <= rank < world_size:
        raise ValueError(
            f"buffer_rows {buffer_rows}, rank {rank} of {world_size}: need buffer_rows >= 1, 0 <= rank < ranks"
        )
    dealer = Dealer(stage, data_split, seed, eval_fraction)
    options = {
        "seed": seed,
        "bad_rows": BadRows(on_bad_row, max_bad_rows),
        "buffer_rows": buffer_rows,
        "rank": rank,
        "world_size": world_size,
    }
    opened = [open_source(path, streaming=True) for path in as_list(data_path)]
    return ItemStream([SourceStream(one, dealer, tokenizer, rules, options) for one in opened])


class SourceStream:
    """The training items of one source for one rank, pass after pass."""

    def __init__(self, opened: Opened, dealer: Dealer, tokenizer: Any, rules: Rules, options: dict[str, Any]):
        self.opened, self.dealer, self.tokenizer, self.rules = opened, dealer, tokenizer, rules
        self.options = options
        self.passes, self.given = 0, 0
        self.report: SourceReport = new_report(opened)

    def rows(self) -> Iterator[tuple[str, Row]]:
        """(place, row) of this pass, shuffled; the same on every rank."""
        draw = random.Random(f"{self.options['seed']}:{self.passes}")
        self.report = new_report(self.opened)
        buffer: list[tuple[str, Row]] = []
        found = read_rows(
            self.opened.train,
            self.opened.source,
            self.report,
            bad_rows=self.options["bad_rows"],
            wanted=self.refuse,
        )
        for _, place, rows in found:
            for row in rows:
                if len(buffer) < self.options["buffer_rows"]:
                    buffer.append((place, row))
                    continue
                pick = draw.randrange(len(buffer))
                yield buffer[pick]
                buffer[pick] = (place, row)
        draw.shuffle(buffer)
        yield from buffer

    def refuse(self, number: int) -> str | None:
        part = self.dealer.part(number)
        return None if part == "train" else OTHER_STAGES if part is None else HELD_OUT

    def items(self) -> Iterator[dict[str, Any]]:
        """This rank's items from where the stream stands on, without end.

        Raises:
            ValueError: a whole pass without one usable row.
        """
        rank, world = self.options["rank"], self.options["world_size"]
        while True:
            skip, usable = self.given, self.given > 0
            batch: list[tuple[int, str, Row]] = []
            for number, (place, row) in enumerate(self.rows()):
                if number >= skip and number % world == rank:
                    batch.append((number, place, row))
                if len(batch) == ENCODE_ROWS:
                    for item in self.encode(batch):
                        usable = True
                        yield item
                    batch = []
            for item in self.encode(batch):
                usable = True
                yield item
            if not usable and not skip:
                raise ValueError(
                    f"{self.opened.source.name}: no usable row for stage {self.rules.stage} on rank {rank}: "
                    f"{dict(self.report.rows_dropped)}"
                )
            self.passes, self.given = self.passes + 1, 0

    def encode(self, batch: list[tuple[int, str, Row]]) -> Iterator[dict[str, Any]]:
        made = make_items([row for _, _, row in batch], self.tokenizer, self.rules, self.report)
        for (number, place, _), item in zip(batch, made, strict=True):
            self.given = number + 1
            if isinstance(item, Refused):
                self.report.drop(str(item), f"{place}: {item}")
            else:
                self.report.rows_train += 1
                yield item_tensors(self.rules.stage, item.sequences, item.trained, item.row, item.facts)


class ItemStream:
    """An endless stream of one rank's training items; see this module."""

    def __init__(self, sources: list[SourceStream]):
        self.sources = sources
        self._credit = [Fraction(0)] * len(sources)
        self._running: list[Iterator[dict[str, Any]]] | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        weights = [Fraction(str(source.opened.source.weight)) for source in self.sources]
        if self._running is None:
            self._running = [source.items() for source in self.sources]
        while True:
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

    def held_out(self, count: int) -> list[dict[str, Any]]:
        """At most `count` evaluation items: of the sources' evaluation parts, else of what the deal holds out."""
        found: list[dict[str, Any]] = []
        for source in self.sources:
            records, own = source.opened.train, source.opened.eval
            found += self._evaluation(source, own or records, own is not None, count - len(found))
        return found

    def _evaluation(self, source: SourceStream, records: Records, whole: bool, count: int) -> list[dict[str, Any]]:
        def refuse(number: int) -> str | None:
            return None if whole or source.dealer.part(number) == "eval" else OTHER_STAGES

        items: list[dict[str, Any]] = []
        report = new_report(source.opened)
        for _, _, rows in read_rows(records, source.opened.source, report, wanted=refuse):
            if len(items) >= count:
                break
            for item in make_items(rows, source.tokenizer, source.rules, report):
                if not isinstance(item, Refused):
                    items.append(item_tensors(source.rules.stage, item.sequences, item.trained, item.row, item.facts))
        return items[:count]

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands: JSON-ready."""
        return {
            "credit": [str(credit) for credit in self._credit],
            "sources": [{"passes": source.passes, "given": source.given} for source in self.sources],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where the saved stream stood. The rows before it in this pass are read again, not tokenized.

        Raises:
            ValueError: a state of other sources.
        """
        if len(state["sources"]) != len(self.sources):
            raise ValueError(f"the saved stream had {len(state['sources'])} sources, this one has {len(self.sources)}")
        self._credit = [Fraction(credit) for credit in state["credit"]]
        for source, saved in zip(self.sources, state["sources"], strict=True):
            source.passes, source.given = saved["passes"], saved["given"]
        self._running = None
