"""What autograd keeps, counted by hand and against the expected effect of checkpointing and batch size."""

from __future__ import annotations

import torch
from torch import nn

from rlhf.activations import activation_bytes
from tests.rlhf.tiny_models import causal_model


def test_a_small_net_by_hand():
    """Two products and a ReLU: the input, the ReLU's output (kept twice, counted once), and no weight."""
    net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 2, bias=False))
    x = torch.randn(3, 4)
    with activation_bytes(net) as kept:
        out = net(x)
    assert kept == [4 * (3 * 4 + 3 * 8)]
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


def kept_by(model, rows: int) -> int:
    with activation_bytes(model) as kept:
        model(input_ids=torch.ones(rows, 32, dtype=torch.long), use_cache=False).logits.float().sum().backward()
    return kept[0]


def test_checkpointing_keeps_less_and_rows_keep_more():
    model = causal_model().train()
    small, large = kept_by(model, 2), kept_by(model, 8)
    assert 3.5 * small < large < 4.5 * small
    model.activation_checkpointing_enable()
    assert 2 * 8 * 32 * 32 * 4 <= kept_by(model, 8) < 0.7 * large  # the inputs of both layers, at least
