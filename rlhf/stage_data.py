"""From a stage's flags to its tokenizer and data: the one place where the flags of `rlhf.data_flags` are read."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from data import (
    ItemStream,
    StageData,
    collate_packs,
    collate_sft,
    load_stage_data,
    stream_stage_data,
)
from data.chat import use_template_file
from engine import distributed
from rlhf.end_token import use_eot_token
from rlhf.flag_groups import EOT_TOKEN
from rlhf.metrics import write_data_report
from rlhf.models import load_tokenizer

Collate = Callable[[Sequence[Any]], dict[str, Any]]


def stage_tokenizer(path: str | Path, args: argparse.Namespace, trained: str = "") -> Any:
    """The tokenizer of the model at `path`, with what `--chat_template` and `--add_eot_token` make of it.

    Args:
        trained: see `rlhf.end_token.use_eot_token`.

    Raises:
        FileNotFoundError, ValueError: no such folder or template, or an end token that does not fit, in one line.
    """
    tokenizer = load_tokenizer(path)
    if args.chat_template:
        use_template_file(tokenizer, args.chat_template)
    if args.add_eot_token:
        use_eot_token(tokenizer, getattr(args, "eot_token", EOT_TOKEN), trained=trained)
    return tokenizer


def load_data(stage: str, tokenizer: Any, args: argparse.Namespace) -> StageData:
    """The items that `args` ask for, as `stage` ("sft", "reward" or "ppo") takes them. Collective.

    Writes `data_report.json`, and prints how many
    rows of each source were read, used and dropped. With `--streaming`, `train` is an `ItemStream` and `eval` a list,
    and `report_stream` says at the end what became of the rows.

    Raises:
        FileNotFoundError, ValueError: as `data.load_stage_data`, in one line.
    """
    if args.streaming:
        return _open_stream(stage, tokenizer, args)
    data = load_stage_data(stage, tokenizer, data_output_path=args.data_output_path, **data_options(args))
    _write_report(data, args)
    return data


def _open_stream(stage: str, tokenizer: Any, args: argparse.Namespace) -> StageData:
    options = data_options(args)
    if not args.stream_eval_rows:
        options["eval_fraction"] = 0.0  # nothing is evaluated, so every row trains
    stream = stream_stage_data(
        stage,
        tokenizer,
        buffer_rows=args.shuffle_buffer,
        rank=distributed.rank(),
        world_size=distributed.world_size(),
        **options,
    )
    held_out = stream.held_out(args.stream_eval_rows)
    if not held_out and args.eval_fraction and args.stream_eval_rows:
        raise ValueError(
            f"no row to evaluate with in {', '.join(map(str, args.data_path))}: raise --eval_fraction, or set it to 0"
        )
    return StageData(stream, held_out, stream.report())


def report_stream(data: StageData, args: argparse.Namespace) -> None:
    """A stage calls it at its end: only then is it known what a stream has given. Writes and prints the report, as
    `load_data` has done for data that are no stream. Collective."""
    if isinstance(data.train, ItemStream):
        data.report = data.train.report()
        _write_report(data, args)


def _write_report(data: StageData, args: argparse.Namespace) -> None:
    write_data_report(args.output_dir, data.report)
    if distributed.is_main():
        for line in data.report["lines"]:
            print(f"data: {line}", flush=True)


def source_names(report: dict[str, Any]) -> list[str]:
    """The sources of a data report by name, told apart by number where two have the same."""
    names = [source["name"] for source in report["sources"]]
    return [f"{name} ({number})" if names.count(name) > 1 else name for number, name in enumerate(names, 1)]


def collate_with(collate: Callable[..., dict[str, Any]], tokenizer: Any, args: argparse.Namespace) -> Collate:
    """`collate` (of `data`) with the tokenizer's padding and `--pad_to_multiple_of`."""
    return lambda items: collate(items, tokenizer.pad_token_id, args.pad_to_multiple_of)


def sft_collates(tokenizer: Any, args: argparse.Namespace) -> tuple[Collate, Collate]:
    """(of training, of evaluation): with `--packing` only training's rows are packed."""
    plain = collate_with(collate_sft, tokenizer, args)
    return (collate_with(collate_packs, tokenizer, args) if args.packing else plain), plain


def data_options(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `data.load_stage_data` and `data.stream_stage_data` that the flags stand for."""
    return {
        "data_path": args.data_path,
        "data_split": args.data_split,
        "sft_only_data_path": getattr(args, "sft_only_data_path", ()),
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
