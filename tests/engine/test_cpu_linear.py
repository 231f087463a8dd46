"""Linear layers by the CPU's faster products against sums in float64, and against plain training at every stage."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import engine
from engine import cpu_linear
from tests.engine.test_stages import LR, ROWS, STEPS, build, config_for, train, whole
from tests.engine.tiny import plain_training, token_batch
from tests.helpers import run_ranks

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


@pytest.fixture(autouse=True)
def as_on_such_a_cpu(monkeypatch):
    monkeypatch.setattr(cpu_linear, "has_slow_mkl", lambda: True)
    monkeypatch.setattr(cpu_linear, "lacks_bf16", lambda: True)


@pytest.fixture
def at_any_size(monkeypatch):
    monkeypatch.setattr(cpu_linear, "_SMALLEST", 0)
    monkeypatch.setattr(cpu_linear, "_SMALLEST_GRADIENT", 0)


def layer(inner: int, outer: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(inner, outer, bias=bias))
    cpu_linear.use_fast_products(module)
    return module[0]


def check(linear: nn.Linear, x: torch.Tensor, grad: torch.Tensor) -> None:
    """`linear(x)` and its gradients for an incoming `grad`, against float64, within one rounding in bf16."""
    exact = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None).double()
    exact.load_state_dict(linear.state_dict())
    exact_x = x.detach().double().requires_grad_()
    y, expected = linear(x), exact(exact_x)
    assert "_Linear" in type(y.grad_fn).__name__
    assert y.shape == expected.shape and y.dtype == x.dtype
    error = 1e-6 if x.dtype == torch.float32 else 2**-8
    linear.zero_grad()
    y.backward(grad)
    expected.backward(grad.double())
    got = [y, x.grad, *(p.grad for p in linear.parameters())]
    for ours, theirs in zip(got, [expected, exact_x.grad, *(p.grad for p in exact.parameters())], strict=True):
        # fp32 sums err by their terms' size, which cancel in some: so by the largest, not by each
        assert ours.dtype == x.dtype and (ours.double() - theirs).abs().max() <= error * theirs.abs().max()


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 3, 7), (64, 33, 129), (3, 1, 200), (300, 257, 2)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_float64(shape, bias, dtype, at_any_size):
    rows, inner, outer = shape
    x = torch.randn(rows, inner, dtype=dtype, requires_grad=True)
    check(layer(inner, outer, bias).to(dtype), x, torch.randn(rows, outer, dtype=dtype))


@pytest.mark.parametrize("onednn", [True, False])
def test_bf16_in_small_products_and_without_onednn(onednn, monkeypatch):
    monkeypatch.setattr(cpu_linear, "has_slow_mkl", lambda: onednn)
    x = torch.randn(2, 5, 16, dtype=torch.bfloat16, requires_grad=True)
    check(layer(16, 24).bfloat16(), x, torch.randn(2, 5, 24, dtype=torch.bfloat16))


def test_more_axes_strides_and_expanded_gradients(at_any_size):
    linear = layer(6, 5)
    x = torch.randn(2, 3, 4, 6, requires_grad=True)
    check(linear, x, torch.randn(2, 3, 4, 5))
    check(linear, torch.randn(4, 6, requires_grad=True), torch.randn(1, 1).expand(4, 5))
    check(linear, torch.randn(4, 6, requires_grad=True), torch.randn(5, 4).t())
    base = torch.randn(6, 9, 3)
    strided = base.transpose(0, 2)[:, ::2].detach().requires_grad_()
    check(linear, strided, torch.randn(3, 5, 5))
    assert linear(torch.empty(0, 6)).shape == (0, 5)


def test_frozen_weights_get_no_gradient_and_checkpointing_works(at_any_size):
    linear = layer(8, 8)
    linear.weight.requires_grad_(False)
    x = torch.randn(4, 8, requires_grad=True)
    linear(x).sum().backward()
    assert linear.weight.grad is None and linear.bias.grad is not None
    again = torch.nn.Parameter(x.detach().clone())
    checkpoint(linear, again, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad, again.grad)


def test_other_types_and_small_products_are_torchs_own():
    linear = layer(8, 8)
    x = torch.randn(4, 8)
    assert torch.equal(linear(x), nn.functional.linear(x, linear.weight, linear.bias))
    half = layer(8, 8).half()
    assert torch.equal(half(x.half()), nn.functional.linear(x.half(), half.weight, half.bias))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x).dtype == torch.bfloat16


def test_it_is_still_the_same_module(at_any_size):
    linear = layer(4, 4)
    for twin in (copy.deepcopy(linear), pickle.loads(pickle.dumps(linear))):
        assert isinstance(twin, nn.Linear) and torch.equal(twin(torch.ones(1, 4)), linear(torch.ones(1, 4)))
        twin.weight.data.zero_()
    assert linear.weight.abs().sum() > 0 and list(linear.state_dict()) == ["weight", "bias"]


def train_stages(rank, world, cases):
    cpu_linear._SMALLEST = cpu_linear._SMALLEST_GRADIENT = 0
    cpu_linear.has_slow_mkl = lambda: True
    results = []
    for variant, stage, accumulation in cases:
        eng = engine.initialize(build(variant), config_for(stage, accumulation, 0.5))
        assert any(isinstance(m, cpu_linear.CpuLinear) for m in eng.module.modules())
        norms = train(eng, [token_batch(ROWS, seed=seed) for seed in range(STEPS)], rank, world, accumulation)
        results.append((norms, whole(eng)))
    return results


def test_every_stage_is_plain_training():
    cases = [(variant, stage, 2) for variant in ("plain", "tied", "frozen") for stage in (0, 1, 2, 3)]
    batches = [token_batch(ROWS, seed=seed) for seed in range(STEPS)]
    expected = {v: plain_training(build(v), batches, LR, 0.5, weight_decay=0.1) for v in ("plain", "tied", "frozen")}
    for (variant, *_), (norms, parameters) in zip(cases, run_ranks(train_stages, 2, cases)[0], strict=True):
        weights, plain_norms = expected[variant]
        assert norms == pytest.approx(plain_norms, rel=1e-5)
        for name, value in weights.items():
            torch.testing.assert_close(parameters[name], value, rtol=0, atol=1e-5, msg=f"{variant}: {name}")
