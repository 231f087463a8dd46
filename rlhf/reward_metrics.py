"""What is measured of a reward model, over all ranks.

A verdict is what the model says of a pair (the answer with the higher score is better; a tie is never right) or of
a labelled answer (good when its score is above 0, the probability of that being sigmoid(score)). Good answers are
the chosen ones and those labelled 1, bad ones the rejected and those labelled 0; a label in between counts for its
nearer side.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.distributed import all_reduce_sums, gather_objects
from rlhf.ranking import auc, auc_interval, calibration, share_interval


@dataclass
class Judged:
    """Scores of one batch, detached, P pairs and S single answers.

    loss: the batch's mean over its P + S items; chosen, rejected `[P]`; single, targets `[S]`; is_label `[S]` bool;
    sources `[P + S]`; tokens: real tokens in the batch.
    """

    loss: float
    chosen: torch.Tensor
    rejected: torch.Tensor
    single: torch.Tensor
    targets: torch.Tensor
    is_label: torch.Tensor
    sources: torch.Tensor
    tokens: int

    @property
    def items(self) -> int:
        return len(self.sources)


class RewardMeter:
    """Adds up batches and gives the means of a training step, over the items of all ranks."""

    def __init__(self) -> None:
        self._sums = torch.zeros(9, dtype=torch.float64)

    def add(self, batch: Judged) -> None:
        labels = batch.single[batch.is_label]
        good = batch.targets[batch.is_label] >= 0.5
        right = (batch.chosen > batch.rejected).sum() + ((labels > 0) == good).sum()
        figures = [
            batch.loss * batch.items,
            batch.items,
            right,
            len(batch.chosen) + len(labels),
            batch.chosen.sum() + labels[good].sum(),
            len(batch.chosen) + good.sum(),
            batch.rejected.sum() + labels[~good].sum(),
            len(batch.rejected) + (~good).sum(),
            batch.tokens,
        ]
        self._sums += torch.tensor([float(figure) for figure in figures], dtype=torch.float64)

    def reduce(self) -> dict[str, float | None]:
        """loss; accuracy of the verdicts; chosen_score and rejected_score, the mean scores of good and of bad
        answers; tokens. None for a mean over nothing. Collective."""
        loss, items, right, verdicts, good, goods, bad, bads, tokens = all_reduce_sums(self._sums.tolist())
        return {
            "loss": _mean(loss, items),
            "accuracy": _mean(right, verdicts),
            "chosen_score": _mean(good, goods),
            "rejected_score": _mean(bad, bads),
            "tokens": int(tokens),
        }


class RewardEvaluation:
    """Collects the batches of an evaluation; `result` has the figures of all of them on all ranks."""

    def __init__(self) -> None:
        self._meter = RewardMeter()
        self._batches: list[dict[str, np.ndarray]] = []

    def add(self, batch: Judged) -> None:
        self._meter.add(batch)
        columns = ("chosen", "rejected", "single", "targets", "is_label", "sources")
        self._batches.append({name: getattr(batch, name).cpu().numpy() for name in columns})

    def result(self, sources: list[str]) -> dict[str, object]:
        """The means of `RewardMeter`, and what was measured of the following. Collective.

        accuracy_low, accuracy_high: its 95% interval. auc: good answers against bad ones over all prompts,
        auc_low, auc_high. ece and calibration: of the verdicts, see `rlhf.ranking`. accuracy_by_source: by the
        names in `sources`. score_error, score_correlation: root of the mean squared error and Pearson's r on
        answers with a score. pairs, labels, scores: how many there were.
        """
        means = self._meter.reduce()
        batches = [batch for part in gather_objects(self._batches) for batch in part]
        return {**means, **figures(batches, sources)} if batches else {}


def figures(batches: list[dict[str, np.ndarray]], sources: list[str]) -> dict[str, object]:
    """See `RewardEvaluation.result`; `batches` hold the columns of `Judged` as arrays."""

    def column(name: str) -> np.ndarray:
        return np.concatenate([batch[name] for batch in batches])

    chosen, rejected = column("chosen").astype(np.float64), column("rejected").astype(np.float64)
    single, targets, is_label = column("single").astype(np.float64), column("targets"), column("is_label")
    labels, is_good = single[is_label], targets[is_label] >= 0.5
    # in a batch the pairs' sources stand before those of single answers
    of_pairs = np.concatenate([batch["sources"][: len(batch["chosen"])] for batch in batches])
    of_singles = np.concatenate([batch["sources"][len(batch["chosen"]) :] for batch in batches])

    right = np.concatenate([chosen > rejected, (labels > 0) == is_good])
    logits = np.concatenate([chosen - rejected, labels])
    of_verdicts = np.concatenate([of_pairs, of_singles[is_label]])
    good, bad = np.concatenate([chosen, labels[is_good]]), np.concatenate([rejected, labels[~is_good]])
    out: dict[str, object] = {"pairs": len(chosen), "labels": len(labels), "scores": int((~is_label).sum())}
    out |= {f"{side}_score": float(some.mean()) for side, some in (("chosen", good), ("rejected", bad)) if len(some)}
    if len(right):
        out["accuracy"] = float(right.mean())
        out["accuracy_low"], out["accuracy_high"] = share_interval(int(right.sum()), len(right))
        out["ece"], out["calibration"] = calibration(1 / (1 + np.exp(-np.abs(logits))), right)
        out["accuracy_by_source"] = {
            sources[number]: float(right[of_verdicts == number].mean()) for number in np.unique(of_verdicts)
        }
    area = auc(good, bad)
    if area is not None:
        out["auc"] = area
        out["auc_low"], out["auc_high"] = auc_interval(area, len(good), len(bad))
    scored, wanted = single[~is_label], targets[~is_label].astype(np.float64)
    if len(scored):
        out["score_error"] = float(np.sqrt(np.mean((scored - wanted) ** 2)))
        varied = len(scored) > 1 and scored.std() > 0 and wanted.std() > 0
        out["score_correlation"] = float(np.corrcoef(scored, wanted)[0, 1]) if varied else None
    return out


def _mean(total: float, count: float) -> float | None:
    return total / count if count else None
