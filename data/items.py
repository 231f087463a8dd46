"""Rows to the items of a stage: tokenized, fitted to the length allowed, refused with a reason.

    sft     the whole dialogue; labels on assistant text and end tokens (or on all, `train_on_prompt`)
    reward  chosen and rejected, whole dialogues over the same prompt; or one answer that was judged by itself
    ppo     the prompt, through the assistant marker, and the row

SFT takes `response`, else `chosen`. An answer whose `score` is 0 or less was marked as bad by its label or
reward: SFT would teach it, so it is refused there; PPO uses its prompt.

A row with several rejected answers has become as many pairs, and each is an item of its own weight. What reward
makes of single answers with a number is said by `single_answers`:

    pair    two answers to one prompt make a pair, see `data.pairing`; those that find no partner are refused
    label   each is an item; its number is the probability that it is good, from 0 to 1
    score   each is an item; its number is the score it should get
    auto    pairs where there are any; those left over are labels when all numbers of the source are 0 or 1, else
            scores (for sources read whole, so not for a stream)

Too long rows are treated by `truncation`:

    drop    refused
    left    the oldest turns go first, whole; then the beginning of the last question; never a marker. Both sides of
            a pair keep the same prompt. An answer that is too long by itself is refused; in a pair its end is cut
            off, behind a prompt of at most a quarter of the length. (default for reward)
    right   the end is cut off; a cut answer loses its end token, since it does not end there; a marker or question
            left hanging behind the last answer goes too (default for SFT)

PPO drops by default: half a question is another question.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from data.chat import ChatFormat, Encoded, format_of, turns_of
from data.markers import Turn
from data.report import SourceReport
from data.shapes import Row
from data.store import KINDS, Item

STAGES = ("sft", "reward", "ppo")
TRUNCATIONS = ("drop", "left", "right")
SINGLE_ANSWERS = ("auto", "pair", "label", "score")
PROMPT_SHARE = 4
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\uf900-\ufaff\uff00-\uff9f\U00020000-\U0003ffff"
_WORD = re.compile(rf"(?:^|(?<=\s))\S|[{_UNSPACED}]")
"""Where a text may be cut: before a word, and before any letter of Chinese, Japanese, Thai, Lao, Khmer or Burmese."""
DEFAULT_TRUNCATION = {"sft": "right", "reward": "left", "ppo": "drop"}


class Refused(ValueError):
    """A row a stage has no use for; the message is the reason that is counted, `detail` what else is known."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason)
        self.detail = detail

    def example(self, place: str) -> str:
        """The row at `place` as an example of the reason."""
        return f"{place}: {self} ({self.detail})" if self.detail else f"{place}: {self}"


@dataclass(frozen=True)
class Rules:
    """How a stage makes items. `limit`: most tokens of an item's sequence, None for no limit.

    `single_answers`: one of SINGLE_ANSWERS in the reward stage, None in the others.
    """

    stage: str
    limit: int | None
    truncation: str
    train_on_prompt: bool = False
    single_answers: str | None = None


def make_rules(
    stage: str,
    max_seq_len: int | None,
    max_prompt_len: int | None,
    truncation: str | None,
    train_on_prompt: bool,
    single_answers: str = "auto",
) -> Rules:
    """The rules a stage's arguments ask for. Raises ValueError, naming the argument that does not fit."""
    if stage not in STAGES:
        raise ValueError(f"stage {stage!r} must be one of {', '.join(STAGES)}")
    truncation = truncation or DEFAULT_TRUNCATION[stage]
    if truncation not in TRUNCATIONS:
        raise ValueError(f"truncation {truncation!r} must be one of {', '.join(TRUNCATIONS)}")
    if stage == "ppo" and truncation == "right":
        raise ValueError("truncation right would cut off the end of PPO's questions: use drop or left")
    if single_answers not in SINGLE_ANSWERS:
        raise ValueError(f"single_answers {single_answers!r} must be one of {', '.join(SINGLE_ANSWERS)}")
    limit = max_prompt_len if stage == "ppo" else max_seq_len
    if limit is not None and limit < 1:
        raise ValueError(
            f"the longest {'prompt' if stage == 'ppo' else 'dialogue'} of {limit} tokens must be at least 1"
        )
    singles = single_answers if stage == "reward" else None
    return Rules(stage, limit, truncation, train_on_prompt and stage == "sft", singles)


