"""Optimizers by name against their formulas, element by element in float64."""

from __future__ import annotations

import itertools
import logging
import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from engine.optimizers import build_optimizer, parameter_groups, state_tensors
from tests.engine.tiny import tiny_llama
from tests.helpers import run_ranks

STEPS = 5


# -- formulas: one number at a time -----------------------------------------------------------------------


def adam(p, grads, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, decoupled=True, amsgrad=False):
    m = v = v_max = 0.0
    for t, g in enumerate(grads, start=1):
        if decoupled:
            p -= lr * weight_decay * p
        else:
            g += weight_decay * p
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        v_max = max(v_max, v)
        second = (v_max if amsgrad else v) / (1 - betas[1] ** t)
        p -= lr * (m / (1 - betas[0] ** t)) / (math.sqrt(second) + eps)
    return p


def sgd(p, grads, lr=1e-3, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False):
    buffer = None
    for g in grads:
        g += weight_decay * p
        if momentum:
            buffer = g if buffer is None else momentum * buffer + (1 - dampening) * g
            g = g + momentum * buffer if nesterov else buffer
        p -= lr * g
    return p


def adagrad(p, grads, lr=1e-2, lr_decay=0.0, weight_decay=0.0, initial_accumulator_value=0.0, eps=1e-10):
    total = initial_accumulator_value
    for t, g in enumerate(grads):
        g += weight_decay * p
        total += g * g
        p -= lr / (1 + t * lr_decay) * g / (math.sqrt(total) + eps)
    return p


def lion(p, grads, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
    m = 0.0
    for g in grads:
        direction = betas[0] * m + (1 - betas[0]) * g
        sign = (direction > 0) - (direction < 0)
        p -= lr * (sign + weight_decay * p)
        m = betas[1] * m + (1 - betas[1]) * g
    return p


CASES = [
    ("AdamW", {}, adam, {}),
    ("AdamW", {"torch_adam": True}, adam, {"weight_decay": 0.01}),
    ("AdamW", {"lr": 0.02, "betas": [0.8, 0.95], "eps": 1e-5, "weight_decay": 0.3}, adam, {}),
    ("AdamW", {"lr": 0.02, "weight_decay": 0.3, "adam_w_mode": False}, adam, {"adam_w_mode": None}),
    ("AdamW", {"lr": 0.02, "amsgrad": True, "betas": [0.5, 0.6]}, adam, {}),
    ("Adam", {}, adam, {}),
    ("Adam", {"torch_adam": True}, adam, {"weight_decay": 0.01}),  # adam_w_mode makes it torch's AdamW
    ("Adam", {"lr": 0.02, "weight_decay": 0.3}, adam, {}),
    ("Adam", {"lr": 0.02, "weight_decay": 0.3, "adam_w_mode": False}, adam, {"decoupled": False}),
    ("Adam", {"lr": 0.02, "weight_decay": 0.3, "adam_w_mode": True, "torch_adam": True}, adam, {}),
    (
        "Adam",
        {"lr": 0.02, "weight_decay": 0.3, "adam_w_mode": False, "torch_adam": True},
        adam,
        {"decoupled": False},
    ),
    ("adamw", {"lr": 0.02, "weight_decay": 0.3, "bias_correction": True}, adam, {}),
    ("SGD", {}, sgd, {}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2, "dampening": 0.1}, sgd, {}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}, sgd, {}),
    ("Adagrad", {}, adagrad, {}),
    (
        "Adagrad",
        {"lr": 0.1, "lr_decay": 0.2, "weight_decay": 0.1, "initial_accumulator_value": 0.3},
        adagrad,
        {},
    ),
    ("Lion", {}, lion, {}),
    ("Lion", {"lr": 0.02, "betas": [0.7, 0.8], "weight_decay": 0.3}, lion, {}),
]
NOT_IN_FORMULAS = ("torch_adam", "adam_w_mode", "bias_correction")


