"""Cutting answers into micro-batches: by number, or by a budget of tokens with little padding.

Masks and token weights make sums over an update independent of the cut; here it only decides time and memory.
Every rank makes as many micro-batches as every other, as sharded models need.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from engine.distributed import all_reduce_max
from rlhf.experience import Experience


def cut_by_tokens(
    rows: torch.Tensor, prompt_lengths: torch.Tensor, response_lengths: torch.Tensor, budget: int
) -> list[torch.Tensor]:
    """Row numbers `[N]` sorted by length and cut so that no part, padding included, has more than `budget` positions.

    A part is as wide as its longest prompt and its longest response together. Collective: every rank, with as many
    rows as every other, gets as many parts as the one that needs most.

    Args:
        prompt_lengths, response_lengths: real tokens of every row of the batch that `rows` points into.

    Raises:
        ValueError: one row alone is longer than the budget.
    """
    prompts, responses = prompt_lengths.cpu(), response_lengths.cpu()
    totals = (prompts + responses)[rows]
    if len(rows) and int(totals.max()) > budget:
        raise ValueError(
            f"an answer with its prompt has {int(totals.max())} tokens, more than --max_tokens_per_micro_batch {budget}"
        )
    parts: list[list[int]] = []
    widest_prompt = widest_response = 0
    for row in rows[totals.argsort(stable=True)].tolist():
        prompt, response = max(widest_prompt, int(prompts[row])), max(widest_response, int(responses[row]))
        if not parts or (len(parts[-1]) + 1) * (prompt + response) > budget:
            parts.append([])
            prompt, response = int(prompts[row]), int(responses[row])
        parts[-1].append(row)
        widest_prompt, widest_response = prompt, response
    wanted = int(all_reduce_max([len(parts)])[0])
    while len(parts) < wanted:  # there are rows enough: no rank has more parts than rows
        largest = max(range(len(parts)), key=lambda number: len(parts[number]))
        half = len(parts[largest]) // 2
        parts[largest : largest + 1] = [parts[largest][:half], parts[largest][half:]]
    return [torch.tensor(part) for part in parts]


@dataclass(frozen=True)
class Cut:
    """How answers are cut: `size` rows a micro-batch, or at most `max_tokens` positions where that is given."""

    size: int
    max_tokens: int | None = None

    def parts(self, experience: Experience, rows: torch.Tensor) -> list[torch.Tensor]:
        """Row numbers `[N]` of an experience, cut. Collective with `max_tokens`."""
        if not self.max_tokens:
            return list(rows.split(self.size))
        responses = experience.response_mask.sum(1)
        return cut_by_tokens(rows, experience.lengths - responses, responses, self.max_tokens)

    def sorted_parts(self, experience: Experience) -> list[torch.Tensor]:
        """All rows in order of length, cut: for passes whose result does not hang on a row's company."""
        return self.parts(experience, experience.lengths.cpu().argsort(stable=True))


class Part(NamedTuple):
    """A trimmed micro-batch; whether it is the last of its update, None where the engine counts; and all that this rank
    has of the update, None where the update reaches over the end of the experience."""

    batch: Experience
    is_last: bool | None
    update: Experience | None


def update_parts(
    experience: Experience, cut: Cut, *, epochs: int, window: int, generator: torch.Generator
) -> Iterator[Part]:
    """The experience `epochs` times, each time in a fresh order, as micro-batches of updates.

    An update takes `cut.size * window` rows, sorted by length before they are cut: a token-weighted update is the same
    whichever way its rows are cut, and rows of like length leave little padding. Without `max_tokens` the engine
    counts: `window` micro-batches are an update, which may reach over the end of an epoch or iteration.
    """
    count, lengths = len(experience), experience.lengths.cpu()
    # an update that reaches over the end is dealt as it comes: sorted rows would not be a fair mix
    is_whole = -(-count // cut.size) % window == 0
    for _ in range(epochs):
        order = torch.randperm(count, generator=generator)
        for update in order.split(cut.size * window) if is_whole else [order]:
            if is_whole and (window > 1 or cut.max_tokens):
                update = update[lengths[update].argsort(stable=True)]
            parts = cut.parts(experience, update)
            whole = experience.select(update.to(experience.input_ids.device)) if is_whole else None
            for number, part in enumerate(parts, start=1):
                is_last = number == len(parts) if cut.max_tokens else None
                yield Part(experience.select(part.to(experience.input_ids.device)).trimmed(), is_last, whole)
