"""What the three stages share around their loops: engine configs, the stream of batches, checkpoints."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import engine
from data import BatchSampler
from engine.optimizers import parameter_groups
from rlhf.deepspeed_config import lay_over
from rlhf.lora import Lora, add_adapters, lora_of
from rlhf.metrics import compute_type
from rlhf.model_files import resolve

logger = logging.getLogger(__name__)

ADAM_BETAS = (0.9, 0.95)


def train_config(
    args: argparse.Namespace,
    *,
    zero_stage: int,
    micro_batch: int,
    learning_rate: float,
    weight_decay: float,
    total_steps: int,
    hybrid_engine: dict | None = None,
    offload: bool | None = None,
) -> dict[str, Any]:
    """The engine's config of a model that trains: AdamW, the asked-for schedule, clipping at norm 1.

    `total_steps` counts optimizer steps: the schedule ends with the run. `offload`: as `--offload` says without.
    """
    config = {
        **_common(args, zero_stage, micro_batch, args.offload if offload is None else offload),
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": learning_rate, "betas": list(ADAM_BETAS), "weight_decay": weight_decay},
        },
        "scheduler": {
            "type": args.lr_scheduler_type,
            "params": {"num_warmup_steps": args.num_warmup_steps, "num_training_steps": max(1, total_steps)},
        },
        "gradient_clipping": 1.0,
        "hybrid_engine": hybrid_engine or {"enabled": False},
    }
    return lay_over(config, args.deepspeed_config) if args.deepspeed_config else config


def stage_config(args: argparse.Namespace, total_steps: int) -> dict[str, Any]:
    """The config of the one model that SFT, the reward stage or DPO trains."""
    return train_config(
        args,
        zero_stage=args.zero_stage,
        micro_batch=args.per_device_train_batch_size,
        learning_rate=args.learning_rate,
        weight_decay=args.weight_decay,
        total_steps=total_steps,
    )


def stage_engine(
    module: torch.nn.Module, args: argparse.Namespace, *, path: str | Path, total_steps: int
) -> engine.Engine:
    """The engine of that model, which came from `path`."""
    return training_engine(
        module,
        stage_config(args, total_steps),
        path=path,
        gradient_checkpointing=args.gradient_checkpointing,
        lora=lora_of(args),
    )


def inference_config(
    args: argparse.Namespace, *, zero_stage: int, micro_batch: int, offload: bool = False
) -> dict[str, Any]:
    """The engine's config of a model that only runs (reference, reward).

    It is sharded if its trained twin is in stage 3, or when its parameters are to rest in CPU memory.
    """
    return _common(args, 3 if zero_stage == 3 or offload else 0, micro_batch, offload)


def _common(args: argparse.Namespace, zero_stage: int, micro_batch: int, offload: bool) -> dict[str, Any]:
    dtype = compute_type(args.dtype)
    zero: dict[str, Any] = {"stage": zero_stage}
    if offload:
        zero["offload_param"] = zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "bf16": {"enabled": dtype == "bf16"},
        "fp16": {"enabled": dtype == "fp16", "loss_scale_window": 100},
        "zero_optimization": zero,
    }


def training_engine(
    module: torch.nn.Module,
    config: dict[str, Any],
    *,
    path: str | Path,
    gradient_checkpointing: bool = False,
    lora: Lora | None = None,
) -> engine.Engine:
    """The engine that trains `module`, which came from `path`: under adapters where asked, with a rate of their own."""
    groups = None
    if lora is not None:
        add_adapters(module, lora, resolve(path))
        groups = parameter_groups(module, config["optimizer"]["params"]["weight_decay"], lora.learning_rate)
        schedule = config["scheduler"]["params"]
        if isinstance(schedule.get("warmup_max_lr"), float):  # a schedule of DeepSpeed's sets the rates itself
            rates = [group.get("lr", schedule["warmup_max_lr"]) for group in groups]
            config = {**config, "scheduler": {**config["scheduler"], "params": {**schedule, "warmup_max_lr": rates}}}
    if gradient_checkpointing:
        module.activation_checkpointing_enable()
    return engine.initialize(module, config, model_parameters=groups)


def sampler_for(
    items: Any, batch_size: int, seed: int, *, shuffle: bool = True, drop_last: bool = True, lengths: Any = None
) -> BatchSampler:
    """This rank's share of `items`, `batch_size` at a time; by `lengths`, rows of like length together."""
    return BatchSampler(
        len(items),
        batch_size,
        rank=engine.distributed.rank(),
        world_size=engine.distributed.world_size(),
        seed=seed,
        shuffle=shuffle,
        drop_last=drop_last,
        lengths=lengths,
    )


def batch_stream(sampler: BatchSampler, start: int = 0) -> Iterator[tuple[int, list[int]]]:
    """Endless (epoch, indices) from micro-batch number `start` on: a resumed run goes on where it stopped."""
    epoch, batch = divmod(start, len(sampler))
    while True:
        for indices in sampler.iter(epoch, start_batch=batch):
            yield epoch, indices
        epoch, batch = epoch + 1, 0


def to_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def checkpoint_folder(args: argparse.Namespace, name: str = "") -> Path:
    return Path(args.output_dir) / "checkpoints" / name


def refuse_to_bury(args: argparse.Namespace) -> None:
    """A run from the beginning beside an earlier one's checkpoints: a later --resume would take up the wrong one.

    Raises:
        ValueError: there are checkpoints and `--resume` was not given.
    """
    folder = checkpoint_folder(args)
    if not args.resume and any(folder.rglob("latest")):
        raise ValueError(
            f"{folder} holds checkpoints of an earlier run: go on from them with --resume, remove them, or give "
            "another --output_dir"
        )


def save_model(eng: engine.Engine, tokenizer: Any, folder: Path | str, **options: Any) -> None:
    """A Hugging Face folder of model and tokenizer, complete for every rank when this returns. Collective."""
    eng.save_pretrained(folder, **options)
    if engine.distributed.is_main():
        tokenizer.save_pretrained(folder)
    engine.distributed.barrier()