def expected(formula, params, changes, start, grads):
    settings = {**{k: v for k, v in params.items() if k not in NOT_IN_FORMULAS}, **changes}
    settings = {k: v for k, v in settings.items() if v is not None}
    columns = zip(start.flatten().tolist(), *[g.flatten().tolist() for g in grads], strict=True)
    return torch.tensor([formula(p, list(g), **settings) for p, *g in columns], dtype=torch.float64).view_as(start)


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize(("name", "params", "formula", "changes"), CASES)
def test_equals_its_formula(name, params, formula, changes, fused):
    if fused is False and name != "Lion":
        params = {**params, "fused": False}
        changes = {**changes, "fused": None}
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 4), (5,), ())]
    parameters = [nn.Parameter(start.clone()) for start in starts]
    optimizer = build_optimizer(parameters, name, params)
    history = [[torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in starts] for _ in range(STEPS)]
    for grads in history:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad.clone()
        optimizer.step()
    for index, parameter in enumerate(parameters):
        want = expected(formula, params, changes, starts[index], [grads[index] for grads in history])
        torch.testing.assert_close(parameter.detach(), want, rtol=1e-12, atol=1e-14)
    assert len(optimizer.state[parameters[0]]) - ("step" in optimizer.state[parameters[0]]) == state_tensors(
        name, params
    )


def test_lion_leaves_parameters_without_a_gradient_and_stands_at_a_zero_direction():
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = build_optimizer([used, unused], "Lion", {"lr": 0.5})
    used.grad = torch.tensor([0.0, -3.0])
    assert optimizer.step(lambda: torch.tensor(7.0)) == 7.0
    assert used.tolist() == [1.0, 1.5]
    assert unused.tolist() == [1.0, 1.0] and unused not in optimizer.state


def test_a_groups_own_values_win():
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    groups = [{"params": [first], "lr": 0.5}, {"params": [second], "weight_decay": 0.0}]
    optimizer = build_optimizer(groups, "AdamW", {"lr": 0.1, "weight_decay": 0.2})
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(0.5, 0.2), (0.1, 0.0)]
    assert groups[0].keys() == {"params", "lr"}  # the caller's own groups are not written to


# -- kernels ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_fused_on_the_cpu(name):
    assert build_optimizer([nn.Parameter(torch.ones(2))], name).param_groups[0]["fused"] is True


def test_unfused_says_why_once(caplog):
    with caplog.at_level(logging.INFO):
        groups = [{"params": [nn.Parameter(torch.ones(2, device="meta"))]} for _ in range(2)]
        optimizer = build_optimizer(groups, "AdamW")
    assert [record.getMessage() for record in caplog.records] == ["AdamW runs unfused: torch has no fused form on meta"]
    assert [(g["fused"], g["foreach"]) for g in optimizer.param_groups] == [(False, True)] * 2


