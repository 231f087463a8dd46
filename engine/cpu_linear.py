"""Linear layers on CPUs for which torch's own matrix product has no path of their own.

fp32: on processors that are not Intel's, MKL leaves more than half of the speed: on a two-core AMD with AVX-512 it
reached 180 to 200 GFLOP/s at every size from 512 x 512 on, oneDNN, which is in torch too, 330 to 460 in the forward
pass and in both products of the backward pass. Small products stay where they were: there the call is what costs.

bf16: without AVX-512 (or an Arm's own bf16 instructions) no library has kernels, and torch multiplies entry by entry: 6
GFLOP/s on a core of an AMD with AVX2 that has 45 to 60 in fp32. There the product is taken of fp32 copies and rounded
once at its end, which is what kernels for bf16 do too.
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


@cache
def lacks_bf16() -> bool:
    """Whether torch multiplies bf16 matrices without kernels made for it on this CPU."""
    return not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def use_fast_products(module: nn.Module) -> None:
    """Make the plain `nn.Linear` layers of `module`, in place, multiply as this CPU does it fastest."""
    if not (has_slow_mkl() or lacks_bf16()):
        return
    for child in module.modules():
        if type(child) is nn.Linear:
            child.__class__ = CpuLinear


class CpuLinear(nn.Linear):
    """The same layer: parameters, names and results up to rounding."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in]` to `[..., out]`."""
        weight = self.weight
        is_plain = x.device.type != "cpu" or x.dtype != weight.dtype or torch.is_autocast_enabled("cpu")
        if is_plain or not _is_slow(x.dtype, x.numel() * weight.shape[0]):
            return F.linear(x, weight, self.bias)
        return _Linear.apply(x, weight, self.bias)


def _is_slow(dtype: torch.dtype, multiplications: int) -> bool:
    """Whether torch's own product of this size is the slower one."""
    if dtype == torch.bfloat16:
        return lacks_bf16()
    return dtype == torch.float32 and has_slow_mkl() and multiplications >= _SMALLEST


def _product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`a @ b.T + bias` of matrices, summed in fp32; transposed ones are read as they lie."""
    wide, onto = (a.float(), b.float()), None if bias is None else bias.float()
    if _is_slow(torch.float32, a.numel() * b.shape[0]):
        y = torch.ops.mkldnn._linear_pointwise(*wide, onto, "none", [], "")
    else:
        y = F.linear(*wide, onto)
    return y.to(a.dtype)


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
            is_plain = flat.dtype == torch.float32 and weight.numel() < _SMALLEST_GRADIENT
            grad_weight = flat_grad.t() @ flat if is_plain else _product(flat_grad.t(), flat.t())
        return grad_x, grad_weight, flat_grad.sum(0) if for_bias else None
