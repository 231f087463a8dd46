"""Models that learned a vector for each position know as many positions and no more: longer texts are refused in words.

Without this a text too long ends as an index out of range, and on a GPU as a failed assertion far from its cause.
Rotary positions and ALiBi have no such end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

TABLES = ("wpe", "embed_positions")  # what transformers calls the table in GPT-2 and its kin, and in OPT and its kin


def position_limit(module: nn.Module) -> int | None:
    """How many positions `module` (a transformers model, or a wrapper around one) has learned; None without a table."""
    table = _table(module)
    return None if table is None else table.num_embeddings - getattr(table, "offset", 0)


def check_longest(module: nn.Module, items: Any, answer_length: int = 0) -> None:
    """Refuse a run over `items` whose longest text, with `answer_length` tokens behind it, is too long for `module`.

    Items of a stream have no known length: `guard_positions` refuses the first one that is too long.

    Raises:
        ValueError: it is. One line.
    """
    limit = position_limit(module)
    if limit is not None and hasattr(items, "lengths") and len(items):
        _refuse_beyond(limit, int(items.lengths().max()) + answer_length)


def guard_positions(model: nn.Module) -> None:
    """Make forward passes of `model`, a transformers model, raise ValueError for positions beyond its table."""
    table, limit = _table(model), position_limit(model)
    if limit is None:
        return

    def check(module: nn.Module, args: tuple, inputs: dict[str, Any]) -> None:
        ids: torch.Tensor | None = inputs["position_ids"] if "position_ids" in inputs else args[0]
        if ids is not None and ids.shape[-1] > limit:  # seldom: to look at the positions makes a GPU wait
            _refuse_beyond(limit, int(ids.max()) + 1)

    table.register_forward_pre_hook(check, with_kwargs=True)


def _table(module: nn.Module) -> nn.Embedding | None:
    tables = (child for name, child in module.named_modules() if name.rpartition(".")[2] in TABLES)
    return next((table for table in tables if isinstance(table, nn.Embedding)), None)


def _refuse_beyond(limit: int, length: int) -> None:
    if length > limit:
        raise ValueError(
            f"a text of {length} tokens is longer than the {limit} positions that the model has learned: lower "
            "--max_seq_len, in PPO --max_prompt_seq_len or --max_answer_seq_len"
        )
