"""A run's report: the table in the terminal, ``summary.json``, and ``report.html`` with the learning curves.

    rlhf report OUTPUT          # of a pipeline, or of one stage's folder

Everything is read from the files that the stages wrote, so it can be drawn again at any time, also while a
stage is running.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf import results
from rlhf.arguments import parse
from rlhf.flags import Parser
from rlhf.results import STAGES, StageResult

Row = tuple[str, str, str, str]
COLUMNS = ("stage", "measure", "value", "time")
NAMES = {"sft": "SFT", "reward": "reward", "dpo": "DPO", "ppo": "PPO"}
SHOWN_CHARACTERS = 240
SHOWN_SAMPLES = 5  # in the terminal; the page has all of them
MARKS = {True: Text("right", style="green"), False: Text("wrong", style="red"), None: Text("")}


def main(argv: Sequence[str]) -> None:
    """``rlhf report FOLDER``."""
    parser = Parser(
        "rlhf report", "Draw a run's table and report.html again from its files.", "%(prog)s FOLDER"
    )
    parser.add_argument("folder", metavar="FOLDER", help="the --output-dir of a pipeline, or of one stage")
    folder = Path(parse(parser, argv).folder)
    results.read_folder(folder)
    write(folder, read_seconds(folder), Console(soft_wrap=True, highlight=False))


def write(folder: Path, seconds: Mapping[str, float], console: Console) -> None:
    """Print the table and a few answers, and write ``report.html`` (and a pipeline's ``summary.json``)."""
    from rlhf import report_page  # draws with matplotlib, which takes a second to load

    found = results.read_folder(folder)
    summary = results.summarize(found, dict(seconds))
    if not (folder / "metrics.jsonl").exists():
        write_summary(folder, seconds)
    rows = table_rows(found, summary)
    print_table(rows, console)
    ppo = found.get("ppo")
    if ppo is not None:
        warning = results.over_optimised(ppo)
        if warning:
            console.print(Text(warning, style="yellow"))
        print_samples(ppo.samples[:SHOWN_SAMPLES], console)
    page = folder / "report.html"
    page.write_text(report_page.render(found, COLUMNS, rows), encoding="utf-8")
    console.print(f"\nreport: {page}")
    if ppo is not None and (ppo.folder / "actor").is_dir():
        console.print(f"talk to it: rlhf chat --path {ppo.folder / 'actor'}")


def write_summary(folder: Path, seconds: Mapping[str, float]) -> None:
    """Write a pipeline's ``summary.json`` as far as its stages have come."""
    found = {s: r for s in STAGES if (r := results.read_stage(folder / s)) is not None}
    text = json.dumps(results.summarize(found, dict(seconds)), indent=2)
    (folder / "summary.json").write_text(text + "\n", encoding="utf-8")


def read_seconds(folder: Path) -> dict[str, float]:
    """How long each stage of a pipeline took, as its last ``summary.json`` says."""
    path = folder / "summary.json"
    if not path.exists():
        return {}
    seconds = json.loads(path.read_text(encoding="utf-8")).get("seconds", {})
    return {stage: value for stage, value in seconds.items() if value is not None}


def table_rows(found: Mapping[str, StageResult], summary: Mapping[str, Any]) -> list[Row]:
    """The table's rows, a stage's name and time at the first of its own."""
    measures: dict[str, list[tuple[str, str]]] = {}
    if "sft" in found:
        measures["sft"] = [("perplexity, held-out", _number(summary["sft_perplexity"], ".3f"))]
    if "reward" in found:
        measures["reward"] = _reward_rows(found["reward"])
    if "dpo" in found:
        dpo = found["dpo"]
        margins = [_number(value, "+.3f") for value in (dpo.first("reward_margin"), dpo.last("reward_margin"))]
        measures["dpo"] = [
            ("accuracy, held-out pairs", _percent(dpo.last("accuracy"))),
            ("margin of the implicit rewards", " → ".join(margins)),
        ]
    if "ppo" in found:
        before, after = summary["gold_rate_sft"], summary["gold_rate_ppo"]
        if before is not None or after is not None:
            gain = f"  ({100 * (after - before):+.1f} points)" if None not in (before, after) else ""
            measures["ppo"] = [
                ("gold-right rate, SFT model", _percent(before)),
                ("gold-right rate, PPO model", _percent(after) + gain),
            ]
        score = [
            _number(found["ppo"].first("score_mean"), "+.3f"),
            _number(found["ppo"].last("score_mean"), "+.3f"),
        ]
        measures.setdefault("ppo", []).extend(
            [
                ("score, held-out prompts", " → ".join(score)),
                ("KL from the reference, nats", _number(summary["kl_ref"], ".3f")),
            ]
        )
    rows = []
    for stage, lines in measures.items():
        seconds = summary["seconds"].get(stage)
        time = "" if seconds is None else str(timedelta(seconds=round(seconds)))
        for number, (measure, value) in enumerate(lines):
            rows.append((NAMES[stage], measure, value, time) if number == 0 else ("", measure, value, ""))
    return rows


def _reward_rows(reward: StageResult) -> list[tuple[str, str]]:
    """Accuracy and AUC with their 95% intervals, calibration, and the sources where there are several."""
    rows = [("accuracy, held-out pairs", _percent(reward.last("accuracy")) + _range(reward, "accuracy", ".1%"))]
    if reward.last("labels") and not reward.last("pairs"):
        rows[0] = ("accuracy, held-out answers", rows[0][1])
    by_source = reward.last("accuracy_by_source") or {}
    if len(by_source) > 1:
        rows += [(f"  of {Path(name).name}", _percent(value)) for name, value in by_source.items()]
    if reward.last("auc") is not None:
        value = _number(reward.last("auc"), ".3f") + _range(reward, "auc", ".3f")
        rows.append(("AUC, good against bad answers", value))
    if reward.last("ece") is not None:
        rows.append(("calibration error of its verdicts", _percent(reward.last("ece"))))
    if reward.last("score_error") is not None:
        rows.append(("error of scores, root mean square", _number(reward.last("score_error"), ".3f")))
    return rows


def _range(result: StageResult, name: str, spec: str) -> str:
    low, high = result.last(f"{name}_low"), result.last(f"{name}_high")
    return "" if low is None or high is None else f"  ({_number(low, spec)} to {_number(high, spec)})"


def print_table(rows: Sequence[Row], console: Console) -> None:
    table = Table(show_edge=False, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print()
    console.print(table)


def print_samples(samples: Sequence[Mapping[str, Any]], console: Console) -> None:
    """A few held-out prompts with the answers before PPO and after it."""
    for row in samples:
        console.print()
        console.print(Text(results.shown_prompt(row["prompt"]).replace("\n\n", "\n"), style="bold"))
        for when in ("before", "after"):
            words = textwrap.shorten(row.get(when, ""), SHOWN_CHARACTERS, placeholder=" …")
            answer = Text(f"  {when:>6}: {words}  ")
            console.print(answer + MARKS[results.judged(row, when)])


def _number(value: float | None, spec: str) -> str:
    if value is None:
        return "not measured"
    text = format(value, spec)
    return text.removeprefix("-") if not text.strip("-0.%") else text  # an estimate of 0 may lie just below it


def _percent(value: float | None) -> str:
    return _number(value, ".1%")
