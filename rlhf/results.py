"""Reading a run's results back from its files: metrics, evaluations, answers, and a pipeline's summary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STAGES = ("sft", "reward", "ppo")
Line = dict[str, Any]


@dataclass
class StageResult:
    """One stage's files: training lines, evaluation lines, and (PPO) answers before and after."""

    stage: str
    folder: Path
    train: list[Line] = field(default_factory=list)
    evals: list[Line] = field(default_factory=list)
    samples: list[Line] = field(default_factory=list)
    run: Line = field(default_factory=dict)
    data_report: Line = field(default_factory=dict)

    def first(self, name: str) -> float | None:
        """The evaluation before any update; None if it was not measured."""
        return next((e[name] for e in self.evals if e.get("step") == 0 and e.get(name) is not None), None)

    def last(self, name: str) -> float | None:
        """The last evaluation after an update; None if it was not measured."""
        found = [e[name] for e in self.evals if e.get("step", 0) > 0 and e.get(name) is not None]
        return found[-1] if found else None

    def curve(self, name: str, evaluation: bool = False) -> tuple[list[int], list[float]]:
        """Steps and values of one figure, where it was measured."""
        lines = self.evals if evaluation else self.train
        points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
        return [step for step, _ in points], [value for _, value in points]


def read_stage(folder: Path) -> StageResult | None:
    """Read a stage's folder; None if it holds no metrics yet."""
    lines = read_lines(folder / "metrics.jsonl")
    if not lines:
        return None
    stage = str(lines[0].get("stage", folder.name))
    return StageResult(
        stage=stage,
        folder=folder,
        train=[line for line in lines if not line.get("eval")],
        evals=[line for line in lines if line.get("eval")],
        samples=read_lines(folder / "samples.jsonl"),
        run=_read_json(folder / "run.json"),
        data_report=_read_json(folder / "data_report.json"),
    )


def read_folder(folder: Path) -> dict[str, StageResult]:
    """The stages of a pipeline's folder, or the one stage whose folder this is.

    Raises:
        FileNotFoundError: there is no such folder, or no metrics in it.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}: give the --output-dir of a run")
    alone = read_stage(folder)
    found = [alone] if alone else [read_stage(folder / stage) for stage in STAGES]
    results = {result.stage: result for result in found if result is not None}
    if not results:
        raise FileNotFoundError(
            f"no metrics.jsonl in {folder} or in its folders {', '.join(STAGES)}: give a run's --output-dir"
        )
    return results


def summarize(results: dict[str, StageResult], seconds: dict[str, float]) -> dict[str, Any]:
    """The content of ``summary.json``; what a run cannot know is None.

    ``kl_ref`` is the mean over held-out prompts of an answer's summed log-probability ratio, in nats.
    """
    sft, reward, ppo = (results.get(stage) for stage in STAGES)
    return {
        "sft_perplexity": sft.last("perplexity") if sft else None,
        "reward_accuracy": reward.last("accuracy") if reward else None,
        "gold_rate_sft": ppo.first("gold_rate") if ppo else None,
        "gold_rate_ppo": ppo.last("gold_rate") if ppo else None,
        "kl_ref": ppo.last("kl_ref") if ppo else None,
        "seconds": {stage: seconds.get(stage) for stage in STAGES},
    }


def over_optimised(ppo: StageResult, margin: float = 0.05) -> str | None:
    """A sentence if the gold-right rate fell from its best while the score went on rising; else None."""
    points = [e for e in ppo.evals if e.get("gold_rate") is not None and e.get("score_mean") is not None]
    if len(points) < 2:
        return None
    best, last = max(points, key=lambda e: e["gold_rate"]), points[-1]
    if best["gold_rate"] - last["gold_rate"] <= margin or last["score_mean"] < best["score_mean"]:
        return None
    return (
        f"over-optimised: the gold-right rate was {best['gold_rate']:.1%} at step {best['step']} and is "
        f"{last['gold_rate']:.1%} at the end, while the score rose from {best['score_mean']:.2f} to "
        f"{last['score_mean']:.2f}; a larger --kl_ctl or fewer steps hold it"
    )


def shown_prompt(prompt: str) -> str:
    """A prompt in marker form without its closing marker; a single turn without markers at all."""
    text = prompt.strip().removesuffix("Assistant:").strip()
    single = text.removeprefix("Human:").strip()
    return single if "\n\nHuman:" not in single and "\n\nAssistant:" not in single else text


def judged(row: Mapping[str, Any], when: str) -> bool | None:
    """Whether the judge found an answer right; None without a judge."""
    value = row.get(f"gold_{when}")
    return None if value is None else value >= 0.5


def read_lines(path: Path) -> list[Line]:
    """The JSON lines of a file; an empty list without one. A last line that was cut short is left out.

    Raises:
        ValueError: another line is not JSON.
    """
    if not path.exists():
        return []
    texts = path.read_text(encoding="utf-8").splitlines()
    lines = []
    for number, text in enumerate(texts, start=1):
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError as error:
            if number < len(texts):
                raise ValueError(f"{path}, line {number}: not JSON ({error})") from None
    return lines


def _read_json(path: Path) -> Line:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
