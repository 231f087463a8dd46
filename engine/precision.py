"""Which floating-point types a run uses: what it computes in, and which modules keep fp32.

Masters and optimizer states are always fp32; `compute_dtype` is what forward and backward see.
"""

from __future__ import annotations

import torch
from torch import nn


def compute_dtype(config) -> torch.dtype:
    """bf16 or fp16 when the config enables it, else fp32."""
    if config.bf16.enabled:
        return torch.bfloat16
    if config.fp16.enabled:
        return torch.float16
    return torch.float32


def fp32_modules(module: nn.Module) -> list[nn.Module]:
    """Submodules that ask to stay in fp32, through the `_keep_in_fp32_modules` names that transformers uses.

    A score head asks for it: in bf16 two scores closer than 1/256 of their size would be equal.
    """
    kept = []
    for owner_name, owner in module.named_modules():
        patterns = set(getattr(owner, "_keep_in_fp32_modules", None) or ())
        patterns |= set(getattr(owner, "_keep_in_fp32_modules_strict", None) or ())
        if not patterns:
            continue
        prefix = f"{owner_name}." if owner_name else ""
        for name, child in module.named_modules():
            own_parameters = next(iter(child.parameters(recurse=False)), None) is not None
            if own_parameters and name.startswith(prefix) and patterns & set(name[len(prefix) :].split(".")):
                kept.append(child)
    return kept
