"""One source as a stream: its records dealt by number, shuffled through a buffer, tokenized on the way."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from data.items import STAGES, Refused, Rules, make_items
from data.loading import BadRows, new_report, read_rows
from data.opening import Opened
from data.report import AHEAD, HELD_OUT, OTHER_STAGES, SourceReport, combined
from data.shapes import Row
from data.splits import Ratios, parse_ratios
from data.store import Item, item_tensors

ENCODE_RECORDS = 64


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


@dataclass(frozen=True)
class Flow:
    """How streams run: `buffer_rows` in the shuffle buffer; record k is for rank k % world_size."""

    seed: int
    bad_rows: BadRows
    buffer_rows: int
    rank: int
    world_size: int


@dataclass
class Position:
    """Where a stream stands: in pass `passes`, `record` of the shuffled order is the one being used, and `items` of
    its items have been given."""

    passes: int = 0
    record: int = 0
    items: int = 0


class SourceStream:
    """The training items of one source for one rank, pass after pass. `report` counts over all passes, `evaluated`
    what was read for evaluation alone."""

    def __init__(self, opened: Opened, dealer: Dealer, tokenizer: Any, rules: Rules, flow: Flow, number: int = 0):
        self.opened, self.dealer, self.tokenizer, self.rules, self.flow = opened, dealer, tokenizer, rules, flow
        self.position = Position()
        self.report, self.evaluated = (new_report(opened) for _ in range(2))
        self.report.number = self.evaluated.number = number
        self.rows_hash = ""
        self._hash = hashlib.blake2b(digest_size=16)

    def items(self) -> Iterator[dict[str, Any]]:
        """This rank's items from where the stream stands on, without end.

        Raises:
            ValueError: a whole pass without one usable row; rows before the saved position that are not those that
                were read then.
        """
        while True:
            start = self.position
            going_on = start != Position(start.passes)
            counts, rows_hash = self.report.counts(), self.rows_hash
            if going_on:  # what comes before the position is in `counts`, and not to be counted again
                self.report.set_counts(new_report(self.opened).counts())
            given = self.report.rows_train
            for first, batch in _batched(self._shuffled(start.passes), ENCODE_RECORDS):
                if first + len(batch) <= start.record:
                    continue
                self.rows_hash = self._hash.hexdigest()
                for number, (place, items) in enumerate(self._encoded(batch), first):
                    if number < start.record:
                        continue
                    if going_on:
                        if self.rows_hash != rows_hash:
                            raise self._other_rows()
                        self.report.set_counts(counts)
                        going_on = False
                    yield from self._give(number, place, items, start)
            if going_on:
                raise self._other_rows()
            if self.report.rows_train == given and start == Position(start.passes):
                dropped = {reason: count for reason, count in self.report.rows_dropped.items() if count}
                raise ValueError(
                    f"{self.opened.source.name}: no usable row for stage {self.rules.stage} on rank {self.flow.rank}: "
                    f"{dropped or 'it got none'}: give more data, or fewer processes, or leave out --streaming"
                )
            self.position = Position(start.passes + 1)

    def _other_rows(self) -> ValueError:
        return ValueError(
            f"{self.opened.source.name}: the rows before the saved position are not those that were read then: put "
            "its files back as they were, or begin anew in another --output_dir"
        )

    def _give(self, number: int, place: str, items: list[Item | Refused], start: Position) -> Iterator[dict[str, Any]]:
        """The items of one record, without those that were given before the stream was resumed."""
        good = [item for item in items if isinstance(item, Item)]
        if not good:
            self.report.drop(str(items[0]), items[0].example(place))
            return
        given = start.items if number == start.record else 0
        self.report.rows_train += not given
        for count, item in enumerate(good[given:], given + 1):
            self.position = Position(start.passes, number, count)
            self.report.items_train += 1
            yield self._tensors(item)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands and what it has counted so far: JSON-ready."""
        return {**asdict(self.position), "rows_hash": self.rows_hash, "report": self.report.counts()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there."""
        self.position = Position(state["passes"], state["record"], state["items"])
        self.rows_hash = state["rows_hash"]
        self.report.set_counts(state["report"])

    def _shuffled(self, passes: int) -> Iterator[tuple[str, list[Row]]]:
        """(place, rows) of this rank's records in one pass; the rows of a record stay together."""
        draw = random.Random(f"{self.flow.seed}:{passes}:{self.flow.rank}")
        buffer: list[tuple[str, list[Row]]] = []
        for place, rows in self._read():
            if len(buffer) < self.flow.buffer_rows:
                buffer.append((place, rows))
                continue
            pick = draw.randrange(len(buffer))
            yield buffer[pick]
            buffer[pick] = (place, rows)
        draw.shuffle(buffer)
        yield from buffer

    def _read(self) -> Iterator[tuple[str, list[Row]]]:
        rank, world_size = self.flow.rank, self.flow.world_size

        def refuse(number: int) -> str | None:
            part = self.dealer.part(number * world_size + rank)
            return None if part == "train" else OTHER_STAGES if part is None else HELD_OUT

        own = itertools.islice(self.opened.train, rank, None, world_size)
        self._hash = hashlib.blake2b(digest_size=16)
        for _, place, rows in read_rows(
            own, self.opened.source, self.report, bad_rows=self.flow.bad_rows, wanted=refuse
        ):
            self._hash.update(json.dumps(rows).encode())
            yield place, rows

    def _encoded(self, batch: list[tuple[str, list[Row]]]) -> Iterator[tuple[str, list[Item | Refused]]]:
        """(place, what each of its rows gave) of records tokenized in one call."""
        made = iter(make_items([row for _, rows in batch for row in rows], self.tokenizer, self.rules, self.report))
        return ((place, list(itertools.islice(made, len(rows)))) for place, rows in batch)

    def held_out(self, most: int) -> list[dict[str, Any]]:
        """At most `most` evaluation items, the same on every rank: of the source's own evaluation part, else of the
        rows that the deal holds out. Rows of an own part are counted in `evaluated`, by rank 0."""
        own = self.opened.eval
        report = new_report(self.opened)
        report.number = self.report.number
        if own is not None and self.flow.rank == 0:
            self.evaluated = report

        def refuse(number: int) -> str | None:
            return None if own is not None or self.dealer.part(number) == "eval" else OTHER_STAGES

        found: list[dict[str, Any]] = []
        if most == 0:
            return found
        records = self.opened.train if own is None else own
        for _, place, rows in read_rows(
            records, self.opened.source, report, bad_rows=self.flow.bad_rows, wanted=refuse
        ):
            made = make_items(rows, self.tokenizer, self.rules, report)
            good = [item for item in made if isinstance(item, Item)][: most - len(found)]
            if not good:
                report.drop(str(made[0]), made[0].example(place))
                continue
            report.rows_eval += 1
            report.items_eval += len(good)
            found += map(self._tensors, good)
            if len(found) == most:
                break
        return found

    def _tensors(self, item: Item) -> dict[str, Any]:
        return item_tensors(self.rules.stage, item.sequences, item.trained, item.row, item.facts)

    def counted(self) -> SourceReport:
        """The report with what has been read and not used yet as a reason of its own, so that rows add up."""
        report = combined([self.report, self.evaluated])
        used = report.rows_train + report.rows_eval + report.rows_dropped.total()
        if report.rows_read > used:
            report.drop(AHEAD, count=report.rows_read - used)
        return report


def _batched(things: Iterable[Any], size: int) -> Iterator[tuple[int, list[Any]]]:
    """(number of the first, the next `size` things)."""
    things, first = iter(things), 0
    while batch := list(itertools.islice(things, size)):
        yield first, batch
        first += len(batch)
