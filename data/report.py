"""What became of every row of a source: counted, by reason, with the first example of each.

    rows_read = rows_train + rows_eval + the sum of rows_dropped

holds for every source and for the totals, always.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

OTHER_STAGES = "dealt to the other stages"
HELD_OUT = "held out for evaluation"
AHEAD = "read ahead, not used yet"
NOT_LOST = (OTHER_STAGES, HELD_OUT, AHEAD)
"""Not lost: rows that `data_split` gave to another stage, and what a stream does not train on now. Counted with the
dropped ones, so that rows add up."""

COUNTS = ("rows_read", "rows_train", "rows_eval", "items_train", "items_eval")

MALFORMED = frozenset(
    {
        "not JSON",
        "not UTF-8",
        "not an object",
        "wrong number of cells",
        "unknown shape",
        "missing column",
        "missing text",
        "not text",
        "nested too deep",
        "not valid Unicode",
        "not a list of turns",
        "not a turn",
        "turn without a role",
        "unknown role",
        "not a number",
        "not a question and an answer",
        "answer of another role",
    }
)
"""Reasons that mean a broken file or a wrong shape, not a row one may well leave out."""


@dataclass
class SourceReport:
    """Counts of one source, which is the `number`-th of its run; `unseen` rows were never looked into;
    `columns_found`: which of the columns that the source renames some row has.

    `shapes`: rows of each recognised shape, `shape_reasons`: what they were recognised by; `rows_cut`: rows shortened
    to fit; `rows_equal`: rows of the stage that equal one dealt elsewhere, see `data.duplicates`.
    """

    name: str
    rows_read: int = 0
    rows_train: int = 0
    rows_eval: int = 0
    items_train: int = 0
    items_eval: int = 0
    rows_dropped: Counter[str] = field(default_factory=Counter)
    first_dropped: dict[str, str] = field(default_factory=dict)
    shapes: Counter[str] = field(default_factory=Counter)
    shape_reasons: dict[str, str] = field(default_factory=dict)
    rows_cut: Counter[str] = field(default_factory=Counter)
    rows_equal: Counter[str] = field(default_factory=Counter)
    files: list[str] = field(default_factory=list)
    files_unused: list[str] = field(default_factory=list)
    sha256: str | None = None
    number: int = 0
    unseen: int = 0
    columns_found: set[str] = field(default_factory=set)

    def drop(self, reason: str, example: str = "", count: int = 1) -> None:
        """Counts a dropped row, or `count` of them; the first of each reason is kept in words."""
        self.rows_dropped[reason] += count
        if example:
            self.first_dropped.setdefault(reason, example)

    def counts(self) -> dict[str, Any]:
        """All that has been counted: JSON-ready."""
        values = {name: value for name, value in vars(self).items() if isinstance(value, int | dict)}
        del values["number"]
        return {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}

    def set_counts(self, counts: dict[str, Any]) -> None:
        """Counts on from `counts`, in place of what has been counted here."""
        for name, value in counts.items():
            setattr(self, name, type(getattr(self, name))(value))

    def check_malformed(self, limit: float) -> None:
        """Raises ValueError when more than `limit` of the rows looked into so far are malformed."""
        seen = self.rows_read - self.unseen
        bad = {reason: count for reason, count in self.rows_dropped.items() if reason in MALFORMED}
        if sum(bad.values()) > limit * max(seen, 1):
            reason = max(bad, key=bad.get)
            raise ValueError(
                f"{self.name}: {sum(bad.values())} of {seen} rows are malformed, more than the {limit:.0%} "
                f"allowed; {bad[reason]} because of: {self.first_dropped[reason]}"
            )

    def as_dict(self) -> dict[str, Any]:
        """As it stands in data_report.json."""
        out: dict[str, Any] = {
            "name": self.name,
            "files": self.files,
            "shape": dict(self.shapes.most_common()),
            "shape_reasons": self.shape_reasons,
            "rows_read": self.rows_read,
            "rows_dropped": dict(self.rows_dropped.most_common()),
            "rows_train": self.rows_train,
            "rows_eval": self.rows_eval,
            "items_train": self.items_train,
            "items_eval": self.items_eval,
            "first_dropped": self.first_dropped,
        }
        for name in ("rows_cut", "rows_equal"):
            if getattr(self, name):
                out[name] = dict(getattr(self, name))
        if self.files_unused:
            out["files_unused"] = self.files_unused
        if self.sha256:
            out["sha256"] = self.sha256
        return out


def combined(reports: list[SourceReport]) -> SourceReport:
    """The sums of several reports on the same source; first examples are those of the first that has one."""
    first = reports[0]
    out = SourceReport(first.name, files=first.files, files_unused=first.files_unused)
    out.sha256, out.number = first.sha256, first.number
    for report in reports:
        for name in (*COUNTS, "unseen"):
            setattr(out, name, getattr(out, name) + getattr(report, name))
        for name in ("rows_dropped", "shapes", "rows_cut", "rows_equal"):
            getattr(out, name).update(getattr(report, name))
        out.shape_reasons = report.shape_reasons | out.shape_reasons
        out.first_dropped = report.first_dropped | out.first_dropped
    return out


def totals(reports: list[SourceReport]) -> dict[str, Any]:
    """The sums over all sources, under the same names."""
    dropped: Counter[str] = Counter()
    for report in reports:
        dropped.update(report.rows_dropped)
    sums = {name: sum(getattr(report, name) for report in reports) for name in COUNTS}
    return {**sums, "rows_dropped": dict(dropped.most_common())}


def summary(report: SourceReport) -> str:
    """One line: what was read, what it is used for, and what was dropped why."""
    dropped = report.rows_dropped.copy()
    elsewhere = {reason: dropped.pop(reason) for reason in NOT_LOST if reason in dropped}
    parts = [
        f"{report.name}: {report.rows_read} rows read",
        f"{report.rows_train} used" if report.rows_train or not report.rows_eval else "",
        f"{report.rows_eval} evaluated on" if report.rows_eval else "",
        *(f"{count} {reason}" for reason, count in elsewhere.items()),
        "dropped: " + ", ".join(f"{count} {reason}" for reason, count in dropped.most_common()) if dropped else "",
        *(f"{count} {what}" for what, count in report.rows_equal.items()),
    ]
    return ", ".join(filter(None, parts))
