"""`--deepspeed_config FILE`: a DeepSpeed JSON beside the flags.

What the file says and a flag stands for (batch size, accumulation, ZeRO stage, type, rates) becomes that flag's value,
unless the flag is given itself; so `run.json` tells what was resolved. Everything else in the file (clipping, the
optimizer's and the loss scale's parameters, a schedule of DeepSpeed's, logging) is laid over the engine's config as it
is. "auto" leaves a key to the flags.

Reads the JSON and nothing heavy: a misspelt flag is answered at once. The engine checks the file's keys and values.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

AUTO = "auto"
ADAM = ("adam", "adamw", "lion")  # have the parameter `betas`
MICRO_BATCH = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
# Keys that flags stand for: dotted key -> the flags of one stage or another that do.
FLAGS: dict[str, tuple[str, ...]] = {
    MICRO_BATCH: ("per_device_training_batch_size", "per_device_train_batch_size"),
    ACCUMULATION: ("gradient_accumulation_steps",),
    "zero_optimization.stage": ("zero_stage", "actor_zero_stage", "critic_zero_stage"),
    "optimizer.params.lr": ("learning_rate", "actor_learning_rate", "critic_learning_rate"),
    "optimizer.params.weight_decay": ("weight_decay", "actor_weight_decay", "critic_weight_decay"),
    "hybrid_engine.inference_tp_size": ("inference_tp_size",),
    "hybrid_engine.tp_gather_partition_size": ("tp_gather_partition_size",),
}
# Keys that make a switch when they say this.
SWITCHES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "bf16.enabled": (True, ("--dtype=bf16",)),
    "fp16.enabled": (True, ("--dtype=fp16",)),
    "zero_optimization.offload_optimizer.device": ("cpu", ("--offload",)),
    "hybrid_engine.release_inference_cache": (True, ("--release_inference_cache",)),
    "hybrid_engine.pin_parameters": (False, ("--unpin_actor_parameters",)),
}


def read(path: str | Path) -> dict[str, Any]:
    """The file's content.

    Raises:
        FileNotFoundError: no such file. ValueError: no JSON object in it. One line.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"--deepspeed_config {path}: no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"--deepspeed_config {path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"--deepspeed_config {path}: holds a {type(content).__name__}: it must be one JSON object")
    if isinstance(content.get("bfloat16"), dict):
        content["bf16"] = content.pop("bfloat16")  # DeepSpeed's older name
    return content


def words(path: str | Path, known: Collection[str], argv: Sequence[str] = (), ranks: int = 1) -> list[str]:
    """What the file says of the `known` flags (with their dashes), as words of a command line.

    `argv`: the words that will win over these. Of micro-batch and accumulation, the one that neither says follows
    from the file's `train_batch_size`, as DeepSpeed has it.

    Raises:
        ValueError: no whole number does, over so many `ranks`. One line.
    """
    content = read(path)
    _solve_batch(content, argv, ranks)
    found = []
    for key, flags in FLAGS.items():
        value = _value(content, key)
        meant = [flag for flag in flags if f"--{flag}" in known]
        if key == MICRO_BATCH:
            meant = meant[:1]  # PPO also knows the other name, of its generation batch in older scripts
        if value not in (None, AUTO):
            found += [f"--{flag}={value}" for flag in meant]
    for key, (meaning, switches) in SWITCHES.items():
        if _value(content, key) == meaning:
            found += [switch for switch in switches if switch.partition("=")[0] in known]
    return found


def _solve_batch(content: dict[str, Any], argv: Sequence[str], ranks: int) -> None:
    """Put what follows from `train_batch_size` into `content`."""
    train = content.get("train_batch_size")
    sizes = {key: _given(argv, FLAGS[key]) or content.get(key) for key in (MICRO_BATCH, ACCUMULATION)}
    missing = [key for key, value in sizes.items() if value in (None, AUTO)]
    known = [train, *(value for key, value in sizes.items() if key not in missing)]
    if not all(str(value).isdecimal() and int(value) for value in known):
        return  # "auto", or refused where it is read
    if len(missing) == 2:
        sizes[missing.pop()] = content[ACCUMULATION] = 1
    for key in missing:
        other = next(value for value in sizes.values() if value not in (None, AUTO))
        share, rest = divmod(train, int(other) * ranks)
        if rest or not share:
            name = "gradient_accumulation_steps" if key == ACCUMULATION else "micro-batch"
            raise ValueError(
                f"--deepspeed_config: train_batch_size {train} is no multiple of {int(other) * ranks}, which "
                f"{ranks} process(es) make of {other}, so no {name} fits: change it or the number of processes"
            )
        content[key] = share


def _given(argv: Sequence[str], flags: Sequence[str]) -> str | None:
    """The last value that the words of a command line give one of `flags`."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument(*(f"--{flag}" for flag in flags), dest="value")
    return finder.parse_known_args(list(argv))[0].value


def lay_over(config: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """The engine's config that the flags make, with the rest of the file over it.

    A schedule in the file takes the place of the flags' as a whole ("auto" in it is what the flags say). The file's
    other sections are merged key by key; what flags stand for is theirs, since they were read with its values.
    """
    content = read(path)
    merged = _merge(config, content)
    kind = _value(content, "optimizer.type")
    if kind not in (None, AUTO) and kind.lower() not in ADAM and _value(content, "optimizer.params.betas") is None:
        merged["optimizer"]["params"].pop("betas")  # of the flags' own AdamW
    if _value(content, "scheduler.type") not in (None, AUTO):
        merged["scheduler"] = _schedule(content["scheduler"], config)
    for key in (*FLAGS, "bf16.enabled", "fp16.enabled", "hybrid_engine.enabled", *SWITCHES):
        value = _value(config, key)
        if value is not None:
            _set(merged, key, value)
    return merged


def _schedule(section: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The file's schedule, its "auto" values those of the flags."""
    auto = {
        "warmup_max_lr": _value(config, "optimizer.params.lr"),
        "warmup_num_steps": max(1, _value(config, "scheduler.params.num_warmup_steps")),
        "total_num_steps": _value(config, "scheduler.params.num_training_steps"),
    }
    params = section.get("params") or {}
    filled = {key: auto.get(key, value) if value == AUTO else value for key, value in params.items()}
    return {**section, "params": filled}


def _merge(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _merge(merged[key], value)
        elif value != AUTO or key not in merged:
            merged[key] = value
    return merged


def _value(content: dict[str, Any], key: str) -> Any:
    value: Any = content
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _set(content: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for part in parents:
        content = content.setdefault(part, {})
    content[last] = value
