"""A module's training and evaluation modes, child by child."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Within, nothing is dropped out; afterwards every child is in the mode it was in."""
    modes = {child: child.training for child in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for child, mode in modes.items():
            child.training = mode