def make_items(rows: Sequence[Row], tokenizer: Any, rules: Rules, report: SourceReport) -> list[Item | Refused]:
    """The item of each row, or why there is none. Rows cut to fit are counted in `report.rows_cut`."""
    maker = _Maker(format_of(tokenizer), rules, report)
    return maker.make(rows)


class _Maker:
    def __init__(self, chat: ChatFormat, rules: Rules, report: SourceReport):
        self.chat, self.rules, self.report = chat, rules, report
        self.open = rules.stage == "ppo"

    def make(self, rows: Sequence[Row]) -> list[Item | Refused]:
        wanted: list[tuple[list[list[Turn]], list[Any]] | Refused] = []
        for row in rows:
            try:
                dialogues = self.dialogues(row)
                wanted.append((dialogues, [self.chat.plan(turns, self.open) for turns in dialogues]))
            except Refused as reason:
                wanted.append(reason)
            except ValueError as error:
                wanted.append(Refused("roles the chat template refuses", str(error)))
        encoded = iter(self.chat.run([plan for one in wanted if not isinstance(one, Refused) for plan in one[1]]))
        items: list[Item | Refused] = []
        for row, one in zip(rows, wanted, strict=True):
            if isinstance(one, Refused):
                items.append(one)
                continue
            dialogues, plans = one
            try:
                items.append(self.item(row, self.fit(dialogues, [next(encoded) for _ in plans])))
            except Refused as reason:
                items.append(reason)
        return items

    def dialogues(self, row: Row) -> list[list[Turn]]:
        """The dialogues to encode: the whole one, both sides of a pair, or the prompt."""
        prompt = turns_of(row)
        if self.rules.stage == "ppo":
            return [prompt]
        if self.rules.stage == "sft":
            answer = row.get("response", row.get("chosen"))
            if answer is None:
                raise Refused("no answer")
            if row.get("score", 1.0) <= 0:
                raise Refused("answer marked bad (score 0 or less)")
            return [[*prompt, _answer(answer)]]
        if "chosen" not in row or "rejected" not in row:
            self.check_single(row)
            return [[*prompt, _answer(row["response"])]]
        if row["chosen"] == row["rejected"]:
            raise Refused("both answers equal")
        return [[*prompt, _answer(row["chosen"])], [*prompt, _answer(row["rejected"])]]

    def check_single(self, row: Row) -> None:
        """Raises Refused for an answer without a partner that cannot stand alone."""
        if "response" not in row or "score" not in row:
            raise Refused("no pair of answers")
        kind = self.kind(row)
        if kind == "pair":
            raise Refused("no answer of another score to the same prompt")
        if kind == "auto":
            raise Refused("one answer with a number: say label or score by single_answers")
        if kind == "label" and not 0 <= row["score"] <= 1:
            raise Refused("label outside 0 to 1")

    def kind(self, row: Row) -> str:
        """What a row is to the reward stage; `single_kind` is what `auto` has found out about its source."""
        if "rejected" in row:
            return "pair"
        return row.get("single_kind", self.rules.single_answers)

    def item(self, row: Row, encoded: list[Encoded]) -> Item:
        ids = [one.ids for one in encoded]
        if self.rules.stage == "sft":
            trained = [True] * len(ids[0]) if self.rules.train_on_prompt else encoded[0].trained
            return Item(ids, trained=trained)
        if self.rules.stage == "ppo":
            return Item(ids, row=row)
        if ids[0] == ids[-1] and len(ids) > 1:
            raise Refused("both answers equal as tokens")
        kind = self.kind(row)
        value = row.get("margin", 0.0) if kind == "pair" else row["score"]
        starts = (encoded[0].starts[-1], encoded[-1].starts[-1])
        return Item(ids, facts=(KINDS.index(kind), value, starts, self.report.number))

    # ------------------------------------------------------------ length

    def too_long(self, encoded: list[Encoded]) -> bool:
        return self.rules.limit is not None and max(len(one.ids) for one in encoded) > self.rules.limit

    def fit(self, dialogues: list[list[Turn]], encoded: list[Encoded]) -> list[Encoded]:
        if not self.too_long(encoded):
            return encoded
        if self.rules.truncation == "drop":
            raise Refused(f"longer than {self.rules.limit} tokens")
        if self.rules.truncation == "right":
            encoded, side = [self.cut_right(one) for one in encoded], "right"
        else:
            encoded, side = self.cut_left(dialogues)
        self.report.rows_cut[side] += 1
        return encoded

    def cut_right(self, one: Encoded) -> Encoded:
        end = min(len(one.ids), self.rules.limit)
        while end and not one.trained[end - 1]:
            end -= 1
        if end <= (0 if self.rules.stage == "sft" else one.starts[-1]):
            raise Refused(f"no answer within {self.rules.limit} tokens")
        return Encoded(one.ids[:end], one.trained[:end], one.starts)

    def cut_left(self, dialogues: list[list[Turn]]) -> tuple[list[Encoded], str]:
        """(the dialogues over the longest ending of their prompt that fits, how they were cut)."""
        prompt = dialogues[0] if self.open else dialogues[0][:-1]
        answers = [[] if self.open else turns[-1:] for turns in dialogues]

        def whole(some: list[Turn]) -> list[Encoded] | None:
            encoded = self.encode([some + answer for answer in answers], self.open)
            return None if self.too_long(encoded) else encoded

        found = shrink(prompt, whole)
        if found is not None:
            return found, "left"
        if self.rules.stage == "ppo":
            raise Refused(f"longer than {self.rules.limit} tokens")
        if self.rules.stage == "sft":
            raise Refused(f"answer longer than {self.rules.limit} tokens")

        def room_for_answers(some: list[Turn]) -> list[Turn] | None:
            (encoded,) = self.encode([some], True)
            return some if len(encoded.ids) <= self.rules.limit // PROMPT_SHARE else None

        some = shrink(prompt, room_for_answers)
        if some is None:
            raise Refused(f"question that cannot be cut to fit {self.rules.limit} tokens")
        encoded = self.encode([some + answer for answer in answers], False)
        return [self.cut_right(one) for one in encoded], "left, and the end of an answer"

    def encode(self, dialogues: list[list[Turn]], open_answer: bool) -> list[Encoded]:
        try:
            return self.chat.encode(dialogues, open_answer)
        except ValueError as error:
            raise Refused("roles the chat template refuses", str(error)) from error


