"""The Lion optimizer (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum, with decoupled weight decay.

    With gradient g and momentum m (0 at first): c = b1 m + (1 - b1) g; p -= lr (sign(c) + weight_decay p);
    m = b2 m + (1 - b2) g. It wants a rate 3 to 10 times below AdamW's, and as much more weight decay; the
    default rate is DeepSpeed's.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            used = [p for p in group["params"] if p.grad is not None]
            for p in used:
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
            if used:
                _update(
                    [_local(p) for p in used],
                    [_local(p.grad) for p in used],
                    [_local(self.state[p]["exp_avg"]) for p in used],
                    group,
                )
        return loss


def _local(tensor: torch.Tensor) -> torch.Tensor:
    # the formula is element by element, so each rank's rows of a sharded tensor need nobody else's
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _update(
    parameters: list[torch.Tensor],
    grads: list[torch.Tensor],
    momenta: list[torch.Tensor],
    group: dict[str, Any],
) -> None:
    beta1, beta2 = group["betas"]
    directions = torch._foreach_mul(momenta, beta1)
    torch._foreach_add_(directions, grads, alpha=1 - beta1)
    torch._foreach_sign_(directions)
    torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
    torch._foreach_add_(parameters, directions, alpha=-group["lr"])
    torch._foreach_mul_(momenta, beta2)
    torch._foreach_add_(momenta, grads, alpha=1 - beta2)
