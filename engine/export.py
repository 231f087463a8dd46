"""Consolidated export: whole tensors out of any ZeRO stage into a folder that stock loaders read.

LoRA adapters are merged into the weights of that folder (a head that is the embedding, with an adapter of its own, is
then untied). Where nothing but adapters was trained (and the modules that their config names in `modules_to_save`),
they are also written alone, into the folder `adapter` in it, as peft reads them:
`PeftModel.from_pretrained(base, folder / "adapter")`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from engine import distributed
from engine.adapters import PEFT_ROOT, adapted_ties, check_adapters, merged_parameters, plain_name

ADAPTER_FOLDER = "adapter"


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
    module: nn.Module,
    full_parameters: Iterable[tuple[str, torch.Tensor]],
    folder: Path,
    dtype: torch.dtype,
    trained: Iterable[str] = (),
) -> None:
    """Write `folder` on rank 0 from (name, whole tensor) pairs that every rank must walk through.

    Floating-point tensors are written as `dtype`, tied ones once, each at its full size. `trained` are the names of
    the trained parameters, from which it follows whether there is an adapter to write; it is written in fp32.
    """
    check_adapters(module)
    prefix, pretrained = find_pretrained(module)
    prefix = plain_name(prefix)
    main = distributed.is_main()
    config = _adapter_config(pretrained)
    alone = set(trained) if config is not None and _only_adapters(trained, config) else set()
    tensors: dict[str, torch.Tensor] = {}
    adapter: dict[str, torch.Tensor] = {}

    def noting_adapters() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in full_parameters:
            if main and name in alone:
                adapter[_peft_name(name, prefix)] = tensor.to("cpu", torch.float32, copy=True).contiguous()
            yield name, tensor

    for name, tensor in merged_parameters(module, noting_adapters()):
        if main and name.startswith(prefix):
            tensor = tensor.to("cpu", dtype if tensor.is_floating_point() else None, copy=True)
            tensors[name[len(prefix) :]] = tensor.contiguous()
    if main:
        parameters = {name for name, _ in pretrained.named_parameters(remove_duplicate=False)}
        for name, value in pretrained.state_dict().items():
            if name not in parameters:  # persistent buffers, which are whole on every rank
                tensors[plain_name(name)] = value.detach().cpu().clone()
        folder.mkdir(parents=True, exist_ok=True)
        changes = {"dtype": dtype, **({"tie_word_embeddings": False} if adapted_ties(module) else {})}
        with _config_says(pretrained, **changes), _no_progress_bar():
            pretrained.save_pretrained(folder, state_dict=tensors)
        if adapter:
            (folder / ADAPTER_FOLDER).mkdir(exist_ok=True)
            save_file(adapter, folder / ADAPTER_FOLDER / "adapter_model.safetensors", metadata={"format": "pt"})
            config.save_pretrained(folder / ADAPTER_FOLDER)
    distributed.barrier()


def _adapter_config(pretrained: PreTrainedModel) -> Any | None:
    """peft's config of the model's adapter, ready to be written; None without one."""
    configs = getattr(pretrained, "peft_config", None) or {}
    if len(configs) != 1:
        return None
    config = copy.copy(next(iter(configs.values())))
    config.inference_mode = True
    return config


def _only_adapters(trained: Iterable[str], config: Any) -> bool:
    saved = set(config.modules_to_save or ())
    owners = [name.rpartition(".")[0] for name in trained if ".lora_" not in name]
    return all(owner.rpartition(".")[2] in saved for owner in owners)


def _peft_name(name: str, prefix: str) -> str:
    """The name under which peft keeps a parameter: below its own root, without the adapter's name."""
    parts = plain_name(name)[len(prefix) :].split(".")
    if any(part.startswith("lora_") for part in parts):
        parts.pop(-2)
    return PEFT_ROOT + ".".join(parts)


@contextmanager
def _config_says(pretrained: PreTrainedModel, **changes: Any) -> Iterator[None]:
    """The config tells of the file, not of the module in training."""
    before = {name: getattr(pretrained.config, name) for name in changes}
    pretrained.config.update(changes)
    try:
        yield
    finally:
        pretrained.config.update(before)


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
