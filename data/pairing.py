"""Pairs from answers that were scored one by one: two answers to the same prompt, of different scores.

The best answer to a prompt is set against the worst, the second best against the second worst, and so on while
the scores differ, so that no answer is in two pairs. Answers that find no partner are left over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from data.shapes import Row


@dataclass
class Scored:
    """One answer with its score; `record`, `place`: which row of the source it is."""

    record: int
    place: str
    row: Row


def is_scored(row: Row) -> bool:
    """True for one answer with a score and no partner."""
    return "score" in row and "response" in row and "rejected" not in row


class Pool:
    """Scored answers by prompt, in the order they came."""

    def __init__(self) -> None:
        self._prompts: dict[Any, list[Scored]] = {}

    def add(self, one: Scored) -> None:
        # The turns as well as the text: marker text inside a turn is not a turn.
        messages = one.row.get("messages")
        turns = None if messages is None else tuple((turn["role"], turn["content"]) for turn in messages)
        self._prompts.setdefault((one.row["prompt"], turns), []).append(one)

    def scores(self) -> set[float]:
        """The different scores of all answers."""
        return {one.row["score"] for answers in self._prompts.values() for one in answers}

    def match(self) -> tuple[list[tuple[Row, Scored, Scored]], list[Scored]]:
        """([pair row, better, worse], answers left over)."""
        pairs, left = [], []
        for answers in self._prompts.values():
            ranked = sorted(answers, key=lambda one: -one.row["score"])  # stable: equal scores stay in order
            while len(ranked) > 1 and ranked[0].row["score"] > ranked[-1].row["score"]:
                better, worse = ranked.pop(0), ranked.pop()
                pairs.append((_pair(better.row, worse.row), better, worse))
            left += ranked
        return pairs, left


def _pair(better: Row, worse: Row) -> Row:
    row = {key: better[key] for key in ("prompt", "messages") if key in better}
    margin = better["score"] - worse["score"]
    return {**row, "chosen": better["response"], "rejected": worse["response"], "margin": margin}
