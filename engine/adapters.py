"""LoRA adapters (peft's layers) as the engine reads them: their names, their factors, and the weights they add up to.

An adapted layer holds the plain layer as `base_layer` beside thin factors A `[r, in]` and B `[out, r]`, and stands
for the weight `base + scaling * B @ A`. The base is never written to: merging makes a new tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from engine.exchange import whole

# What wrappers put into parameter names, and what adapters do.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "base_layer.")
PEFT_ROOT = "base_model.model."


@dataclass(frozen=True)
class Factors:
    """One active adapter of one layer. `flipped`: the layer's weight is `[in, out]` (GPT-2's Conv1D)."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    flipped: bool

    def product(self, rows: slice = slice(None)) -> torch.Tensor:
        """`rows` of `scaling * B @ A` in fp32, laid out as the weight is. The factors are thin: sharded ones are
        gathered."""
        a, b = whole(self.a.detach()), whole(self.b.detach())
        a, b = (a[:, rows], b) if self.flipped else (a, b[rows])
        return _product(a, b, self.scaling, self.flipped)


def plain_name(name: str) -> str:
    """`name` without what checkpointing, compiling and adapters add to it."""
    for part in _WRAPPERS:
        name = name.replace(part, "")
    return name.removeprefix(PEFT_ROOT)


def adapted_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, layer) of every layer with LoRA adapters."""
    for name, child in module.named_modules():
        if isinstance(getattr(child, "lora_A", None), nn.ModuleDict):
            yield name, child


def active_factors(module: nn.Module) -> dict[str, list[Factors]]:
    """The adapters that forward adds, by the plain name of their layer; none of those merged into its weight."""
    found: dict[str, list[Factors]] = {}
    for name, layer in adapted_layers(module):
        if getattr(layer, "disable_adapters", False):
            continue
        flipped = getattr(layer, "fan_in_fan_out", False)
        pairs = [
            Factors(layer.lora_A[key].weight, layer.lora_B[key].weight, layer.scaling[key], flipped)
            for key in _active(layer)
        ]
        if pairs:
            found[plain_name(name)] = pairs
    return found


def adapter_state(module: nn.Module) -> tuple:
    """What besides parameters decides what adapted layers stand for: which adapters are on, and how strongly."""
    return tuple(
        (name, layer.disable_adapters, tuple((key, layer.scaling[key]) for key in _active(layer)))
        for name, layer in adapted_layers(module)
    )


def adapted_ties(module: nn.Module) -> dict[str, str]:
    """Of layers with active adapters on a weight that is another module's too, such as a head that is the embedding:
    the name by which `named_parameters` knows the weight, by the layer's. Merged, they are two weights."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    ties = {
        owner: names[id(layer.base_layer.weight)]
        for owner, layer in adapted_layers(module)
        if not getattr(layer, "disable_adapters", False) and _active(layer)
    }
    return {owner: name for owner, name in ties.items() if name != f"{owner}.base_layer.weight"}


def check_adapters(module: nn.Module) -> None:
    """Refuse adapters whose weights this module could not add up.

    Raises:
        ValueError: one line with the first layer that has such, and what it is.
    """
    for name, layer in module.named_modules():
        kind = _foreign_kind(layer)
        if kind is not None:
            raise ValueError(
                f"{plain_name(name)} has {kind}, which cannot be merged here: only LoRA's two factors on linear layers "
                "can; a module that trains whole needs no wrapper, but requires_grad"
            )


def _foreign_kind(layer: nn.Module) -> str | None:
    """What a layer has that peft put there and that is not plain LoRA on a linear layer."""
    if isinstance(getattr(layer, "modules_to_save", None), nn.ModuleDict):
        return "a copy of its own (modules_to_save)"
    if not hasattr(layer, "adapter_layer_names") or not hasattr(layer, "base_layer"):
        return None
    if not hasattr(layer, "lora_A"):
        return f"an adapter of another kind ({type(layer).__name__})"
    if len(layer.lora_embedding_A):
        return "LoRA on an embedding"
    if len(getattr(layer, "lora_magnitude_vector", ())):
        return "a variant of LoRA with magnitudes (use_dora)"
    if any(factor.bias is not None for factor in layer.lora_B.values()):
        return "LoRA with a bias (lora_bias)"
    return None


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Within, forward passes see the base weights alone."""
    layers = [layer for _, layer in adapted_layers(module)]
    before = [layer._disable_adapters for layer in layers]
    # peft's own switch also turns requires_grad off and on, which sharded parameters do not expect
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, value in zip(layers, before, strict=True):
            layer._disable_adapters = value


def merged_parameters(
    module: nn.Module, parameters: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(plain name, whole tensor) with every active adapter added to its weight, from those of `module` by name.

    One adapted weight at a time waits for its factors, which follow it among a module's parameters, and a tied one from
    where it comes first.
    """
    layers = dict(adapted_layers(module))
    ties = adapted_ties(module)
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in parameters:
        for tied in [tied for tied, first in ties.items() if first == name]:
            waiting[tied] = {"base_layer.weight": tensor}
        owner = _owner(name, layers)
        if owner is None:
            yield plain_name(name), tensor
            continue
        layer, part = layers[owner], name[len(owner) + 1 :]
        keys = [] if layer.disable_adapters else _active(layer)
        wanted = ["base_layer.weight", *(f"lora_{side}.{key}.weight" for key in keys for side in "AB")]
        if keys and part in wanted:
            parts = waiting.setdefault(owner, {})
            parts[part] = tensor
            if len(parts) == len(wanted):
                yield plain_name(f"{owner}.weight"), _merge(layer, waiting.pop(owner), keys)
        elif part.startswith("base_layer."):
            yield plain_name(name), tensor


def _merge(layer: nn.Module, parts: dict[str, torch.Tensor], keys: list[str]) -> torch.Tensor:
    weight = parts["base_layer.weight"].float()
    for key in keys:
        a, b = parts[f"lora_A.{key}.weight"], parts[f"lora_B.{key}.weight"]
        weight = weight + _product(a, b, layer.scaling[key], getattr(layer, "fan_in_fan_out", False))
    return weight


def _owner(name: str, layers: dict[str, nn.Module]) -> str | None:
    """The adapted layer that the parameter `name` belongs to."""
    for part in (".base_layer.", ".lora_"):
        owner, found, _ = name.partition(part)
        if found and owner in layers:
            return owner
    return None


def _active(layer: nn.Module) -> list[str]:
    merged = set(getattr(layer, "merged_adapters", ()))
    return [key for key in layer.active_adapters if key in layer.lora_A and key not in merged]


def _product(a: torch.Tensor, b: torch.Tensor, scaling: float, flipped: bool) -> torch.Tensor:
    with torch.autocast(a.device.type, enabled=False):  # which would round it
        product = (b.float() @ a.float()) * scaling
    return product.T if flipped else product
