"""How much memory a forward pass keeps for its backward pass: what micro-batch sizes and checkpointing decide."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from engine.sharding import local


@contextmanager
def activation_bytes(module: nn.Module) -> Iterator[list[int]]:
    """A list that holds, after the block, the bytes of all tensors that autograd keeps for what ran in it.

    Memory that several of them share counts once, the parameters of `module` not at all. Under activation
    checkpointing only what is kept instead of a layer's insides is seen, which is what it saves.
    """
    parameters = {local(parameter.detach()).untyped_storage().data_ptr() for parameter in module.parameters()}
    sizes: dict[int, int] = {}
    result: list[int] = []

    def count(tensor: torch.Tensor) -> torch.Tensor:
        owner = tensor._base if tensor._base is not None else tensor
        storage = tensor.untyped_storage()
        # a gathered shard is a parameter, too, at an address of its own
        if not isinstance(owner, nn.Parameter) and storage.data_ptr() not in parameters:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        yield result
    result.append(sum(sizes.values()))
