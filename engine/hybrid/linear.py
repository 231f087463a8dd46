"""Linear layers of the inference layout: on CPU, weights reordered once into oneDNN's blocked format.

The blocked format is used wherever torch was built with oneDNN for the type at hand: it was faster than the
plain matrix product at every size tried (for fp32 on AMD by 3x, since MKL has no path of its own there).

oneDNN compiles a kernel for every shape it meets, 0.5 MB of it and its copies, and torch keeps the last 1024: a process
grows by up to 0.45 GB while the numbers of rows vary (by 0.6 GB in bf16, in plain linear layers too). The environment's
`LRU_CACHE_CAPACITY` and `ONEDNN_PRIMITIVE_CACHE_CAPACITY` bound it, at 0.5 ms for a kernel made again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

# (x [rows, in], tensor to add [rows, out] or None) -> [rows, out]
LinearFunction = Callable[..., torch.Tensor]


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None, packed: bool) -> LinearFunction:
    """A function `(x, add=None) -> x @ weight.T + bias + add`; with `packed` it keeps no reference to `weight`."""
    if not packed:

        def plain(x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
            y = F.linear(x, weight, bias)
            return y if add is None else y.add_(add)

        return plain

    ops = torch.ops.mkldnn
    blocked = ops._reorder_linear_weight(weight.contiguous(), None)
    single, binary = ops._linear_pointwise.default, ops._linear_pointwise.binary

    def onednn(x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        if add is None:
            return single(x, blocked, bias, "none", [], "")
        return binary(x, add, blocked, bias, "add")

    return onednn


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN carries linear layers of this type on this device."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.float32:
        return True
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return False
