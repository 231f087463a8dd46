"""The beginning and the end that all stages share."""

from __future__ import annotations

import argparse
import logging
from typing import Any

from transformers import set_seed

import engine
from data import StageData
from rlhf.metrics import MetricsWriter, write_run_json
from rlhf.stage_data import report_stream
from rlhf.training import refuse_to_bury

logger = logging.getLogger(__name__)


def start_run(args: argparse.Namespace) -> None:
    """Join the other ranks, seed, and write `run.json`. Collective.

    Raises:
        ValueError: the output folder holds another run's checkpoints; torchrun's environment is incomplete.
    """
    engine.init_distributed()
    set_seed(args.seed)
    refuse_to_bury(args)
    write_run_json(args.output_dir, args, status="running")


def end_run(args: argparse.Namespace, data: StageData, writer: MetricsWriter, *trained: engine.Engine | None) -> None:
    """Account for the data and for updates that were skipped, and say in `run.json` that all is done. Collective; the
    outputs are written before. `trained`: the engines that made the updates."""
    report_stream(data, args)
    for eng in trained:
        if eng is not None and eng.skipped_steps and engine.distributed.is_main():
            logger.warning(
                "%d of %d updates of %s changed nothing: its gradient was not finite, or nothing in the batch trained",
                eng.skipped_steps, eng.global_steps, type(eng.module).__name__,
            )  # fmt: skip
    writer.close()
    write_run_json(args.output_dir, args, status="complete")


def step_figures(
    eng: engine.Engine, *, lr: float, epoch: int, tokens: float, seconds: float, activations: int
) -> dict[str, Any]:
    """What every stage's line of metrics says of an optimizer step. Collective.

    `tokens` of all ranks; `lr` the rate it used; `activations` the most bytes that a micro-batch of this rank kept for
    its backward pass.
    """
    return {
        "lr": lr,
        "grad_norm": eng.get_global_grad_norm(),
        "epoch": epoch,
        "tokens": int(tokens),
        "skipped": eng.skipped_steps,
        "step_seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "activation_bytes": int(engine.distributed.all_reduce_max([activations])[0]),
    }
