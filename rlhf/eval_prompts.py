"""``rlhf eval prompts``: two or more models answer the same prompts, side by side.

    rlhf eval prompts --model_name_or_path_baseline OUTPUT/sft --model_name_or_path_finetune OUTPUT/ppo/actor

With a reward model or a judge every answer is scored, and each model's win rate against the baseline told: the share
of prompts its answers score higher on, a tie being half a win.
"""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from data import load_rows
from data.chat import encode_dialogue
from data.markers import has_markers, turns_to_text
from data.opening import open_source
from rlhf.answering import Answerer, default_device, inference_type
from rlhf.eval_flags import prompt_eval_parser
from rlhf.flags import parse
from rlhf.metrics import write_json
from rlhf.models import load_score_model, load_tokenizer, score_ids
from rlhf.results import shown_prompt
from rlhf.scoring import Answers, function_source

# A spread of tasks a chat model should manage: facts, explaining to a child, a list, a story, advice, arithmetic.
BUILT_IN = {
    "English": [
        "Why does the sea taste of salt?",
        "Explain to a six-year-old what a bank does.",
        "List five things to take along on a day's walk in the mountains.",
        "Write a short story about a lighthouse keeper and a lost letter.",
        "My neighbour plays loud music at night. How should I talk to her about it?",
        "A train leaves at 9:40 and arrives at 12:15. How long does it travel?",
    ],
    "Chinese": [
        "为什么海水是咸的?",
        "请向一个六岁的孩子解释银行是做什么的。",
        "列出去山里徒步一天要带的五样东西。",
        "写一个关于灯塔看守人和一封丢失的信的小故事。",
        "邻居晚上放音乐太吵,我该怎么和她说?",
        "火车9:40出发,12:15到达,一共行驶多长时间?",
    ],
    "Japanese": [
        "海の水はなぜ塩辛いのですか。",
        "銀行は何をするところか、六歳の子どもに説明してください。",
        "山へ日帰りで歩きに行くときの持ち物を五つ挙げてください。",
        "灯台守となくなった手紙の短い物語を書いてください。",
        "隣の人が夜に大きな音で音楽をかけます。どう話せばよいでしょうか。",
        "列車は9時40分に出て12時15分に着きます。何時間何分かかりますか。",
    ],
}


def main(argv: Sequence[str]) -> None:
    """Answer, score and print.

    Raises:
        FileNotFoundError, ValueError: no such model or data, or flags that do not fit together. One line.
    """
    parser = prompt_eval_parser()
    args = parse(parser, argv)
    if args.num_beam_groups > 1:
        parser.error("--num_beam_groups above 1: diverse beam search is not in transformers any more; use --num_beams")
    if args.num_return_sequences > 1 and "greedy" in args.decoding and 1 < args.num_beams < args.num_return_sequences:
        parser.error(f"--num_return_sequences {args.num_return_sequences} needs as many --num_beams")
    console = Console(highlight=False)
    result = compare(args)
    show(result, console)
    if args.output:
        write_json(Path(args.output), result)
        console.print(f"written to {args.output}")


def compare(args: Namespace) -> dict[str, Any]:
    """The answers of every model to every prompt, their scores, and a summary for each way of decoding.

    `models`; `summary`: decoding -> model -> figures; `prompts`: `prompt` and `answers`: decoding -> model -> list of
    `text` with `score` and `gold` where measured.
    """
    prompts = choose_prompts(args)
    paths = list(dict.fromkeys([args.model_name_or_path_baseline, *args.model_name_or_path_finetune]))
    rows = [{"prompt": prompt["prompt"], "answers": {name: {} for name in args.decoding}} for prompt in prompts]
    for path in paths:
        answerer = Answerer(path, args)
        for decoding in args.decoding:
            for row, texts in zip(rows, answerer.answers(prompts, decoding), strict=True):
                row["answers"][decoding][path] = [{"text": text} for text in texts]
    _score(prompts, rows, args)
    summary = {decoding: summarize(rows, decoding, paths) for decoding in args.decoding}
    return {"models": paths, "summary": summary, "prompts": rows}


