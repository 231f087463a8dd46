"""The data of one stage, ready for batches: `load_stage_data`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data import cache
from data.builder import Builder
from data.identity import Identity
from data.items import make_rules
from data.loading import BadRows
from data.opening import open_source
from data.sources import SourceLike, dealt_sources
from data.splits import hold_out
from data.store import ItemSet


@dataclass
class StageData:
    """What a stage trains on and is evaluated with, and the account of it (data_report.json)."""

    train: ItemSet
    eval: ItemSet
    report: dict[str, Any]


def load_stage_data(
    stage: str,
    tokenizer: Any,
    *,
    data_path: SourceLike | Sequence[SourceLike] = ("sample",),
    data_split: str | Sequence[float] = "2,4,4",
    sft_only_data_path: SourceLike | Sequence[SourceLike] = (),
    data_output_path: str | os.PathLike[str] | None = None,
    max_seq_len: int | None = None,
    max_prompt_len: int | None = None,
    train_on_prompt: bool = False,
    seed: int = 1234,
    eval_fraction: float = 0.1,
    min_train: int = 1,
    truncation: str | None = None,
    on_bad_row: str = "drop",
    max_bad_rows: float = BadRows.limit,
    data_format: str | None = None,
    single_answers: str = "auto",
) -> StageData:
    """Reads, deals, tokenizes and caches the data of one stage. A collective call when ranks are up.

    Args:
        stage: "sft", "reward" or "ppo".
        tokenizer: a Hugging Face tokenizer with an end token.
        data_path: sources, see `data.sources`.
        data_split: shares of the three stages; each source's training rows are dealt by `seed`.
        sft_only_data_path: more sources, used whole by SFT and by no other stage.
        data_output_path: folder of the caches; None: one under the system's temporary folder.
        max_seq_len: most tokens of a dialogue (SFT, each side of a pair). max_prompt_len: of a PPO prompt.
        train_on_prompt: SFT learns the prompt's tokens too.
        eval_fraction: share of the stage's rows held out where a source has no evaluation part of its own. A
            source's own evaluation rows serve every stage and train none.
        min_train: fewest training items.
        truncation: "drop", "left" or "right", see `data.items`; None: the stage's default.
        on_bad_row: "drop" counts rows that cannot be used, "error" stops at one that cannot be read.
        max_bad_rows: share of a source's rows that cannot be read, above which the source is refused.
        data_format: shape of all sources that do not name their own, see `data.shapes`; None: by their columns.
        single_answers: what reward makes of single answers with a number: "auto", "pair", "label" or "score", see
            `data.items`.

    Raises:
        FileNotFoundError: a path with nothing there.
        ValueError: an argument that does not fit, or too few rows left; the message has the counts.
    """
    rules = make_rules(stage, max_seq_len, max_prompt_len, truncation, train_on_prompt, single_answers)
    hold_out([], eval_fraction)
    bad_rows = BadRows(on_bad_row, max_bad_rows)
    shares = dealt_sources(stage, data_path, data_split, sft_only_data_path, data_format)
    output = cache.default_folder() if data_output_path is None else Path(data_output_path)

    def find_or_build() -> tuple[Path, dict[str, Any], Identity]:
        sources = [(open_source(source), ratios) for source, ratios in shares]
        builder = Builder(sources, tokenizer, rules, seed, eval_fraction, bad_rows)
        return builder.find_or_build(output, min_train)

    folder, report, identity = cache.on_one_rank(find_or_build)
    return StageData(ItemSet(folder / "train", stage, identity), ItemSet(folder / "eval", stage), report)