class Uneven(nn.Module):
    """Rows that do not divide by the ranks: of 1 row, one of two ranks holds none."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 1)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def train(model, parameters, name, params):
    optimizer = build_optimizer(parameters, name, params)
    for seed in range(STEPS):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def sharded_like_whole(rank, world):
    gaps = {}
    mesh = init_device_mesh("cpu", (world,))
    kinds = [
        ("AdamW", {"lr": 0.02, "weight_decay": 0.3}),
        ("Adam", {"amsgrad": True}),
        ("AdamW", {"fused": False}),
    ]
    kinds += [("SGD", {"momentum": 0.9}), ("Adagrad", {}), ("Lion", {"weight_decay": 0.3})]
    for (name, params), mixed in itertools.product(kinds, (False, True)):
        torch.manual_seed(0)
        whole, sharded = Uneven(), Uneven()
        sharded.load_state_dict(whole.state_dict())
        # a parameter left whole beside sharded ones; on the same data its gradient is the same on every rank
        fully_shard(sharded, mesh=mesh, ignored_params={sharded.second.bias} if mixed else set())
        optimizer = train(sharded, sharded.parameters(), name, params)
        train(whole, whole.parameters(), name, params)
        gaps[f"{name} {params} {mixed}"] = max(
            float(((a.full_tensor() if isinstance(a, DTensor) else a) - b).detach().abs().max())
            for a, b in zip(sharded.parameters(), whole.parameters(), strict=True)
        )
        states = [value for value in optimizer.state[sharded.first.weight].values() if value.ndim]
        assert all(isinstance(value, DTensor) for value in states)  # so that a checkpoint can reshard them
        is_fused = optimizer.param_groups[0].get("fused", False)
        assert is_fused == (name in ("Adam", "AdamW") and not mixed and "fused" not in params)
    return gaps


def test_sharded_parameters_train_like_whole_ones():
    for gaps in run_ranks(sharded_like_whole, 2):
        assert len(gaps) == 12 and max(gaps.values()) < 1e-6, gaps


# -- groups -----------------------------------------------------------------------------------------------


def names_of(model, groups):
    names = {id(p): name for name, p in model.named_parameters()}
    return [sorted(names[id(p)] for p in group["params"]) for group in groups]


def test_groups_by_weight_decay():
    model = tiny_llama(tied=True)
    model.model.layers[1].requires_grad_(False)
    groups = parameter_groups(model, 0.1)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    decayed, others = names_of(model, groups)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(decayed) | set(others) == trainable
    assert all("norm" in name for name in others) and not any("norm" in name for name in decayed)
    assert decayed.count("model.embed_tokens.weight") == 1 and "lm_head.weight" not in decayed


def test_groups_with_biases_adapters_and_names():
    model = nn.ModuleDict(
        {
            "layer": nn.Linear(3, 3),
            "norm": nn.LayerNorm(3),
            "lora_A": nn.Linear(3, 2, bias=False),
            "head": nn.Linear(3, 2, bias=False),
        }
    )
    groups = parameter_groups(model, 0.1, lora_lr=5e-4, no_decay=("head",))
    assert names_of(model, groups) == [
        ["layer.weight"],
        ["lora_A.weight"],
        ["head.weight", "layer.bias", "norm.bias", "norm.weight"],
    ]
    assert [group.get("lr") for group in groups] == [None, 5e-4, None]
    # without decay nothing tells the last group from the first
    assert [len(group["params"]) for group in parameter_groups(model, 0.0, lora_lr=5e-4)] == [5, 1]
    assert [len(group["params"]) for group in parameter_groups(model, 0.0)] == [6]
    model.requires_grad_(False)
    assert parameter_groups(model, 0.1) == []


# -- bad settings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("AdmW", {}, "optimizer.type 'AdmW' is unknown: did you mean AdamW?"),
        ("RMSprop", {}, "optimizer.type 'RMSprop' is unknown"),
        ("Lamb", {}, "optimizer.type 'Lamb' does not exist here: use AdamW"),
        ("Muon", {}, "optimizer.type 'Muon' does not exist here"),
        ("OneBitAdam", {}, "use Adam"),
        ("AdamW", {"learning_rate": 1}, "optimizer.params.learning_rate is not a parameter of AdamW"),
        ("AdamW", {"beta": [0.9, 0.9]}, "did you mean betas?"),
        ("AdamW", {"lr": "1e-5"}, "optimizer.params.lr is '1e-5': use a number of 0 or more"),
        ("AdamW", {"lr": -1}, "optimizer.params.lr is -1"),
        ("AdamW", {"lr": float("inf")}, "optimizer.params.lr is inf"),
        ("AdamW", {"lr": True}, "optimizer.params.lr is True"),
        ("AdamW", {"betas": 0.9}, "optimizer.params.betas is 0.9: use two numbers"),
        ("AdamW", {"betas": [0.9]}, "optimizer.params.betas is [0.9]"),
        ("AdamW", {"betas": [0.9, 1.0]}, "optimizer.params.betas is [0.9, 1.0]"),
        ("AdamW", {"amsgrad": 1}, "optimizer.params.amsgrad is 1: use true or false"),
        ("AdamW", {"bias_correction": False}, "optimizer.params.bias_correction is False"),
        ("AdamW", {"max_grad_norm": 1.0}, "set gradient_clipping to it instead"),
        ("SGD", {"betas": [0.9, 0.9]}, "optimizer.params.betas is not a parameter of SGD"),
        ("SGD", {"nesterov": True}, "set optimizer.params.momentum above 0"),
        ("SGD", {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "optimizer.params.dampening"),
    ],
)
def test_bad_settings_give_one_line(name, params, message):
    with pytest.raises(ValueError) as caught:
        build_optimizer([nn.Parameter(torch.ones(1))], name, params)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
