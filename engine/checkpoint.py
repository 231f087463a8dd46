"""Checkpoints that any number of ranks can save and any other number can resume.

    FOLDER/latest            the tag of the last complete checkpoint
    FOLDER/TAG/state/        tensors by parameter name (torch's distributed checkpoint): model, optimizer, averages,
                             and the gradients of a step that is still being accumulated
    FOLDER/TAG/engine.pt     counters, schedule, scaler, client state
    FOLDER/TAG/rng_RANK.pt   random states

What is in one is decided here; how it takes its place in FOLDER by `engine.checkpoint_files`.
"""

from __future__ import annotations

import copy
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from engine import checkpoint_files, distributed

# Which kernels an optimizer runs depends on the layout of its parameters, so each run keeps its own choice.
_NOT_SAVED = ("params", "fused", "foreach", "capturable", "differentiable")


@dataclass
class _Snapshot:
    """All that one rank has to write."""

    tensors: dict[str, torch.Tensor]
    counters: dict[str, Any]
    random: dict[str, Any]


def save(engine: Any, folder: Path, tag: str | None, client_state: dict | None) -> Path:
    """See `Engine.save_checkpoint`."""
    tag = checkpoint_files.check_tag(f"global_step{engine.global_steps}" if tag is None else str(tag))
    settings = engine.config.checkpoint
    engine.wait_for_checkpoint()
    counters = {**_counters(engine), "client_state": client_state or {}}
    snapshot = _Snapshot(_tensors(engine), counters, _random_state())
    if settings.async_save:
        # training goes on at once, so what is written must be copies
        snapshot.tensors = {name: _copy_on_cpu(tensor) for name, tensor in snapshot.tensors.items()}
        snapshot.counters = copy.deepcopy(counters)
        engine.background.start(lambda group: _write(snapshot, folder, tag, settings.keep_last, group))
    else:
        _write(snapshot, folder, tag, settings.keep_last, None)
    return folder / tag


def _write(snapshot: _Snapshot, folder: Path, tag: str, keep_last: int | None, group: dist.ProcessGroup | None) -> None:
    rank, ranks, main = distributed.rank(), distributed.world_size(), distributed.is_main()
    path = checkpoint_files.temporary_folder(folder, tag)
    if main:
        checkpoint_files.begin(folder, tag)
    distributed.barrier(group)
    with _alone_without_warning():
        dcp.save(snapshot.tensors, checkpoint_id=str(path / "state"), process_group=group, no_dist=ranks == 1)
    torch.save(snapshot.random, path / f"rng_{rank}.pt")
    if main:
        torch.save(snapshot.counters, path / "engine.pt")
    checkpoint_files.seal(path, rank, ranks)
    distributed.barrier(group)
    if main:
        checkpoint_files.commit(folder, tag, keep_last)
    distributed.barrier(group)


def _copy_on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()


