"""Parameters that some ranks, some micro-batches or nobody uses, against plain training on the joint batch."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import engine
from tests.engine.test_stages import config_for, whole
from tests.helpers import run_ranks

STEPS, LR = 3, 1e-2


class Parts(nn.Module):
    """Layers that are units of their own, and parts outside of them, of which each call uses some."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.sometimes, self.never = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, layers: tuple[int, ...], is_more: bool) -> torch.Tensor:
        for index in layers:
            x = self.layers[index](x).tanh()
        return x + self.sometimes(x) if is_more else x


def calls(step: int, window: int, world: int, kind: str):
    """(rank, micro, arguments) of every forward pass of an update."""
    for micro, rank in itertools.product(range(window), range(world)):
        is_more = {"on one rank": rank == 1, "late": micro == window - 1, "layers": False}[kind]
        layers = (0, 3) if kind == "layers" else (0, 1, 2, 3)
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
        yield rank, micro, (x, layers, is_more)


def train(rank, world, cases, folder):
    results = []
    for stage, window, bf16, kind in cases:
        optimizer = {"type": "AdamW", "params": {"lr": LR, "betas": [0.9, 0.95], "weight_decay": 0.1}}
        config = config_for(stage, window, 0.0, bf16={"enabled": bf16}, optimizer=optimizer)
        eng = engine.initialize(Parts(), config)
        norms = []
        for step in range(STEPS):
            for owner, micro, arguments in calls(step, window, world, kind):
                if owner != rank:
                    continue
                x, *rest = arguments
                eng.backward(eng(x.to(eng.compute_dtype), *rest).float().square().mean())
                eng.step()
                if micro == 0 and window > 1 and step == 1:  # zeros are no gradients in a checkpoint either
                    path = eng.save_checkpoint(folder / f"{stage}{window}{bf16}{kind}")
                    eng.load_checkpoint(path.parent)
            norms.append(eng.get_global_grad_norm())
        moments = {name for name, p in eng.parameters.trainable if eng.optimizer.state.get(p)}
        results.append((norms, whole(eng), moments))
    return results


def plain(world, window, kind):
    model = Parts()
    decay = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
    norms = []
    for step in range(STEPS):
        for _, _, arguments in calls(step, window, world, kind):
            (model(*arguments).square().mean() / (window * world)).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(float(torch.cat([grad.flatten() for grad in grads]).norm()))
        optimizer.step()
        optimizer.zero_grad()
    moments = {name for name, p in model.named_parameters() if optimizer.state.get(p)}
    return norms, dict(model.named_parameters()), moments


def distance(some, others):
    return sum(float((some[name].detach() - others[name].detach()).square().sum()) for name in others) ** 0.5


def test_what_is_not_used_everywhere_trains_as_in_one_process(tmp_path):
    settings = [(0, 2, False), (1, 1, False), (1, 2, False), (1, 2, True), (2, 2, True), (3, 1, False), (3, 2, False)]
    cases = [(*setting, kind) for setting in settings for kind in ("on one rank", "late", "layers")]
    start = dict(Parts().named_parameters())
    for case, (norms, parameters, moments) in zip(cases, run_ranks(train, 2, cases, tmp_path)[0], strict=True):
        _, window, bf16, kind = case
        expected_norms, expected, expected_moments = plain(2, window, kind)
        assert moments == expected_moments, case
        assert norms == pytest.approx(expected_norms, rel=2e-2 if bf16 else 1e-5), case
        assert distance(parameters, expected) < (0.15 * distance(expected, start) if bf16 else 1e-5), case
        assert torch.equal(parameters["never.weight"], start["never.weight"])
