"""How good the actor is on held-out prompts: its scores, its distance to the reference, and, where a gold
function can tell right from wrong, how often it is right.

Answers are sampled as in training, one a prompt, with the same seed at every evaluation, so that two
evaluations differ by the policy and not by the dice.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from data.chat import decode_response
from engine import distributed
from rlhf.micro_batches import Cut
from rlhf.rollout import Models, Rollout, generate, judge

GoldFunction = Callable[[str, str], float]


class Evaluator:
    """Evaluates the actor on `items` (held-out prompts) and keeps a few answers before and after.

    `samples.jsonl` in the output folder holds those answers: prompt, before, after, gold_before, gold_after.
    """

    def __init__(self, items, tokenizer, args, sampling: dict, gold: GoldFunction | None, cut: Cut):
        limit = args.num_eval_prompts or len(items)
        self._items = [items[i] for i in range(min(limit, len(items)))]
        self._tokenizer, self._args, self._sampling, self._gold = tokenizer, args, sampling, gold
        self._cut, self._samples = cut, Path(args.output_dir) / "samples.jsonl"

    def run(self, models: Models, label: str | None = None) -> dict[str, float]:
        """Means over the held-out prompts of all ranks; with a `label`, "before" or "after", records answers too."""
        if not self._items:
            return {}
        rank, world = distributed.rank(), distributed.world_size()
        # Every rank runs as many prompts, as sharded models need; the last ones may repeat and then do not count.
        share = -(-len(self._items) // world)
        numbers = range(rank * share, (rank + 1) * share)
        items = [self._items[min(i, len(self._items) - 1)] for i in numbers]
        counted = torch.tensor([i < len(self._items) for i in numbers])
        rollout = generate(
            models.actor,
            items,
            self._tokenizer,
            batch_size=self._args.per_device_generation_batch_size,
            seeds=[self._args.seed + 7_919 * (i + 1) for i in numbers],
            **self._sampling,
        )
        experience = judge(rollout, replace(models, critic=None), cut=self._cut, temperature=self._args.temperature)
        kl = ((experience.logprobs - experience.ref_logprobs) * experience.response_mask).sum(1)
        columns = {
            "score_mean": experience.scores,
            "kl_ref": kl,
            "response_length_mean": rollout.lengths,
            "truncated_fraction": ~rollout.finished,
        }
        answers = [decode_response(self._tokenizer, ids) for ids in rollout.responses()]
        judged = None
        if self._gold is not None:
            judged = [self._gold(item["row"]["prompt"], answer) for item, answer in zip(items, answers, strict=True)]
            columns["gold_rate"] = torch.tensor(judged)
        sums = [float(column.double()[counted].sum()) for column in columns.values()]
        *sums, count = distributed.all_reduce_sums([*sums, float(counted.sum())])
        if label is not None and distributed.is_main():
            self._record(label, items, answers, judged)
        return {**dict(zip(columns, (value / count for value in sums), strict=True)), "prompts": int(count)}

    def _record(self, label: str, items: list[dict], answers: list[str], judged: list[float] | None) -> None:
        shown = min(self._args.eval_samples, len(items))
        rows = [{"prompt": item["row"]["prompt"]} for item in items[:shown]]
        if self._samples.exists():
            known = [json.loads(line) for line in self._samples.read_text(encoding="utf-8").splitlines()]
            if [row["prompt"] for row in known] == [row["prompt"] for row in rows]:
                rows = known
        for number, row in enumerate(rows):
            row[label] = answers[number]
            row[f"gold_{label}"] = judged[number] if judged is not None else None
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        self._samples.write_text(text, encoding="utf-8")


def show(tokenizer, item: dict, rollout: Rollout) -> str:
    """The first prompt of a rollout with its answer, for the log."""
    return f"{item['row']['prompt'].strip()} {decode_response(tokenizer, rollout.responses()[0])}"
