"""How good the actor is on held-out prompts: its scores, its distance to the reference and how often it beats it, and,
where a gold function can tell right from wrong, how often it is right.

Answers are sampled as in training, one a prompt, with the same seed at every evaluation, so that two
evaluations differ by the policy and not by the dice. The reference is the actor before any update: its answers are
those of the first evaluation.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import torch

from data.chat import decode_response
from engine import distributed
from rlhf.metrics import write_json
from rlhf.micro_batches import Cut
from rlhf.rollout import Models, Rollout, generate, judge
from rlhf.scoring import Answers, Source

logger = logging.getLogger(__name__)


class Evaluator:
    """Evaluates the actor on `items` (held-out prompts) and keeps a few answers before and after.

    In the output folder `samples.jsonl` holds those answers (prompt, before, after, gold_before, gold_after), and
    `reference_eval.json` what the reference's answers earned, for a resumed run.
    """

    def __init__(self, items, tokenizer, args, sampling: dict, gold: Source | None, cut: Cut):
        limit = args.num_eval_prompts or len(items)
        self._items = [items[i] for i in range(min(limit, len(items)))]
        self._tokenizer, self._args, self._sampling, self._gold = tokenizer, args, sampling, gold
        self._cut, self._folder = cut, Path(args.output_dir)
        self.shown: list[str] = []
        self._known: dict[str, list[float]] | None = None

    def run(self, models: Models, label: str | None = None) -> dict[str, float]:
        """Means over the held-out prompts of all ranks; with a `label`, "before" or "after", records answers too.

        `win_rate` and `gold_win_rate` compare with the reference's answer to the same prompt, by score and by the
        gold function; a tie counts a half. `shown` becomes a few prompts with their answers, for the log.
        """
        if not self._items:
            return {}
        rank, world = distributed.rank(), distributed.world_size()
        # Every rank runs as many prompts, as sharded models need; the last ones may repeat and then do not count.
        share = -(-len(self._items) // world)
        numbers = [min(i, len(self._items) - 1) for i in range(rank * share, (rank + 1) * share)]
        items = [self._items[i] for i in numbers]
        counted = torch.arange(rank * share, (rank + 1) * share) < len(self._items)
        rollout = generate(
            models.actor,
            items,
            self._tokenizer,
            batch_size=self._args.per_device_generation_batch_size,
            seeds=[self._args.seed + 7_919 * (i + 1) for i in range(rank * share, (rank + 1) * share)],
            **self._sampling,
        )
        # values are nobody's business here
        experience = judge(rollout, replace(models, critic=None), cut=self._cut, temperature=self._args.temperature)
        kl = ((experience.logprobs - experience.ref_logprobs) * experience.response_mask).sum(1)
        columns = {
            "score_mean": experience.scores,
            "kl_ref": kl,
            "response_length_mean": rollout.lengths,
            "truncated_fraction": ~rollout.finished,
        }
        answers = rollout.texts(self._tokenizer)
        earned = {"score": experience.scores.tolist()}
        if self._gold is not None:
            rows = [item["row"] for item in items]
            earned["gold"] = self._gold(Answers([row["prompt"] for row in rows], answers, rows))
            columns["gold_rate"] = torch.tensor(earned["gold"])
        reference = self._reference(earned, is_reference=label == "before")
        for name, column in (("score", "win_rate"), ("gold", "gold_win_rate")):
            if name in earned and name in reference:
                columns[column] = wins(earned[name], [reference[name][i] for i in numbers])
        sums = [float(column.double().cpu()[counted].sum()) for column in columns.values()]
        *sums, count = distributed.all_reduce_sums([*sums, float(counted.sum())])
        pairs = zip(items, answers, strict=True)
        self.shown = [f"{item['row']['prompt'].strip()} {answer}" for item, answer in pairs][: self._args.eval_samples]
        if label is not None and distributed.is_main():
            self._record(label, items, answers, earned.get("gold"))
        return {**dict(zip(columns, (value / count for value in sums), strict=True)), "prompts": int(count)}

    def _reference(self, earned: dict[str, list[float]], is_reference: bool) -> dict[str, list[float]]:
        """What the reference's answers earned, by prompt; `earned` itself, of all ranks, when it is the reference's.

        Empty in a resumed run whose first part evaluated fewer prompts, or kept nothing.
        """
        path = self._folder / "reference_eval.json"
        if is_reference:
            parts = distributed.gather_objects(earned)
            self._known = {name: [value for part in parts for value in part[name]] for name in earned}
            if distributed.is_main():
                write_json(path, self._known)
        elif self._known is None:
            # rank 0's folder counts: the others may lie on other machines
            found = json.loads(path.read_text(encoding="utf-8")) if distributed.is_main() and path.exists() else {}
            found = distributed.broadcast_object(found)
            self._known = {name: values for name, values in found.items() if len(values) >= len(self._items)}
            if not self._known:
                logger.warning("%s does not have all of the held-out prompts: no win rates", path)
        return self._known

    def _record(self, label: str, items: list[dict], answers: list[str], judged: list[float] | None) -> None:
        shown = min(self._args.eval_samples, len(items))
        rows = [{"prompt": item["row"]["prompt"]} for item in items[:shown]]
        path = self._folder / "samples.jsonl"
        if path.exists():
            known = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            if [row["prompt"] for row in known] == [row["prompt"] for row in rows]:
                rows = known
        for number, row in enumerate(rows):
            row[label] = answers[number]
            row[f"gold_{label}"] = judged[number] if judged is not None else None
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        path.write_text(text, encoding="utf-8")


def wins(ours: list[float], theirs: list[float]) -> torch.Tensor:
    """1 where ours is the larger, 1/2 where both are equal, else 0."""
    difference = torch.tensor(ours, dtype=torch.float64) - torch.tensor(theirs, dtype=torch.float64)
    return (difference.sign() + 1) / 2


def show(tokenizer, item: dict, rollout: Rollout) -> str:
    """The first prompt of a rollout with its answer, for the log."""
    return f"{item['row']['prompt'].strip()} {decode_response(tokenizer, rollout.responses()[0])}"
