"""The pictures of a report: each stage's learning curves, as base64 PNGs."""

from __future__ import annotations

import base64
import io
import logging
from collections.abc import Callable, Iterator

# A first run builds a font cache and says so; that is no news to the reader of a report.
logging.getLogger("matplotlib").setLevel(logging.ERROR)

from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from rlhf.results import StageResult  # noqa: E402

BLUE, ORANGE, GREEN, GREY = "#2563a8", "#d9730d", "#1a7f37", "#8a8f98"
Panel = Callable[[StageResult, Axes], bool]  # draws on the axes; False if there is nothing to draw


def draw(result: StageResult) -> Iterator[tuple[str, str]]:
    """Yield ``(title, base64 PNG)`` for each picture of a stage that has something to show."""
    for title, panels in PICTURES.get(result.stage, {}).items():
        figure = Figure(figsize=(4.6 * len(panels), 3.1), dpi=100, layout="constrained")
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        shown = [panel(result, ax) for panel, ax in zip(panels, axes, strict=True)]
        for ax, drawn in zip(axes, shown, strict=True):
            ax.set_visible(drawn)
            ax.set_xlabel(ax.get_xlabel() or "optimizer step")
            ax.grid(alpha=0.25)
        if any(shown):
            data = io.BytesIO()
            figure.savefig(data, format="png")
            yield title, base64.b64encode(data.getvalue()).decode("ascii")


def lines(title: str, *curves: tuple[str, str, bool, str]) -> Panel:
    """A panel of several curves on one axis: each ``(figure, label, from evaluations, colour)``."""

    def panel(result: StageResult, ax: Axes) -> bool:
        drawn = [_plot(result, ax, *curve) for curve in curves]
        ax.set_title(title, fontsize=10)
        if sum(drawn) > 1:
            ax.legend(fontsize=8)
        return any(drawn)

    return panel


def score_and_gold(result: StageResult, ax: Axes) -> bool:
    """The score that PPO climbs, and beside it the judge's rate: apart, they show over-optimisation."""
    drawn = [
        _plot(result, ax, "score_mean", "score, training prompts", False, GREY),
        _plot(result, ax, "score_mean", "score, held-out prompts", True, BLUE),
    ]
    ax.set_ylabel("score", color=BLUE)
    if result.curve("gold_rate", evaluation=True)[0]:
        right = ax.twinx()
        drawn.append(_plot(result, right, "gold_rate", "gold-right rate, held-out prompts", True, ORANGE))
        right.set_ylim(0, 1)
        right.set_ylabel("gold-right rate", color=ORANGE)
        handles = [line for each in (ax, right) for line in each.get_lines()]
        ax.legend(handles=handles, fontsize=7, loc="lower right")
    ax.set_title("score and gold", fontsize=10)
    return any(drawn)


def reliability(result: StageResult, ax: Axes) -> bool:
    """How sure the reward model is of its verdicts against how often they are right, at the last evaluation."""
    bins = result.last("calibration")
    if not bins:
        return False
    sure, right, counts = zip(*bins, strict=True)
    ax.plot([0.5, 1], [0.5, 1], linewidth=1, color=GREY)
    ax.scatter(sure, right, s=[10 + 120 * count / max(counts) for count in counts], color=BLUE)
    ax.set_xlabel("probability the model gives its verdict")
    ax.set_title("share of right verdicts, held-out", fontsize=10)
    return True


def _plot(result: StageResult, ax: Axes, name: str, label: str, evaluation: bool, colour: str) -> bool:
    steps, values = result.curve(name, evaluation)
    if steps:
        marker = "o" if evaluation else None
        ax.plot(steps, values, marker=marker, markersize=3, linewidth=1.2, label=label, color=colour)
    return bool(steps)


_RATE = lines("learning rate", ("lr", "learning rate", False, GREY))
PICTURES: dict[str, dict[str, list[Panel]]] = {
    "sft": {
        "SFT": [
            lines("loss", ("loss", "training", False, GREY), ("loss", "held-out", True, BLUE)),
            lines("perplexity, held-out", ("perplexity", "perplexity", True, BLUE)),
            _RATE,
        ]
    },
    "reward": {
        "reward model": [
            lines("accuracy", ("accuracy", "training", False, GREY), ("accuracy", "held-out", True, BLUE)),
            lines(
                "mean scores, held-out",
                ("chosen_score", "chosen", True, GREEN),
                ("rejected_score", "rejected", True, ORANGE),
            ),
            lines("loss", ("loss", "training", False, GREY), ("loss", "held-out", True, BLUE)),
        ],
        "AUC and calibration": [
            lines("AUC, good against bad answers", ("auc", "held-out", True, BLUE)),
            reliability,
        ],
    },
    "dpo": {
        "DPO": [
            lines("loss", ("loss", "training", False, GREY), ("loss", "held-out", True, BLUE)),
            lines("accuracy", ("accuracy", "training", False, GREY), ("accuracy", "held-out", True, BLUE)),
            lines(
                "implicit rewards, held-out",
                ("chosen_reward", "chosen", True, GREEN),
                ("rejected_reward", "rejected", True, ORANGE),
            ),
        ]
    },
    "ppo": {
        "score and gold": [
            score_and_gold,
            lines(
                "KL from the reference",
                ("kl_ref", "training", False, GREY),
                ("kl_ref", "held-out", True, BLUE),
            ),
            lines(
                "answer length, tokens",
                ("response_length_mean", "training", False, GREY),
                ("response_length_mean", "held-out", True, BLUE),
            ),
        ],
        "optimization": [
            lines("losses", ("actor_loss", "actor", False, BLUE), ("critic_loss", "critic", False, ORANGE)),
            lines(
                "clipped share and value fit",
                ("clip_fraction", "clip fraction", False, BLUE),
                ("explained_variance", "explained variance", False, GREEN),
            ),
            lines("entropy, nats a token", ("entropy", "entropy", False, GREY)),
        ],
    },
}
