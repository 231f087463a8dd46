"""Equal rows that were dealt apart. The deal goes by a row's number alone (`data.splits`), so that of two rows with the
same columns and values one may train a stage and the other one another, or be evaluated with: they are counted.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from data.report import SourceReport
from data.unpacking import BadRecord

UNUSED, OTHER_STAGE, TRAINED, EVALUATED = range(4)
"""What a stage's deal makes of a row."""
OF_ANOTHER_STAGE = "equal to a row of another stage"
OF_EVALUATION = "trained on and equal to a row of evaluation"
_ENCODER = json.JSONEncoder(default=repr)


class EqualRows:
    """Sees all records of a stage's sources go by, and keeps 9 bytes of each."""

    def __init__(self) -> None:
        self._hashes: list[np.ndarray] = []
        self._uses: list[np.ndarray] = []
        self._reports: list[SourceReport] = []

    def watch(self, records: Iterable[Any], uses: np.ndarray, report: SourceReport) -> Iterator[Any]:
        """The `records` of one part as they are. `uses`: what the deal makes of each."""
        hashes = array("Q")
        for place, record in records:
            hashes.append(_hash(record))
            yield place, record
        self._hashes.append(np.frombuffer(hashes, dtype=np.uint64) if hashes else np.zeros(0, np.uint64))
        self._uses.append(uses)
        self._reports.append(report)

    def count(self) -> None:
        """Writes into each source's report how many of its rows are equal to one that was dealt elsewhere."""
        if not self._hashes:
            return
        hashes, uses = np.concatenate(self._hashes), np.concatenate(self._uses)
        uses[hashes == 0] = UNUSED
        others, evaluated = (hashes[uses == use] for use in (OTHER_STAGE, EVALUATED))
        of_stage = np.isin(uses, (TRAINED, EVALUATED)) & np.isin(hashes, others)
        of_evaluation = (uses == TRAINED) & np.isin(hashes, evaluated)
        start = 0
        for report, part in zip(self._reports, self._uses, strict=True):
            end = start + len(part)
            for name, equal in ((OF_ANOTHER_STAGE, of_stage), (OF_EVALUATION, of_evaluation)):
                found = int(equal[start:end].sum())
                if found:
                    report.rows_equal[name] += found
            start = end


def _hash(record: Any) -> int:
    """64 bits of a record's columns and values; 0 for one that cannot be read."""
    if isinstance(record, BadRecord):
        return 0
    try:
        text = _ENCODER.encode(record)
    except (TypeError, RecursionError):  # names of columns that are no text, values nested without end
        return 0
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
