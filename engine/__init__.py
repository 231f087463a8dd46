"""How training scales: a ZeRO engine, and a hybrid engine that also generates. Knows nothing of RLHF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from engine.config import EngineConfig
from engine.distributed import init_distributed, world_size
from engine.engine import Engine
from engine.hybrid import HybridEngine
from engine.memory import estimate_memory

__all__ = ["Engine", "EngineConfig", "HybridEngine", "estimate_memory", "init_distributed", "initialize"]


def initialize(
    model: nn.Module,
    config: dict | str | Path | EngineConfig,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    model_parameters: Any = None,
) -> Engine | HybridEngine:
    """An engine around `model`; a `HybridEngine` when the config enables `hybrid_engine`.

    Args:
        model: any torch module; its parameters are taken over (cast, sharded) in place.
        config: DeepSpeed's JSON as a dict, a path or an `EngineConfig`. Without an optimizer in it (and none
            given) the engine is forward-only.
        optimizer: a fresh torch optimizer over the model's parameters, instead of the config's.
        lr_scheduler: a scheduler, or a function from the optimizer to one, instead of the config's.
        model_parameters: parameters or parameter groups for the config's optimizer (default: all trainable
            ones, without weight decay on biases and norms).

    Raises:
        ValueError: a config key is unknown, contradictory or out of range; the line names it.
    """
    config = EngineConfig.load(config, world_size=world_size())
    kind = HybridEngine if config.hybrid_engine.enabled else Engine
    return kind(model, config, optimizer=optimizer, lr_scheduler=lr_scheduler, model_parameters=model_parameters)
