"""The training module's parameters as the swap reads them: plain names, this rank's rows, adapters merged.

Rows of dimension 0 of every parameter are either on every rank (replicated) or dealt to the ranks (sharded by
FSDP2). LoRA's product is added on the way out; the parameters themselves are never written to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from engine.adapters import Factors, active_factors, adapted_layers, adapter_state, plain_name
from engine.exchange import whole
from engine.sharding import to_shards


@dataclass
class _Source:
    parameter: torch.Tensor
    adapters: list[Factors]
    owners: list[list[tuple[int, int]]] | None


class Sources:
    """Named weights of `module`. A parameter's name is the one it has in the plain Hugging Face model."""

    def __init__(self, module: nn.Module):
        self.module = module
        self._sources: dict[str, _Source] = {}
        self._at_rest: list[torch.Tensor] = []

    def refresh(self) -> None:
        """Look the parameters up again: sharding replaces them between training and rest. Collective."""
        to_shards(self.module)
        self._sources = {}
        self._at_rest = list(self.module.parameters())
        adapters = active_factors(self.module)
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if ".lora_" in name:
                continue
            self._sources[plain_name(name)] = _Source(parameter, [], _row_owners(parameter))
        for name, pairs in adapters.items():
            self._sources[f"{name}.weight"].adapters.extend(pairs)

    @torch.no_grad()  # with gradients, rows would be a new tensor whose count begins at 0
    def state(self) -> tuple:
        """Another one whenever weights were written to or adapters switched, in ways that torch keeps count of."""
        # gathered ones stand in for sharded ones while they are in use
        parameters = self._at_rest if self.is_sharded() else self.module.parameters()
        counts = []
        for parameter in parameters:
            # what is written to a sharded tensor and to its rows is counted apart
            rows = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            counts.append((rows.data_ptr(), rows._version, parameter._version))
        return tuple(counts), adapter_state(self.module)

    def has(self, name: str) -> bool:
        return name in self._sources

    def parameter(self, name: str) -> torch.Tensor:
        return self._sources[name].parameter

    @property
    def device(self) -> torch.device:
        """Where the parameters rest."""
        return next(iter(self._sources.values())).parameter.device

    @property
    def names(self) -> list[str]:
        return list(self._sources)

    def owners(self, name: str) -> list[list[tuple[int, int]]] | None:
        """For each global rank the (start, stop) rows it holds; None when every rank holds all of them."""
        return self._sources[name].owners

    def is_sharded(self) -> bool:
        return any(source.owners is not None for source in self._sources.values())

    def is_adapted(self, name: str) -> bool:
        """Whether the weight has adapters, be they on or off."""
        return any(plain_name(f"{layer}.weight") == name for layer, _ in adapted_layers(self.module))

    def adapter_factors(self, name: str) -> list[Factors]:
        return self._sources[name].adapters

    def local_rows(self, name: str) -> torch.Tensor:
        """This rank's rows, `[rows, cols]` (one-dimensional weights: `[rows, 1]`), adapters merged. Collective
        where adapters are sharded."""
        source = self._sources[name]
        local = source.parameter.detach()
        if isinstance(local, DTensor):
            local = local.to_local()
        local = local.reshape(local.shape[0], -1)
        rows = slice(None) if source.owners is None else slice(*source.owners[torch.distributed.get_rank()][0])
        for factors in source.adapters:
            local = local + factors.product(rows).to(local.dtype)
        return local

    def whole(self, name: str) -> torch.Tensor:
        """The whole weight, adapters merged. Collective."""
        source = self._sources[name]
        weight = whole(source.parameter.detach())
        for factors in source.adapters:
            weight = weight + factors.product().to(weight.dtype)
        return weight


def _row_owners(parameter: torch.Tensor) -> list[list[tuple[int, int]]] | None:
    if not isinstance(parameter, DTensor):
        return None
    mesh, placements = parameter.device_mesh, parameter.placements
    sharded = [dim for dim, placement in enumerate(placements) if placement.is_shard()]
    if not sharded:
        return None
    if len(sharded) > 1 or placements[sharded[0]].dim != 0:
        raise ValueError(f"the hybrid engine reads parameters sharded by rows once, not {placements}")
    rows = parameter.shape[0]
    parts = mesh.size(sharded[0])
    each = -(-rows // parts)
    owners: list[list[tuple[int, int]]] = [[] for _ in range(torch.distributed.get_world_size())]
    index = mesh.mesh.movedim(sharded[0], -1).reshape(-1, parts)
    for line in index.tolist():
        for part, rank in enumerate(line):
            owners[rank] = [(min(rows, part * each), min(rows, (part + 1) * each))]
    return owners