def shrink(prompt: list[Turn], accept: Callable[[list[Turn]], Any]) -> Any:
    """What `accept` gives for the longest ending of `prompt` that it accepts (does not answer with None).

    The oldest turns go first, whole, the system turn stays; then the beginning of the last question, by words, or by
    letters where a script has no spaces. None when nothing that holds a word of the last question is accepted.
    """
    head = prompt[:1] if prompt and prompt[0]["role"] == "system" else []
    turns = prompt[len(head) :]
    if not turns:
        return None
    begins = [k for k, turn in enumerate(turns) if turn["role"] == "user"] or [0]
    found = _longest(lambda start: accept(head + turns[start:]), begins)
    if found is not None:
        return found
    question, rest = turns[begins[-1]], turns[begins[-1] + 1 :]
    text = question["content"]
    words = [match.start() for match in _WORD.finditer(text)]
    return _longest(lambda start: accept([*head, {**question, "content": text[start:].strip()}, *rest]), words)


def _longest(accept: Callable[[int], Any], starts: Sequence[int]) -> Any:
    """What `accept` gives for the first of `starts` that it accepts, when it accepts all behind one that it accepts;
    None when it accepts none. Searched from the end, so that the cost is that of what is kept."""
    best, taken, refused, step = None, len(starts), -1, 1  # starts[refused] is refused, starts[taken] accepted
    while taken - refused > 1:
        place = max(taken - step, 0) if refused < 0 else (taken + refused) // 2
        found = accept(starts[place])
        if found is None:
            refused = place
        else:
            best, taken, step = found, place, 2 * step
    return best


def _answer(text: str) -> Turn:
    return {"role": "assistant", "content": text.strip()}
