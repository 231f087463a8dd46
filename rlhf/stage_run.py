"""The beginning and the end that all stages share."""

from __future__ import annotations

import argparse
from typing import Any

from transformers import set_seed

import engine
from data import StageData
from rlhf.metrics import MetricsWriter, write_run_json
from rlhf.stage_data import report_stream
from rlhf.training import refuse_to_bury


def start_run(args: argparse.Namespace) -> None:
    """Join the other ranks, seed, and write `run.json`. Collective.

    Raises:
        ValueError: the output folder holds another run's checkpoints; torchrun's environment is incomplete.
    """
    engine.init_distributed()
    set_seed(args.seed)
    refuse_to_bury(args)
    write_run_json(args.output_dir, args, status="running")


def end_run(args: argparse.Namespace, data: StageData, writer: MetricsWriter) -> None:
    """Account for the data and say in `run.json` that all is done. Collective; the outputs are written before."""
    report_stream(data, args)
    writer.close()
    write_run_json(args.output_dir, args, status="complete")


def step_figures(eng: engine.Engine, *, lr: float, epoch: int, tokens: float, seconds: float) -> dict[str, Any]:
    """What every stage's line of metrics says of an optimizer step: `tokens` of all ranks, `lr` the rate it used."""
    return {
        "lr": lr,
        "grad_norm": eng.get_global_grad_norm(),
        "epoch": epoch,
        "tokens": int(tokens),
        "skipped": eng.skipped_steps,
        "step_seconds": seconds,
        "tokens_per_second": tokens / seconds,
    }
