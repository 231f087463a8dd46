"""From a stage's flags to its data: `load_data`, the one place where the flags of `rlhf.data_flags` are read."""

from __future__ import annotations

import argparse
from typing import Any

from data import StageData, load_stage_data
from data.chat import use_template_file
from engine import distributed
from rlhf.metrics import write_data_report


def load_data(stage: str, tokenizer: Any, args: argparse.Namespace) -> StageData:
    """The items that `args` ask for, as `stage` ("sft", "reward" or "ppo") takes them. Collective.

    Gives the tokenizer the chat template of `--chat_template`, writes `data_report.json`, and prints how many
    rows of each source were read, used and dropped.

    Raises:
        FileNotFoundError, ValueError: as `data.load_stage_data`, in one line.
    """
    if args.chat_template:
        use_template_file(tokenizer, args.chat_template)
    data = load_stage_data(stage, tokenizer, **data_options(args))
    write_data_report(args.output_dir, data.report)
    if distributed.is_main():
        for line in data.report["lines"]:
            print(f"data: {line}", flush=True)
    return data


def data_options(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `data.load_stage_data` that the flags stand for."""
    return {
        "data_path": args.data_path,
        "data_split": args.data_split,
        "sft_only_data_path": getattr(args, "sft_only_data_path", ()),
        "data_output_path": args.data_output_path,
        "max_seq_len": getattr(args, "max_seq_len", None),
        "max_prompt_len": getattr(args, "max_prompt_seq_len", None),
        "train_on_prompt": getattr(args, "train_on_prompt", False),
        "seed": args.seed,
        "eval_fraction": args.eval_fraction,
        "truncation": args.truncation,
        "on_bad_row": args.on_bad_row,
        "max_bad_rows": args.max_bad_rows,
        "data_format": args.data_format,
        # DPO, which has no such flag, learns from pairs alone
        "single_answers": getattr(args, "single_answers", "pair"),
    }
