"""What a run writes about itself: metrics.jsonl, run.json, data_report.json, TensorBoard events.

Only rank 0 writes; every rank may call. Means are of sums over all ranks, never of means.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from engine import distributed
from rlhf.arguments import resolve_dtype
from rlhf.pipeline_state import content_hashes
from rlhf.results import read_lines

METRICS_FILE, RUN_FILE, REPORT_FILE = "metrics.jsonl", "run.json", "data_report.json"
LIBRARIES = ("torch", "transformers", "tokenizers", "datasets", "accelerate", "peft", "safetensors", "sentencepiece")


class MetricsWriter:
    """Appends one JSON line a call to `metrics.jsonl`, flushed at once, and the same figures to TensorBoard.

    A run that starts at `start_step` keeps the lines of an earlier one up to that step and drops those beyond
    (they are about to be written again); a fresh run, at 0, starts an empty file. A figure that is not finite
    is written as null.
    """

    def __init__(self, output_dir: str | Path, stage: str, args: argparse.Namespace | None = None, start_step: int = 0):
        self.stage = stage
        self._file = self._board = None
        if not distributed.is_main():
            return
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / METRICS_FILE
        kept = [line for line in read_lines(path) if line["step"] <= start_step] if start_step else []
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(temporary, path)
        self._file = path.open("a", encoding="utf-8")
        if getattr(args, "enable_tensorboard", False):
            from torch.utils.tensorboard import SummaryWriter  # takes a second to import

            events = getattr(args, "tensorboard_path", None) or folder / "tensorboard"
            self._board = SummaryWriter(str(events), purge_step=start_step + 1 if start_step else None)

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """The line of optimizer step `step`; `stage` and `step` are added."""
        self._write({"stage": self.stage, "step": step, **metrics}, f"{self.stage}/")

    def log_eval(self, step: int, metrics: dict[str, Any]) -> None:
        """An evaluation's line, marked `"eval": true`; nothing for an evaluation without figures."""
        if metrics:
            self._write({"stage": self.stage, "step": step, "eval": True, **metrics}, f"{self.stage}/eval_")

    def _write(self, line: dict[str, Any], prefix: str) -> None:
        if self._file is None:
            return
        line = {key: json_value(value) for key, value in line.items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        if self._board is not None:
            for key, value in line.items():
                if key not in ("stage", "step", "eval") and isinstance(value, int | float):
                    self._board.add_scalar(prefix + key, value, line["step"])
            self._board.flush()

    def log_texts(self, step: int, name: str, texts: list[str]) -> None:
        """Texts to look at in TensorBoard; nothing without it."""
        if self._board is not None and texts:
            # indented four spaces, Markdown shows them as they are
            blocks = ("\n".join(f"    {line}" for line in text.splitlines()) for text in texts)
            self._board.add_text(f"{self.stage}/{name}", "\n\n---\n\n".join(blocks), step)
            self._board.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._board is not None:
            self._board.close()
            self._board = None


def json_value(value: Any) -> Any:
    """What JSON can hold: tensors and paths as plain values, numbers that are not finite as None."""
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [json_value(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)


class MetricAccumulator:
    """Sums and counts of one step, added up over micro-batches, then over ranks in one collective.

    A mean is a sum over a count, both over everything the step saw, so it does not depend on how the batch was
    cut. Ranks must have added the same names before `reduce`.
    """

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}
        self._peaks: dict[str, float] = {}

    def add(self, name: str, total: float | torch.Tensor, count: float) -> None:
        """`total` is the sum over `count` units (tokens, answers, pairs)."""
        entry = self._sums.setdefault(name, [0.0, 0.0])
        entry[0] += float(total)
        entry[1] += float(count)

    def add_mean(self, name: str, mean: float | torch.Tensor, count: float) -> None:
        """As `add`, where what is known is the mean over the units."""
        self.add(name, float(mean) * count, count)

    def add_max(self, name: str, value: float | torch.Tensor) -> None:
        self._peaks[name] = max(self._peaks.get(name, -math.inf), float(value))

    def reduce(self) -> dict[str, float]:
        """Means and maxima over all ranks since the last call (0 for a mean over nothing); starts anew."""
        sums, peaks = self._sums, self._peaks
        self._sums, self._peaks = {}, {}
        flat = distributed.all_reduce_sums([value for entry in sums.values() for value in entry])
        means = {name: flat[2 * i] / flat[2 * i + 1] if flat[2 * i + 1] else 0.0 for i, name in enumerate(sums)}
        if peaks:
            means |= dict(zip(peaks, distributed.all_reduce_max(peaks.values()), strict=True))
        return means


def write_run_json(output_dir: str | Path, args: argparse.Namespace | dict[str, Any], status: str) -> None:
    """Write `run.json`: status ("running", "complete" ...), resolved arguments, versions, device and type. Rank 0.

    Replaced in one move, so that a reader never sees half of it; `started` stays from the first call of a run.
    """
    if not distributed.is_main():
        return
    path, arguments = Path(output_dir) / RUN_FILE, dict(args) if isinstance(args, dict) else vars(args)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    started = now
    if status != "running" and path.exists():
        started = json.loads(path.read_text(encoding="utf-8")).get("started", now)
    write_json(
        path,
        {
            "status": status,
            "started": started,
            "updated": now,
            "arguments": arguments,
            "file_hashes": content_hashes(arguments),
            "versions": {"python": platform.python_version(), **_versions()},
            "device": _device(),
            "dtype": None if (name := arguments.get("dtype")) is None else compute_type(name),
            "world_size": distributed.world_size(),
            "command": sys.argv,
        },
    )


def write_data_report(output_dir: str | Path, report: dict[str, Any]) -> None:
    """Write `data_report.json`: what each source gave and what was dropped, by reason. Rank 0."""
    if distributed.is_main():
        write_json(Path(output_dir) / REPORT_FILE, report)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file through a temporary one beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    text = json.dumps(json_value(content), indent=2, ensure_ascii=False, allow_nan=False)
    temporary.write_text(text + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def compute_type(name: str) -> str:
    """What `--dtype NAME` comes to on this rank's device: fp32, bf16 or fp16."""
    device = distributed.device()
    return resolve_dtype(name, device.type, device.type == "cuda" and torch.cuda.is_bf16_supported())[0]


def _device() -> str:
    device = distributed.device()
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({torch.get_num_threads()} threads)"
