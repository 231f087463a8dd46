"""``report.html``: one file with everything in it, pictures included."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf import curves, results
from rlhf.results import StageResult, judged, shown_prompt

TITLES = {"sft": "Supervised fine-tuning", "reward": "Reward model", "dpo": "DPO", "ppo": "PPO"}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 62rem; margin: 2rem auto; }
body { padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
table { border-collapse: collapse; margin: .6rem 0; }
th, td { text-align: left; vertical-align: top; padding: .25rem .9rem .25rem 0; }
th, td { border-bottom: 1px solid #ddd; }
td.text { white-space: pre-wrap; }
img { max-width: 100%; }
.right { color: #1a7f37; } .wrong { color: #b42318; } .warning { color: #8a5a00; font-weight: 600; }
details { margin: .4rem 0; } pre { background: #f6f6f6; padding: .6rem; overflow-x: auto; }
"""


def render(found: Mapping[str, StageResult], columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The page of a run, from its stages and its table."""
    parts = ["<h1>RLHF run</h1>", _table(columns, rows)]
    for stage, result in found.items():
        parts.append(f"<h2>{TITLES.get(stage, html.escape(stage))}</h2>")
        if stage == "ppo" and (warning := results.over_optimised(result)):
            parts.append(f'<p class="warning">{html.escape(warning)}</p>')
        for title, picture in curves.draw(result):
            parts.append(f'<img alt="{html.escape(title)}" src="data:image/png;base64,{picture}">')
        if result.samples:
            parts.append(_samples(result.samples))
        if result.data_report:
            parts.append(_details("Data", result.data_report))
        if result.run:
            parts.append(_details("Arguments and versions", result.run))
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>RLHF run</title>'
        f"<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    titles = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    lines = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    return f"<table><tr>{titles}</tr>\n{lines}</table>"


def _samples(samples: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for row in samples:
        cells = [f'<td class="text">{html.escape(shown_prompt(row["prompt"]))}</td>']
        for when in ("before", "after"):
            verdict = {True: "right", False: "wrong", None: ""}[judged(row, when)]
            cells.append(f'<td class="text {verdict}">{html.escape(row.get(when, ""))}</td>')
        lines.append(f"<tr>{''.join(cells)}</tr>\n")
    head = "<tr><th>held-out prompt</th><th>before PPO</th><th>after PPO</th></tr>"
    return f"<table>{head}\n{''.join(lines)}</table>"


def _details(title: str, content: Mapping[str, Any]) -> str:
    text = html.escape(json.dumps(content, indent=2, ensure_ascii=False))
    return f"<details><summary>{html.escape(title)}</summary><pre>{text}</pre></details>"
