"""What a stage's folder tells about its last run: complete or not, with which arguments, from when."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Where a result is written and how it is shown does not change what it is.
NOT_COMPARED = {"output_dir", "resume", "config", "enable_tensorboard", "tensorboard_path", "print_loss"}
NOT_COMPARED |= {"print_answers", "print_answers_interval", "data_output_path", "save_interval", "local_rank"}
NOT_COMPARED |= {"dry_run"}

# Flags whose file is read by every run: what is in it counts, not its name alone.
FILES = ("deepspeed_config", "chat_template", "reward_fn")


def content_hashes(arguments: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 of the file behind each argument that names one (`file.py:name` too)."""
    found = {}
    for name in FILES:
        path = Path(str(arguments.get(name) or "").partition(":")[0])
        if path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def read_run(folder: Path) -> dict[str, Any] | None:
    """A stage's ``run.json``; None without one.

    Raises:
        ValueError: the file is not JSON.
    """
    path = Path(folder) / "run.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is not JSON ({error}): remove it, or the whole folder, to run again"
        ) from None


def changed_arguments(run: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    """What differs between a run's arguments and these, in words; empty when nothing that matters does."""
    before = run.get("arguments", {})
    now = json.loads(json.dumps(dict(arguments), default=str))
    differing = [
        f"{name} was {before[name]}, is {value}" if name in before else f"{name} is new"
        for name, value in now.items()
        if name not in NOT_COMPARED and (name not in before or before[name] != value)
    ]
    hashes = run.get("file_hashes", {})
    differing += [
        f"the file of {name} has changed"
        for name, found in content_hashes(arguments).items()
        if before.get(name) == now[name] and hashes.get(name) != found
    ]
    more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
    return ", ".join(differing[:3]) + more


def is_newer(folder: Path, than: Path) -> bool:
    """Whether ``folder``'s run ended after ``than``'s did."""
    return _ended(Path(folder)) > _ended(Path(than))


def has_checkpoint(folder: Path) -> bool:
    return (Path(folder) / "checkpoints" / "latest").exists()


def remove_checkpoints(folder: Path) -> None:
    """Forget the checkpoints of an earlier run in this folder, so that no later one goes on from them."""
    if has_checkpoint(folder):
        shutil.rmtree(Path(folder) / "checkpoints")


def _ended(folder: Path) -> tuple[str, float]:
    """When a run ended: what it says itself (a copied folder keeps that), and the file's time within a second."""
    run = read_run(folder)
    return ("", 0.0) if run is None else (run.get("updated", ""), os.path.getmtime(folder / "run.json"))
