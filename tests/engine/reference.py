"""Training as slow and plain as it can be written: what every ZeRO stage must equal.

One process, one row at a time, gradients added up in float64, AdamW number by number from its formula. It
shares nothing with the engine: no optimizer class, no clipping helper, no schedule.

    after, updates = reference.train(model, batches, loss_of_row, rates=[1e-3] * len(batches))

A batch is the joint one of an update, over all micro-batches and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Update:
    """One optimizer step: the mean loss over the batch's units, and the gradient's norm before clipping."""

    loss: float
    grad_norm: float
    rate: float
    skipped: bool


def next_token_loss(model: nn.Module, row: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Sum of the cross-entropies of one row's supervised tokens, and their number; tensors are `[1, T]`."""
    logits = model(input_ids=row["input_ids"], attention_mask=row["attention_mask"]).logits[0]
    total = logits.new_zeros((), dtype=torch.float64)
    count = 0
    for position, label in enumerate(row["labels"][0, 1:].tolist()):
        if label != -100:
            log_probabilities = logits[position].double() - torch.logsumexp(logits[position].double(), 0)
            total = total - log_probabilities[label]
            count += 1
    return total, count


def rows_of(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    count = len(next(iter(batch.values())))
    return [{key: value[index : index + 1] for key, value in batch.items()} for index in range(count)]


def gradient(
    model: nn.Module,
    batch: dict[str, torch.Tensor],
    loss_of_row: Callable[[nn.Module, dict[str, torch.Tensor]], tuple[torch.Tensor, int]] = next_token_loss,
) -> tuple[dict[str, torch.Tensor], float]:
    """Gradient, by parameter name, of the mean over all the batch's units, and that mean. Float64.

    A parameter that no row uses is left out, as torch leaves its `.grad` None.
    """
    sums: dict[str, torch.Tensor] = {}
    total, units = 0.0, 0
    for row in rows_of(batch):
        model.zero_grad(set_to_none=True)
        loss, count = loss_of_row(model, row)
        loss.backward()
        total, units = total + float(loss.detach()), units + count
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                sums[name] = sums.get(name, 0.0) + parameter.grad.double()
    model.zero_grad(set_to_none=True)
    return {name: value / units for name, value in sums.items()}, total / units


def train(
    model: nn.Module,
    batches: Sequence[dict[str, torch.Tensor]],
    loss_of_row: Callable[[nn.Module, dict[str, torch.Tensor]], tuple[torch.Tensor, int]] = next_token_loss,
    *,
    rates: Sequence[float],
    clip: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> tuple[dict[str, torch.Tensor], list[Update]]:
    """AdamW on each batch in turn, in place.

    Args:
        rates: the learning rate of each update that is applied; one that is skipped does not use one up.
        clip: bound on the gradient's 2-norm over all parameters; 0 for none.
        weight_decay: decoupled, not on parameters of fewer than two dimensions.

    Returns:
        The parameters afterwards by name, and what happened at each update. An update whose gradient is not
        finite is skipped: parameters and moments stay.
    """
    first: dict[str, torch.Tensor] = {}
    second: dict[str, torch.Tensor] = {}
    steps: dict[str, int] = {}
    applied = 0
    updates = []
    for batch in batches:
        grads, loss = gradient(model, batch, loss_of_row)
        norm = math.sqrt(sum(float((grad * grad).sum()) for grad in grads.values()))
        rate = rates[applied]
        updates.append(Update(loss, norm, rate, skipped=not math.isfinite(norm)))
        if not math.isfinite(norm):
            continue
        applied += 1
        factor = clip / norm if clip and norm > clip else 1.0
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name not in grads:
                    continue
                grad = grads[name] * factor
                t = steps[name] = steps.get(name, 0) + 1
                m = first[name] = betas[0] * first.get(name, 0.0) + (1 - betas[0]) * grad
                v = second[name] = betas[1] * second.get(name, 0.0) + (1 - betas[1]) * grad * grad
                value = parameter.double()
                if parameter.ndim >= 2:
                    value = value - rate * weight_decay * value
                step = (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
                parameter.copy_(value - rate * step)
    return {name: p.detach().clone() for name, p in model.named_parameters()}, updates