def choose_prompts(args: Namespace) -> list[dict[str, Any]]:
    """Rows with a `prompt` (marker form) and, where they came as turns, `messages`: of `--prompt`, of the sources, or
    the built-in ones of `--language`."""
    given = [
        {"prompt": text} if has_markers(text) else _question(text)
        for text in (args.prompt or ([] if args.data_path else BUILT_IN[args.language]))
    ]
    known: dict[str, dict[str, Any]] = {}
    for path in args.data_path:
        part = "train" if open_source(path).eval is None else "eval"
        known |= {row["prompt"]: row for row in load_rows(path, part)[0]}
    drawn = random.Random(args.seed).sample(list(known.values()), min(args.num_prompts, len(known)))
    return given + drawn


def _question(text: str) -> dict[str, Any]:
    turns = [{"role": "user", "content": text}]
    return {"prompt": turns_to_text(turns), "messages": turns}


def _score(prompts: list[dict[str, Any]], rows: list[dict[str, Any]], args: Namespace) -> None:
    """Adds `score` and `gold` to the answers of `rows` to `prompts`, in place."""
    by_model = [(p, models) for p, row in zip(prompts, rows, strict=True) for models in row["answers"].values()]
    answers = [(prompt, one) for prompt, models in by_model for many in models.values() for one in many]
    if args.reward_model_name_or_path:
        tokenizer = load_tokenizer(args.reward_model_name_or_path)
        model = load_score_model(args.reward_model_name_or_path, inference_type(args.dtype)).to(default_device())
        # as an answer to this prompt, whatever it says: markers in it begin no turn
        ids = [encode_dialogue(tokenizer, prompt, one["text"])[0] for prompt, one in answers]
        found = score_ids(model, ids, tokenizer.pad_token_id, args.per_device_eval_batch_size).tolist()
        for (_, one), score in zip(answers, found, strict=True):
            one["score"] = score
    if args.gold_fn:
        gold = function_source(args.gold_fn, "--gold_fn")
        rows, texts = [prompt for prompt, _ in answers], [one["text"] for _, one in answers]
        for (_, one), mark in zip(answers, gold(Answers([row["prompt"] for row in rows], texts, rows)), strict=True):
            one["gold"] = mark


def summarize(rows: list[dict[str, Any]], decoding: str, paths: list[str]) -> dict[str, dict[str, float]]:
    """For each model: characters an answer, mean score and gold, and win rates against the first model."""
    out: dict[str, dict[str, float]] = {}
    for path in paths:
        many = [row["answers"][decoding][path] for row in rows]
        figures = {"length_mean": _mean([len(one["text"]) for some in many for one in some])}
        for name in ("score", "gold"):
            if name in many[0][0]:
                figures[f"{name}_mean"] = _mean([one[name] for some in many for one in some])
                if path != paths[0]:
                    base = [row["answers"][decoding][paths[0]] for row in rows]
                    wins = [_wins(mine, other, name) for mine, other in zip(many, base, strict=True)]
                    figures[f"{name}_win_rate"] = _mean(wins)
        out[path] = figures
    return out


def _wins(mine: list[dict[str, Any]], base: list[dict[str, Any]], name: str) -> float:
    """How often an answer of mine beats one of the base, over all pairs; a tie is half."""
    pairs = [(a[name], b[name]) for a in mine for b in base]
    return _mean([1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def show(result: dict[str, Any], console: Console) -> None:
    """A table for each way of decoding, the models in columns, and one of the summary."""
    paths = result["models"]
    for decoding in result["summary"]:
        table = Table("prompt", *paths, title=decoding, title_justify="left", show_lines=True)
        for row in result["prompts"]:
            cells = [Text(shown_prompt(row["prompt"]))]
            for path in paths:
                cells.append(Text("\n\n".join(map(_answer_text, row["answers"][decoding][path]))))
            table.add_row(*cells)
        console.print(table)
    names = list(dict.fromkeys(name for by in result["summary"].values() for one in by.values() for name in one))
    table = Table("decoding", "model", *names)
    for decoding, by_model in result["summary"].items():
        for path, one in by_model.items():
            table.add_row(decoding, path, *(f"{one[name]:.3f}" if name in one else "" for name in names))
    console.print(table)


def _answer_text(one: dict[str, Any]) -> str:
    marks = [f"{name} {one[name]:+.3f}" for name in ("score", "gold") if name in one]
    return one["text"] + (f"\n[{', '.join(marks)}]" if marks else "")
