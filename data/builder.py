"""Makes one stage's cache: deals the rows of every source, tokenizes them in batches, writes and accounts for them."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data import cache
from data.duplicates import EVALUATED, OTHER_STAGE, TRAINED, UNUSED, EqualRows
from data.identity import Identity, identity_of, source_identity
from data.items import STAGES, Refused, Rules, make_items
from data.loading import BadRows, new_report, read_rows
from data.opening import Opened, Records
from data.pairing import Pool, Scored, is_scored
from data.report import OTHER_STAGES, SourceReport, summary, totals
from data.shapes import Row
from data.splits import Ratios, hold_out, repeats, split_rows
from data.store import Item, StoreWriter

CACHE_VERSION = 8
BATCH_RECORDS = 2048
MOST_ITEMS = 2**31

Record = tuple[int, str, list[Row]]
"""A record's number in its source, where it is, and its rows."""


@dataclass
class Deal:
    """Where each record of a source goes: `copies[i]` times an epoch into training (-1: to another stage), or,
    with `held_out[i]`, into evaluation."""

    copies: np.ndarray
    held_out: np.ndarray
    weight: float = 1.0

    def refuse(self, record: int) -> str | None:
        """Why this stage does not take a record, or None when it does."""
        if self.held_out[record] or self.copies[record] > 0:
            return None
        return OTHER_STAGES if self.copies[record] < 0 else f"left out by weight {self.weight:g}"

    def uses(self) -> np.ndarray:
        """What becomes of each record, by the names of `data.duplicates`."""
        uses = np.where(self.copies > 0, TRAINED, np.where(self.copies < 0, OTHER_STAGE, UNUSED))
        return np.where(self.held_out, EVALUATED, uses).astype(np.uint8)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Without Python's search for cycles, which the many small lists of a batch would start hundreds of times, at 40%
    of the time it takes to make a cache. Who makes batches has the young ones searched after each."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Builder:
    """One stage's cache: its key and its making, on one process.

    Args:
        sources: opened sources and the shares by which each is dealt.
        tokenizer, rules: how rows become items.
        seed, eval_fraction: of the deal.
        bad_rows: what becomes of rows that cannot be used.
    """

    def __init__(
        self,
        sources: list[tuple[Opened, Ratios]],
        tokenizer: Any,
        rules: Rules,
        seed: int,
        eval_fraction: float,
        bad_rows: BadRows,
    ):
        self.sources, self.tokenizer, self.rules = sources, tokenizer, rules
        self.seed, self.eval_fraction, self.bad_rows = seed, eval_fraction, bad_rows
        self.single_kinds: dict[int, str] = {}
        self.equal_rows = EqualRows()

    def find_or_build(self, output: Path, min_train: int) -> tuple[Path, dict[str, Any], Identity]:
        """(folder, report, identity of the items) of the cache under `output`, built when it is not there.

        Raises:
            ValueError: too few rows for the stage.
        """
        hashes = [opened.content_hash() for opened, _ in self.sources]
        described = [
            (asdict(opened.source), str(ratios), found)
            for (opened, ratios), found in zip(self.sources, hashes, strict=True)
        ]
        settings = [CACHE_VERSION, asdict(self.rules), self.seed, self.eval_fraction, asdict(self.bad_rows)]
        tokenizer = cache.tokenizer_hash(self.tokenizer)
        key = cache.key_of([described, tokenizer, settings])
        folder = output / f"{self.rules.stage}_{key[:32]}"
        report = cache.build_once(folder, lambda temporary: self.build(temporary, hashes))["report"]
        self.check(report, min_train)
        sources = [
            source_identity(opened.source, found, ratios)
            for (opened, ratios), found in zip(self.sources, hashes, strict=True)
        ]
        shared = {"seed": self.seed, "eval_fraction": self.eval_fraction}
        return folder, report, identity_of(shared, self.rules, tokenizer, sources)

    def check(self, report: dict[str, Any], min_train: int) -> None:
        """Raises ValueError, with the counts, when a part that the stage needs is empty."""
        train, held_out = report["totals"]["items_train"], report["totals"]["items_eval"]
        needed = max(min_train, 1)
        if train >= needed and (held_out or self.eval_fraction == 0):
            return
        part = "evaluation" if train >= needed else "training"
        mend = "raise eval_fraction, or set it to 0 to do without" if train >= needed else "give more data"
        examples = [example for source in report["sources"] for example in source["first_dropped"].values()]
        first = f"; first dropped: {examples[0]}" if examples else ""
        raise ValueError(
            f"too few {part} rows for stage {self.rules.stage}: {train} to train on (at least {needed}), {held_out} "
            f"to evaluate with (at least {int(self.eval_fraction > 0)}): {mend}; {'; '.join(report['lines'])}{first}"
        )

    def build(self, folder: Path, hashes: list[str]) -> dict[str, Any]:
        """Writes `folder`/train and `folder`/eval; returns what is kept beside them."""
        stage, reports = self.rules.stage, []
        with (
            _collector_paused(),
            StoreWriter(folder / "train", stage) as train,
            StoreWriter(folder / "eval", stage) as held_out,
        ):
            for number, (opened, ratios) in enumerate(self.sources):
                report = new_report(opened)
                report.sha256, report.number = hashes[number], number
                self.add_source(opened, ratios, number, (train, held_out), report)
                reports.append(report)
        self.equal_rows.count()
        return {
            "report": {
                "stage": stage,
                "seed": self.seed,
                "truncation": self.rules.truncation,
                "max_tokens": self.rules.limit,
                "sources": [report.as_dict() for report in reports],
                "totals": totals(reports),
                "parts": {"train": train.statistics(), "eval": held_out.statistics()},
                "lines": [summary(report) for report in reports],
            }
        }

    def add_source(
        self,
        opened: Opened,
        ratios: Ratios,
        number: int,
        writers: tuple[StoreWriter, StoreWriter],
        report: SourceReport,
    ) -> None:
        """Deals and adds all records of source `number`."""
        n, weight = opened.train.count(), opened.source.weight
        part = split_rows(n, ratios, self.seed)[STAGES.index(self.rules.stage)]
        to_train, to_eval = (part, []) if opened.eval else hold_out(part, self.eval_fraction)
        deal = Deal(np.full(n, -1, dtype=np.int64), np.zeros(n, dtype=bool), weight)
        if len(to_train) * weight > MOST_ITEMS:
            raise ValueError(
                f"{opened.source.name}: {len(to_train)} rows with weight {weight:g} are more than {MOST_ITEMS:,} an "
                "epoch: lower the weight"
            )
        deal.copies[to_train] = repeats(len(to_train), weight, self.seed, number)
        deal.held_out[to_eval] = True
        self.add_records(opened, opened.train, deal, writers, report)
        if opened.eval:
            size = opened.eval.count()
            deal = Deal(np.zeros(size, dtype=np.int64), np.ones(size, dtype=bool))
            self.add_records(opened, opened.eval, deal, writers, report)

    def add_records(
        self,
        opened: Opened,
        records: Records,
        deal: Deal,
        writers: tuple[StoreWriter, StoreWriter],
        report: SourceReport,
    ) -> None:
        """Adds the records that `deal` gives to this stage, in batches."""
        pool = Pool()
        watched = self.equal_rows.watch(records, deal.uses(), report)
        found = read_rows(watched, opened.source, report, bad_rows=self.bad_rows, wanted=deal.refuse)
        self.add_all(self._pool_scored(found, pool), deal, writers, report)
        self.add_scored(pool, deal, writers, report)

    def _pool_scored(self, found: Iterable[Record], pool: Pool) -> Iterator[Record]:
        """The records, without those whose answers may find partners: they go to `pool`."""
        for number, place, rows in found:
            if self.rules.single_answers in ("auto", "pair") and len(rows) == 1 and is_scored(rows[0]):
                pool.add(Scored(number, place, rows[0]))
            else:
                yield number, place, rows

    def add_scored(
        self, pool: Pool, deal: Deal, writers: tuple[StoreWriter, StoreWriter], report: SourceReport
    ) -> None:
        """Adds the pairs that scored answers make; the better answer's record decides where a pair goes, and both
        records are used, or dropped, together. Answers without a partner stand alone under `auto` when their numbers
        are labels, or when no answer of the source has a partner: scores as targets of their own would outweigh pairs.
        """
        numbers = pool.scores()
        pairs, left = pool.match()
        if self.rules.single_answers == "auto" and numbers:
            found = "label" if numbers <= {0.0, 1.0} else "pair" if pairs else "score"
            # found out from the training rows, so that the evaluation's are read in the same way
            kind = self.single_kinds.setdefault(report.number, found)
            alone = [(one.record, one.place, [{**one.row, "single_kind": kind}]) for one in left]
        else:
            alone = [(one.record, one.place, [one.row]) for one in left]
        self.add_all(alone, deal, writers, report)
        together = ((better.record, better.place, [row]) for row, better, _ in pairs)
        self.add_all(together, deal, writers, report, records_each=2)

    def add_all(
        self,
        records: Iterable[Record],
        deal: Deal,
        writers: tuple[StoreWriter, StoreWriter],
        report: SourceReport,
        records_each: int = 1,
    ) -> None:
        """Tokenizes records in batches, and adds them. A fast tokenizer leaves the interpreter free meanwhile: the next
        batch is read then.

        `records_each`: how many records of the source each of these stands for.
        """
        records, waiting = iter(records), None
        with ThreadPoolExecutor(1) as thread:
            while batch := list(itertools.islice(records, BATCH_RECORDS)):
                rows = [row for _, _, rows in batch for row in rows]
                items = thread.submit(make_items, rows, self.tokenizer, self.rules, report)
                if waiting:
                    self.add_batch(*waiting, deal, writers, report, records_each)
                    gc.collect(1)
                waiting = batch, items
            if waiting:
                self.add_batch(*waiting, deal, writers, report, records_each)

    def add_batch(
        self,
        batch: list[Record],
        items: Future[list[Item | Refused]],
        deal: Deal,
        writers: tuple[StoreWriter, StoreWriter],
        report: SourceReport,
        records_each: int,
    ) -> None:
        """Adds the items that records became; a record counts as used when one of its rows is."""
        made = iter(items.result())
        train: list[Item] = []
        copies: list[int] = []
        held_out: list[Item] = []
        for record, place, rows in batch:
            items = [next(made) for _ in rows]
            good = [item for item in items if not isinstance(item, Refused)]
            if not good:
                report.drop(str(items[0]), items[0].example(place), records_each)
            elif deal.held_out[record]:
                held_out += good
                report.rows_eval += records_each
            else:
                train += good
                copies += [int(deal.copies[record])] * len(good)
                report.rows_train += records_each
        report.items_eval += len(held_out)
        report.items_train += sum(copies)
        writers[0].add(train, copies)
        writers[1].add(held_out, [1] * len(held_out))
