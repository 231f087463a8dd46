"""Checkpoints that any number of ranks can save and any other number can resume.

    FOLDER/latest            the tag of the last complete checkpoint
    FOLDER/TAG/state/        model and optimizer tensors by parameter name (torch's distributed checkpoint)
    FOLDER/TAG/engine.pt     counters, schedule, scaler, client state
    FOLDER/TAG/rng_RANK.pt   random states

A checkpoint is written under a temporary name, synced, renamed, and only then does `latest` move to it.
"""

from __future__ import annotations

import os
import random
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from engine import distributed

LATEST = "latest"


def save(engine: Any, folder: Path, tag: str | None, client_state: dict | None) -> Path:
    """See `Engine.save_checkpoint`."""
    tag = tag or f"global_step{engine.global_steps}"
    final, temporary = folder / tag, folder / f".{tag}.tmp"
    if distributed.is_main():
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    distributed.barrier()
    with _alone_without_warning():
        dcp.save(_tensors(engine), checkpoint_id=str(temporary / "state"), no_dist=distributed.world_size() == 1)
    torch.save(_random_state(), temporary / f"rng_{distributed.rank()}.pt")
    if distributed.is_main():
        torch.save({**_counters(engine), "client_state": client_state or {}}, temporary / "engine.pt")
    distributed.barrier()
    if distributed.is_main():
        for path in temporary.rglob("*"):
            if path.is_file():
                _sync(path)
        if final.exists():
            shutil.rmtree(final)
        os.replace(temporary, final)
        pointer = folder / f".{LATEST}.tmp"
        pointer.write_text(tag)
        _sync(pointer)
        os.replace(pointer, folder / LATEST)
        _sync(folder)
    distributed.barrier()
    return final


def load(engine: Any, folder: Path, tag: str | None) -> tuple[Path, dict]:
    """See `Engine.load_checkpoint`."""
    if tag is None:
        if not (folder / LATEST).exists():
            raise FileNotFoundError(f"no checkpoint in {folder}: the file {LATEST!r} is missing")
        tag = (folder / LATEST).read_text().strip()
    path = folder / tag
    if not (path / "engine.pt").exists():
        complete = sorted(p.parent.name for p in folder.glob("*/engine.pt"))
        raise FileNotFoundError(f"no complete checkpoint {path}; complete ones there: {', '.join(complete) or 'none'}")
    _load_tensors(engine, path / "state")
    saved = torch.load(path / "engine.pt", weights_only=False)
    engine.global_steps, engine.micro_steps = saved["global_steps"], saved["micro_steps"]
    engine.skipped_steps, engine._unit = saved["skipped_steps"], saved["unit"]
    engine.scaler.load_state_dict(saved["scaler"])
    if engine.lr_scheduler is not None and saved["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(saved["lr_scheduler"])
    if engine.optimizer is not None:
        for group, values in zip(engine.optimizer.param_groups, saved["optimizer_groups"], strict=True):
            group.update(values)
    random_file = path / f"rng_{distributed.rank()}.pt"
    if random_file.exists():
        _set_random_state(torch.load(random_file, weights_only=False))
    distributed.barrier()
    return path, saved["client_state"]


def _tensors(engine: Any) -> dict[str, torch.Tensor]:
    """Everything that is saved by name: masters of trainable parameters, the other ones, optimizer state."""
    owned = dict(engine.parameters.trainable)
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in engine.module.named_parameters():
        tensors[f"model.{name}"] = owned.get(name, parameter).detach()
    for name, buffer in engine.module.state_dict().items():
        if f"model.{name}" not in tensors and name not in _all_parameter_names(engine.module):
            tensors[f"model.{name}"] = buffer.detach()
    tensors.update({f"ema.{name}": value for name, value in engine.ema.items()})
    if engine.optimizer is not None:
        for name, parameter in owned.items():
            for key, value in engine.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def _all_parameter_names(module: torch.nn.Module) -> set[str]:
    return {name for name, _ in module.named_parameters(remove_duplicate=False)}


def _load_tensors(engine: Any, path: Path) -> None:
    reader = dcp.FileSystemReader(str(path))
    saved = reader.read_metadata().state_dict_metadata
    targets = _tensors(engine)
    owned = dict(engine.parameters.trainable)
    if engine.optimizer is not None:
        # A fresh optimizer has no state yet: make room for what was saved, laid out like its parameter.
        for name, parameter in owned.items():
            prefix = f"optimizer.{name}."
            state = engine.optimizer.state[parameter]
            for key, meta in saved.items():
                if key.startswith(prefix) and "." not in key[len(prefix) :]:
                    if tuple(meta.size) == tuple(parameter.shape) and meta.size:
                        value = torch.zeros_like(parameter.detach(), dtype=meta.properties.dtype)
                    else:
                        value = torch.zeros(tuple(meta.size), dtype=meta.properties.dtype)
                    state[key[len(prefix) :]] = targets[key] = value
    missing = [key for key in targets if key not in saved]
    if missing:
        raise ValueError(f"checkpoint {path.parent} lacks {len(missing)} tensors of this model, such as {missing[0]!r}")
    with _alone_without_warning():
        dcp.load(targets, storage_reader=reader, no_dist=distributed.world_size() == 1)


@contextmanager
def _alone_without_warning() -> Iterator[None]:
    """A single process is asked for here (no_dist); torch warns that it assumes so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _counters(engine: Any) -> dict[str, Any]:
    groups = [] if engine.optimizer is None else engine.optimizer.param_groups
    return {
        "global_steps": engine.global_steps,
        "micro_steps": engine.micro_steps,
        "skipped_steps": engine.skipped_steps,
        "unit": engine._unit,
        "scaler": engine.scaler.state_dict(),
        "lr_scheduler": engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None,
        "optimizer_groups": [{k: v for k, v in group.items() if k != "params"} for group in groups],
    }


def _random_state() -> dict[str, Any]:
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
