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
from rlhf.lora import Lora, add_adapters
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


def count_steps(batches_per_epoch: int | None, args: argparse.Namespace) -> int:
    """Optimizer steps of a run: whole accumulation windows over all epochs, at most `--max_steps`. A stream, which
    does not know its epochs (None), runs for `--max_steps`.

    Raises:
        ValueError: there is not one whole step in the data, or a stream without `--max_steps`.
    """
    if batches_per_epoch is None:
        if not args.max_steps:
            raise ValueError("--streaming does not know how many rows there are: say with --max_steps when to stop")
        return args.max_steps
    steps = args.num_train_epochs * batches_per_epoch // args.gradient_accumulation_steps
    if steps == 0:
        raise ValueError(
            f"{args.num_train_epochs} epoch(s) of {batches_per_epoch} micro-batch(es) make no optimizer step with "
            f"--gradient_accumulation_steps {args.gradient_accumulation_steps}: lower it or the batch size"
        )
    return min(steps, args.max_steps) if args.max_steps else steps


def evaluation_interval(batches_per_epoch: int | None, args: argparse.Namespace) -> int:
    """Optimizer steps between evaluations: as asked for, else an epoch; 0, none before the end, for a stream."""
    if args.eval_interval or batches_per_epoch is None:
        return args.eval_interval
    return max(1, batches_per_epoch // args.gradient_accumulation_steps)


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


def is_due(step: int, interval: int) -> bool:
    """True after every `interval`-th step; never for 0."""
    return interval > 0 and step % interval == 0
