"""Consolidated export: whole tensors out of any ZeRO stage into a folder that stock loaders read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from engine import distributed


def find_pretrained(module: nn.Module) -> tuple[str, PreTrainedModel]:
    """The transformers model inside `module` and its name prefix ("" for the module itself).

    Raises:
        ValueError: there is none, so no Hugging Face folder can be written.
    """
    for name, child in module.named_modules():
        if isinstance(child, PreTrainedModel):
            return (f"{name}." if name else ""), child
    raise ValueError(f"save_pretrained needs a transformers model; {type(module).__name__} holds none")


def save_pretrained(
    module: nn.Module, full_parameters: Iterable[tuple[str, torch.Tensor]], folder: Path, dtype: torch.dtype
) -> None:
    """Write `folder` on rank 0 from (name, whole tensor) pairs that every rank must walk through.

    Floating-point tensors are written as `dtype`, tied ones once, each at its full size.
    """
    prefix, pretrained = find_pretrained(module)
    main = distributed.is_main()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in full_parameters:
        if main and name.startswith(prefix):
            tensor = tensor.to("cpu", dtype if tensor.is_floating_point() else None, copy=True)
            tensors[name[len(prefix) :]] = tensor.contiguous()
    if main:
        parameters = {name for name, _ in pretrained.named_parameters(remove_duplicate=False)}
        for name, value in pretrained.state_dict().items():
            if name not in parameters:  # persistent buffers, which are whole on every rank
                tensors[name] = value.detach().cpu().clone()
        folder.mkdir(parents=True, exist_ok=True)
        with _as_dtype(pretrained, dtype), _no_progress_bar():
            pretrained.save_pretrained(folder, state_dict=tensors)
    distributed.barrier()


@contextmanager
def _as_dtype(pretrained: PreTrainedModel, dtype: torch.dtype) -> Iterator[None]:
    """The config says the type of the file, not that of the module in training."""
    before, pretrained.config.dtype = pretrained.config.dtype, dtype
    try:
        yield
    finally:
        pretrained.config.dtype = before


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """No bar of its own while shards are written: callers show progress in their way."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
