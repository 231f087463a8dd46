"""Linear layers in fp32 on CPUs for which MKL, torch's own matrix product, has no path of its own.

On processors that are not Intel's it leaves more than half of the speed: on a two-core AMD with AVX-512 it reached 180
to 200 GFLOP/s at every size from 512 x 512 on, oneDNN, which is in torch too, 330 to 460 in the forward pass and in
both products of the backward pass. Small products stay where they were: there the call itself is what costs.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

# Multiplications below which the plain product was faster, and entries of a weight's gradient below which that was.
_SMALLEST, _SMALLEST_GRADIENT = 2**21, 2**17


@cache
def has_slow_mkl() -> bool:
    """Whether torch multiplies fp32 matrices with MKL on a processor that is not Intel's, and oneDNN is there."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return False
    vendors = {line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("vendor_id")}
    return bool(vendors) and "GenuineIntel" not in vendors


def use_onednn(module: nn.Module) -> None:
    """Make the plain `nn.Linear` layers of `module`, in place, multiply through oneDNN where they are in fp32."""
    for child in module.modules():
        if type(child) is nn.Linear:
            child.__class__ = OneDnnLinear


class OneDnnLinear(nn.Linear):
    """The same layer: parameters, names and results up to rounding."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in]` to `[..., out]`."""
        weight = self.weight
        is_fp32 = x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu"
        if not is_fp32 or x.numel() * weight.shape[0] < _SMALLEST or torch.is_autocast_enabled("cpu"):
            return F.linear(x, weight, self.bias)
        return _Linear.apply(x, weight, self.bias)


def _product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`a @ b.T + bias` of matrices; transposed ones are read as they lie."""
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        return _product(flat, weight, bias).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        flat_grad = grad.reshape(-1, grad.shape[-1]).contiguous()
        for_x, for_weight, for_bias = ctx.needs_input_grad
        grad_x = grad_weight = None
        if for_x:
            grad_x = _product(flat_grad, weight.t()).view(x.shape)
        if for_weight:
            flat = x.reshape(-1, x.shape[-1]).contiguous()
            is_large = weight.numel() >= _SMALLEST_GRADIENT
            grad_weight = _product(flat_grad.t(), flat.t()) if is_large else flat_grad.t() @ flat
        return grad_x, grad_weight, flat_grad.sum(0) if for_bias else None
