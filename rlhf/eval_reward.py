"""``rlhf eval reward``: how well a reward model tells good answers from bad ones.

    rlhf eval reward --model_name_or_path OUTPUT/reward --data_path FILE
    rlhf eval reward --model_name_or_path OUTPUT/reward --prompt "What is 2 + 2?" --chosen "4." --rejected "5."
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from data import collate_answers, load_stage_data
from data.chat import encode_dialogue, use_template_file
from data.markers import has_markers
from rlhf.answering import default_device, inference_type
from rlhf.eval_flags import reward_eval_parser
from rlhf.flags import parse
from rlhf.metrics import write_json
from rlhf.models import ScoreModel, load_score_model, load_tokenizer, scores
from rlhf.reward_metrics import figures
from rlhf.stage_data import data_options, source_names

NAMES = {
    "pairs": "pairs",
    "labels": "labelled answers",
    "scores": "scored answers",
    "accuracy": "accuracy",
    "auc": "AUC, good against bad answers",
    "chosen_score": "mean score, good answers",
    "rejected_score": "mean score, bad answers",
    "ece": "calibration error",
    "score_error": "error of scores, root mean square",
    "score_correlation": "correlation with the scores",
}


def main(argv: Sequence[str]) -> None:
    """Run the evaluation and print its table.

    Raises:
        FileNotFoundError, ValueError: no such reward model or data, or flags that do not fit together. One line.
    """
    parser = reward_eval_parser()
    args = parse(parser, argv)
    alone = [name for name in ("prompt", "chosen", "rejected") if getattr(args, name) is not None]
    if alone and not {"prompt", "chosen"} <= set(alone):
        parser.error(f"--{alone[0]} needs --prompt and --chosen beside it")
    tokenizer = load_tokenizer(args.model_name_or_path)
    if args.chat_template:
        use_template_file(tokenizer, args.chat_template)
    model = load_score_model(args.model_name_or_path, inference_type(args.dtype)).to(default_device()).eval()
    console = Console(highlight=False)
    result = _one_comparison(model, tokenizer, args) if alone else _on_data(model, tokenizer, args)
    _print(console, args.model_name_or_path, result)
    if args.output:
        write_json(Path(args.output), {"model": args.model_name_or_path, **result})
        console.print(f"written to {args.output}")


def _one_comparison(model: ScoreModel, tokenizer: Any, args: Namespace) -> dict[str, Any]:
    """The scores of one or two answers to `--prompt`."""
    prompt = args.prompt if has_markers(args.prompt) else [{"role": "user", "content": args.prompt}]
    found: dict[str, Any] = {"prompt": args.prompt}
    for side in ("chosen", "rejected"):
        answer = getattr(args, side)
        if answer is not None:
            ids, _ = encode_dialogue(tokenizer, prompt, answer)
            row = torch.tensor([ids], device=next(model.parameters()).device)
            with torch.no_grad():
                found |= {side: answer, f"{side}_score": float(scores(model, row, torch.ones_like(row).bool()))}
    return found


def _on_data(model: ScoreModel, tokenizer: Any, args: Namespace) -> dict[str, Any]:
    """Figures over the data, and each item's scores."""
    data = load_stage_data("reward", tokenizer, data_output_path=args.data_output_path, **data_options(args))
    items = list(data.eval) if args.part == "held_out" else [*data.train, *data.eval]
    if not items:
        raise ValueError("no held-out answers: raise --eval_fraction, or take --part all")
    sources = source_names(data.report)
    batches, rows = [], []
    for start in range(0, len(items), args.per_device_eval_batch_size):
        part = sorted(items[start : start + args.per_device_eval_batch_size], key=lambda item: item["kind"] != "pair")
        batch = score_items(model, part, tokenizer.pad_token_id)
        batches.append(batch)
        sides = zip(batch["chosen"].tolist(), batch["rejected"].tolist(), strict=True)
        found = [{"chosen_score": good, "rejected_score": bad} for good, bad in sides]
        found += [{"score": score} for score in batch["single"].tolist()]
        for item, one in zip(part, found, strict=True):
            known = {"target": item["target"]} if "target" in item else {"margin": item["margin"]}
            rows.append({"kind": item["kind"], "source": sources[item["source"]], **one, **known})
    return {**figures(batches, sources), "items": rows}


@torch.no_grad()
def score_items(model: ScoreModel, items: list[dict], pad_id: int | None) -> dict[str, Any]:
    """The columns of `rlhf.reward_metrics.Judged` of reward items, as arrays."""
    device = next(model.parameters()).device
    batch = collate_answers(items, pad_id)
    sizes = [len(batch["margins"]), len(batch["margins"]), len(batch["targets"])]
    found = scores(model, batch["input_ids"].to(device), batch["attention_mask"].to(device)).cpu()
    chosen, rejected, single = found.split(sizes)
    columns = {"chosen": chosen, "rejected": rejected, "single": single}
    columns |= {name: batch[name] for name in ("targets", "is_label", "sources")}
    return {name: column.numpy() for name, column in columns.items()}


def _print(console: Console, model: str, result: dict[str, Any]) -> None:
    table = Table("measure", "value", title=model, title_justify="left", show_edge=False, pad_edge=False)
    for side in ("chosen", "rejected"):
        if f"{side}_score" in result and side in result:
            table.add_row(f"score, {side}: {result[side]}", f"{result[f'{side}_score']:+.4f}")
    if "items" in result:
        for name, title in NAMES.items():
            value = result.get(name)
            if value is None or value == 0 and name in ("pairs", "labels", "scores"):
                continue
            text = str(value) if isinstance(value, int) else f"{value:.4f}"
            if f"{name}_low" in result:
                text += f"  (95%: {result[f'{name}_low']:.4f} to {result[f'{name}_high']:.4f})"
            table.add_row(title, text)
        by_source = result.get("accuracy_by_source", {})
        for name, value in by_source.items() if len(by_source) > 1 else ():
            table.add_row(f"accuracy of {Path(name).name}", f"{value:.4f}")
    console.print(table)
