"""LoRA on the models that train: which layers get adapters, what else trains beside them, and at which rate.

The layer's weight W becomes W + B A / dim, with A uniform in +-1 / sqrt(dim) and B zero at the start, as in
DeepSpeed-Chat, so that its flags and learning rates mean the same here. The layers are peft's: results load with
`PeftModel`, and merged ones with the stock classes.
"""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine import distributed
from engine.adapters import adapters_off
from engine.export import find_pretrained
from engine.modes import evaluation_mode
from engine.sharding import find_blocks
from rlhf.flag_groups import LORA_BLOCKS
from rlhf.models import ScoreModel

SHOWN_LAYERS = 12


@dataclass(frozen=True)
class Lora:
    """What the flags ask for. `flag` is the name of the pattern's flag, for messages."""

    dim: int
    module_name: str
    learning_rate: float
    only_optimize_lora: bool
    flag: str = "--lora_module_name"


def lora_of(args: Namespace) -> Lora | None:
    """The adapters of a stage with one model; None without."""
    if not args.lora_dim:
        return None
    return Lora(args.lora_dim, args.lora_module_name, args.lora_learning_rate, args.only_optimize_lora)


def actor_lora(args: Namespace) -> Lora | None:
    """The actor's adapters; None without."""
    dim, pattern, rate = args.actor_lora_dim, args.actor_lora_module_name, args.actor_lora_learning_rate
    return Lora(dim, pattern, rate, args.only_optimize_lora, "--actor_lora_module_name") if dim else None


def critic_lora(args: Namespace) -> Lora | None:
    """The critic's adapters; None without."""
    dim, pattern, rate = args.critic_lora_dim, args.critic_lora_module_name, args.critic_lora_learning_rate
    return Lora(dim, pattern, rate, args.only_optimize_lora, "--critic_lora_module_name") if dim else None


def add_adapters(module: nn.Module, lora: Lora, base: str | Path) -> None:
    """Put adapters into `module`, in place, and decide what trains.

    The adapted weights are frozen. With `only_optimize_lora` so is everything else but the score head of a
    `ScoreModel`, which trains in any case.

    Args:
        module: a causal model or a `ScoreModel`, not yet in an engine.
        base: the folder or name its weights came from; the saved adapter names it.

    Raises:
        ValueError: the pattern is in the name of no linear layer; the line shows what could match.
    """
    from peft import LoraConfig, inject_adapter_in_model  # seconds to import, which a run without adapters is spared

    _, model = find_pretrained(module)
    head = module.head_name if isinstance(module, ScoreModel) else None
    layers = matching_layers(model, lora.module_name, lora.flag)
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    conv = isinstance(model.get_submodule(layers[0]), Conv1D)
    config = LoraConfig(
        r=lora.dim,
        lora_alpha=1,
        target_modules=layers,
        fan_in_fan_out=conv,
        task_type="SEQ_CLS" if head else "CAUSAL_LM",
        base_model_name_or_path=str(base),
    )
    inject_adapter_in_model(config, model)
    if head:
        config.modules_to_save = [head]  # only now: peft would wrap the head, and it is trained as it is
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.requires_grad_(True)
            if ".lora_A." in name:
                nn.init.uniform_(parameter, -(lora.dim**-0.5), lora.dim**-0.5)
        elif head and name.startswith(f"{head}."):
            parameter.requires_grad_(True)
        else:
            is_adapted = name.endswith("base_layer.weight")
            parameter.requires_grad_(
                id(parameter) in trainable and not is_adapted and not lora.only_optimize_lora
            )
    if distributed.is_main():
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        total = sum(p.numel() for p in module.parameters())
        print(
            f"LoRA of dimension {lora.dim} on {len(layers)} layers ({_listed(layers)}): "
            f"{trained:,} of {total:,} parameters train",
            flush=True,
        )


def matching_layers(model: nn.Module, pattern: str, flag: str = "--lora_module_name") -> list[str]:
    """Names of the linear layers, heads apart, that have `pattern` (or one of several, by commas) in them.

    OPT's name for its blocks, the flag's default, stands for the blocks of every family.

    Raises:
        ValueError: there is none; the line shows the layers' names.
    """
    heads = {id(head) for head in (model.get_output_embeddings(), getattr(model, "score", None)) if head is not None}
    linear = {
        name: child
        for name, child in model.named_modules()
        if isinstance(child, nn.Linear | Conv1D) and id(child) not in heads
    }
    patterns = [part for part in pattern.split(",") if part]
    found = [name for name in linear if any(part in name for part in patterns)]
    if not found and pattern == LORA_BLOCKS:
        blocks = {id(child) for block in find_blocks(model) for child in block.modules()}
        found = [name for name, child in linear.items() if id(child) in blocks]
    if not found:
        raise ValueError(
            f"{flag} {pattern!r} is in the name of no linear layer of this {type(model).__name__}: give a part of "
            f"{_listed(linear)}"
        )
    return found


def _listed(names: Any) -> str:
    """Layers' names with `*` for the numbers of blocks, each once."""
    kinds = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names))
    more = f" and {len(kinds) - SHOWN_LAYERS} more" if len(kinds) > SHOWN_LAYERS else ""
    return ", ".join(kinds[:SHOWN_LAYERS]) + more


class WithoutAdapters:
    """An engine's module as it was before its adapters: PPO's reference, in no memory of its own.

    Right as long as nothing but the adapters trains. Only for forward passes without gradients, and without dropout
    whatever mode the engine is in.
    """

    def __init__(self, engine: Any):
        self.engine = engine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            raise ValueError("the reference gives no gradients: call it under torch.no_grad()")
        with adapters_off(self.engine.module), evaluation_mode(self.engine.module):
            return self.engine(*args, **kwargs)

    @property
    def device(self) -> torch.device:
        return self.engine.device

    def eval(self) -> WithoutAdapters:
        self.engine.eval()
        return self