class Background:
    """Writes one checkpoint at a time in a thread, on a process group of its own. Made on all ranks together."""

    def __init__(self):
        # collectives of two threads on one group would meet the wrong partners
        self._group = dist.new_group(backend="gloo") if distributed.world_size() > 1 else None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, write: Callable[[dist.ProcessGroup | None], None]) -> None:
        def run() -> None:
            try:
                write(self._group)
            except Exception as error:  # noqa: BLE001 - raised by `wait` in the main thread
                self._error = error

        self._thread = threading.Thread(target=run, name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until it is written. Raises what went wrong meanwhile."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def read_counters(folder: str | Path, tag: str | None = None) -> dict[str, Any]:
    """What a checkpoint counts, with nothing loaded: `global_steps`, `train_batch_size` and so on, and the caller's
    `client_state`. Collective; for plans that an engine is then made by.

    Raises:
        FileNotFoundError: as `Engine.load_checkpoint`, which also checks the files.
    """
    folder = Path(folder)
    tag = _agree(lambda: checkpoint_files.find(folder, None if tag is None else str(tag)))
    path = folder / tag / "engine.pt"
    if not path.exists():
        raise FileNotFoundError(f"checkpoint {path.parent} is damaged: {path.name} is missing")
    return torch.load(path, weights_only=False)


def load(engine: Any, folder: Path, tag: str | None) -> tuple[Path, dict]:
    """See `Engine.load_checkpoint`."""
    engine.wait_for_checkpoint()
    tag = _agree(lambda: checkpoint_files.find(folder, None if tag is None else str(tag)))
    path = folder / tag
    problems = distributed.gather_objects(checkpoint_files.problem(path, distributed.rank(), distributed.world_size()))
    found = next((text for text in problems if text), None)
    if found is not None:
        _agree(lambda: _raise(f"checkpoint {path} is damaged: {found}{checkpoint_files.offer(folder, tag)}"))
    saved = torch.load(path / "engine.pt", weights_only=False)
    micro_steps = _place_in_window(engine, path, saved)
    _check_optimizer(engine, path, saved)
    gradients = _load_tensors(engine, path)
    engine.global_steps, engine.micro_steps = saved["global_steps"], micro_steps
    engine.skipped_steps, engine.global_samples = saved["skipped_steps"], saved["global_samples"]
    engine._is_waiting = saved.get("is_waiting", False)
    engine.scaler.load_state_dict(saved["scaler"])
    engine.accumulation.load_state_dict(saved["accumulation"])
    if engine.lr_scheduler is not None and saved["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(saved["lr_scheduler"])
    if engine.optimizer is not None and saved["optimizer_groups"]:
        for group, values in zip(engine.optimizer.param_groups, saved["optimizer_groups"], strict=True):
            group.update({key: value for key, value in values.items() if key not in _NOT_SAVED})
        for name, parameter in engine.parameters.trainable:
            engine.optimizer.state[parameter].update(saved["optimizer_values"].get(name, {}))
        engine.parameters.restore_gradients(engine.accumulation.from_saved(gradients, engine.scaler.scale))
    random_file = path / f"rng_{distributed.rank()}.pt"
    if random_file.exists():
        _set_random_state(torch.load(random_file, weights_only=False))
    distributed.barrier()
    return path, saved["client_state"]


def _agree(find: Callable[[], str]) -> str:
    """The main rank's answer on every rank; its error too, so that none waits for the others."""
    answer: str | Exception = ""
    if distributed.is_main():
        try:
            answer = find()
        except (ValueError, OSError) as error:
            answer = error
    answer = distributed.broadcast_object(answer)
    if isinstance(answer, Exception):
        raise answer
    return answer


def _raise(line: str) -> str:
    raise ValueError(line)


def _place_in_window(engine: Any, path: Path, saved: dict[str, Any]) -> int:
    """`micro_steps` here: as far through the accumulation window as the saved run was through its own."""
    window = engine.gradient_accumulation_steps()
    windows, done = divmod(saved["micro_steps"], saved["window"])
    if done * window % saved["window"]:
        raise ValueError(
            f"checkpoint {path} stands {done} micro-batches into {saved['window']}, which is no whole number of this "
            f"run's {window}: resume it with gradient_accumulation_steps {saved['window']}"
        )
    return windows * window + done * window // saved["window"]


def _check_optimizer(engine: Any, path: Path, saved: dict[str, Any]) -> None:
    """Raise where this run's optimizer could not go on with the saved one's state."""
    if engine.optimizer is None or not saved["optimizer_groups"]:
        return
    kind = type(engine.optimizer).__name__
    saved_kind = saved.get("optimizer", kind)  # checkpoints written before it was saved do not tell
    if kind != saved_kind:
        raise ValueError(
            f"checkpoint {path} holds the state of {saved_kind}, and this run's optimizer is {kind}: resume it with "
            f"{saved_kind}, or start anew from weights that save_pretrained wrote"
        )
    groups, saved_groups = len(engine.optimizer.param_groups), len(saved["optimizer_groups"])
    if groups != saved_groups:
        raise ValueError(
            f"checkpoint {path} has {saved_groups} parameter groups and this run's optimizer {groups}: resume it with "
            "the weight decay and the groups it was saved with"
        )


def _tensors(engine: Any) -> dict[str, torch.Tensor]:
    """Everything that is saved by name. Collective."""
    engine.parameters.to_rest()
    tensors = _model_tensors(engine)
    if engine.optimizer is None:
        return tensors
    for name, parameter in engine.parameters.trainable:
        for key, value in engine.optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer.{name}.{key}"] = value
    if not engine.is_gradient_accumulation_start():
        waiting = engine.accumulation.to_saved(engine.parameters.accumulated_gradients(), engine.scaler.scale)
        tensors.update({f"gradient.{name}": value for name, value in waiting.items()})
    return tensors


def _model_tensors(engine: Any) -> dict[str, torch.Tensor]:
    """Parameters (the masters of those that have one), persistent buffers, averages."""
    owned = dict(engine.parameters.trainable)
    tensors = {f"model.{name}": owned.get(name, p).detach() for name, p in engine.module.named_parameters()}
    parameters = {name for name, _ in engine.module.named_parameters(remove_duplicate=False)}
    for name, buffer in engine.module.state_dict().items():
        if name not in parameters:
            tensors[f"model.{name}"] = buffer.detach()
    tensors.update({f"ema.{name}": value for name, value in engine.ema.items()})
    return tensors


def _load_tensors(engine: Any, path: Path) -> dict[str, torch.Tensor]:
    """Fill the engine's tensors in place; returns the saved gradients, laid out like their parameters."""
    reader = dcp.FileSystemReader(str(path / "state"))
    saved = reader.read_metadata().state_dict_metadata
    engine.parameters.to_rest()
    targets = _model_tensors(engine)
    missing = [key for key in targets if key not in saved]
    if missing:
        raise ValueError(f"checkpoint {path} lacks {len(missing)} tensors of this model, such as {missing[0]!r}")
    for key, target in targets.items():
        if saved[key].size != target.shape:
            raise ValueError(
                f"checkpoint {path} is of another model: {key!r} is {list(saved[key].size)} there and "
                f"{list(target.shape)} here"
            )
    engine.parameters.zero_grad()
    gradients = {}
    if engine.optimizer is not None:
        # A fresh optimizer has no state yet: make room for what was saved, laid out like its parameter.
        owned = dict(engine.parameters.trainable)
        for key, meta in saved.items():
            kind, _, rest = key.partition(".")
            if kind == "gradient" and rest in owned:
                gradients[rest] = targets[key] = torch.zeros_like(owned[rest].detach())
            name, _, state_key = rest.rpartition(".")
            if kind == "optimizer" and name in owned:
                value = _room(owned[name].detach(), meta)
                engine.optimizer.state[owned[name]][state_key] = targets[key] = value
    with _alone_without_warning():
        dcp.load(targets, storage_reader=reader, no_dist=distributed.world_size() == 1)
    return gradients


def _room(parameter: torch.Tensor, meta: Any) -> torch.Tensor:
    if tuple(meta.size) == tuple(parameter.shape) and meta.size:
        return torch.zeros_like(parameter, dtype=meta.properties.dtype)
    return torch.zeros(tuple(meta.size), dtype=meta.properties.dtype)


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
        "is_waiting": engine._is_waiting,
        "window": engine.gradient_accumulation_steps(),
        "skipped_steps": engine.skipped_steps,
        "global_samples": engine.global_samples,
        "train_batch_size": engine.train_batch_size(),
        "scaler": engine.scaler.state_dict(),
        "accumulation": engine.accumulation.state_dict(),
        "lr_scheduler": engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None,
        "optimizer": type(engine.optimizer).__name__ if engine.optimizer is not None else None,
        "optimizer_groups": [{k: v for k, v in group.items() if k not in _NOT_SAVED} for group in groups],
        "optimizer_values": _plain_state(engine),
    }


def _plain_state(engine: Any) -> dict[str, dict[str, Any]]:
    """What an optimizer keeps for a parameter beside tensors, such as a count of steps."""
    if engine.optimizer is None:
        return {}
    states = {name: engine.optimizer.state.get(p, {}) for name, p in engine.parameters.trainable}
    return {name: {k: v for k, v in state.items() if not isinstance(v, torch.Tensor)} for name, state in states.items()}


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
