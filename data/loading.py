"""Rows of text from a source, each bad one counted: `load_rows`, and the stream beneath it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from data.opening import Opened, open_source
from data.report import SourceReport, summary
from data.shapes import Row, normalise
from data.sources import Source, SourceLike
from data.turns import RowError
from data.unpacking import BadRecord, Record

CHECK_AFTER = 1000


@dataclass(frozen=True)
class BadRows:
    """What becomes of rows that cannot be used.

    Args:
        action: "drop" counts them by reason, "error" stops at the first that cannot be read.
        limit: share of a source's rows that cannot be read (`data.report.MALFORMED`) above which it is refused.

    Raises:
        ValueError: another action, or a limit outside [0, 1].
    """

    action: str = "drop"
    limit: float = 0.5

    def __post_init__(self) -> None:
        if self.action not in ("drop", "error"):
            raise ValueError(f"on_bad_row {self.action!r} must be drop or error")
        if not 0 <= self.limit <= 1:
            raise ValueError(f"max_bad_rows {self.limit} must be a share of the rows, from 0 to 1")


def read_rows(
    records: Iterable[tuple[str, Record | BadRecord]],
    source: Source,
    report: SourceReport,
    *,
    bad_rows: BadRows = BadRows(),  # noqa: B008 - it is frozen
    wanted: Callable[[int], str | None] = lambda number: None,
) -> Iterator[tuple[int, str, list[Row]]]:
    """(number, place, rows) of every usable record, as a stream.

    Args:
        records: what to read, each with its place in words.
        source: its `columns` rename and its `shape` fixes.
        report: counts what was read and dropped.
        bad_rows: what becomes of rows that cannot be used.
        wanted: tells for a record's number why it is not wanted, or None.

    Raises:
        ValueError: a bad row under "error", or far too many of them; `columns` names one that no row has.
    """
    for number, (place, record) in enumerate(records):
        report.rows_read += 1
        if len(report.columns_found) < len(source.columns) and isinstance(record, dict):
            report.columns_found |= source.columns.keys() & record.keys()
        reason = wanted(number)
        if reason is not None:
            report.drop(reason)
            report.unseen += 1
            continue
        try:
            if isinstance(record, BadRecord):
                raise record
            shape, rows = normalise(_renamed(record, source.columns), source.shape)
        except (RowError, BadRecord) as error:
            if bad_rows.action == "error":
                raise ValueError(f"{place}: {error}") from error
            report.drop(error.reason, f"{place}: {error}")
            if report.rows_read - report.unseen >= CHECK_AFTER:
                report.check_malformed(bad_rows.limit)
            continue
        report.shapes[shape] += 1
        if shape not in report.shape_reasons:
            columns = ", ".join(map(str, record))
            report.shape_reasons[shape] = (
                f"asked for; the columns are {columns}" if source.shape else f"{place} has the columns {columns}"
            )
        yield number, place, rows
    report.check_malformed(bad_rows.limit)
    absent = source.columns.keys() - report.columns_found
    if absent and report.rows_read:
        raise ValueError(f"{source.name}: columns names {', '.join(sorted(map(repr, absent)))}, which no row has")


def _renamed(record: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    if not columns:
        return record
    kept = {name: value for name, value in record.items() if name not in columns and name not in columns.values()}
    return kept | {meaning: record[name] for name, meaning in columns.items() if name in record}


def new_report(opened: Opened) -> SourceReport:
    """An empty report with the source's name and files."""
    files = [*opened.train.files, *(opened.eval.files if opened.eval else [])]
    return SourceReport(opened.source.name, files=[path.name for path in files], files_unused=opened.unused)


def load_rows(
    source: SourceLike, split: str = "train", *, on_bad_row: str = "drop", max_bad_rows: float = BadRows.limit
) -> tuple[list[Row], dict[str, Any]]:
    """All usable rows of a source and the account of the others.

    Args:
        source: file, folder, "sample", or hub name, see `data.sources`.
        split: "train" or "eval".
        on_bad_row: "drop" counts bad rows by reason, "error" stops at the first.
        max_bad_rows: share of rows that cannot be read, above which the source is refused.

    Returns:
        rows: dicts of text, see `data.shapes`.
        report: name, shape, rows_read, rows_used, rows_dropped {reason: count}, first_dropped {reason: example};
            rows_read = rows_used + all of rows_dropped. A record may give several rows.

    Raises:
        FileNotFoundError: no such file. ValueError: no usable row, no such part, a damaged file.
    """
    opened = open_source(source)
    if split not in ("train", "eval"):
        raise ValueError(f"split {split!r} must be train or eval; a hub set's own split names go into the source")
    records = opened.train if split == "train" else opened.eval
    if records is None:
        raise ValueError(f"{opened.source.name}: has no evaluation part: give a folder with train and eval files")
    report = new_report(opened)
    rows: list[Row] = []
    for _, _, found in read_rows(records, opened.source, report, bad_rows=BadRows(on_bad_row, max_bad_rows)):
        report.rows_train += 1
        rows += found
    if not rows:
        first = "".join(f"; first: {example}" for example in [*report.first_dropped.values()][:1])
        raise ValueError(f"no usable row in {summary(report)}{first}")
    out = report.as_dict()
    out["rows_used"] = out.pop("rows_train")
    for name in ("rows_eval", "items_train", "items_eval"):
        del out[name]
    return rows, out
