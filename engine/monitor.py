"""What the engine says about its run: a line every few steps, tensorboard and csv events, the time of each part.

Events are named as DeepSpeed names them, `Train/Samples/{train_loss, lr, loss_scale, elapsed_time_ms_*}`, over the
number of samples trained on. Only the main rank says or writes anything.
"""

from __future__ import annotations

import csv
import logging
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TextIO

import torch

from engine import distributed
from engine.config import EngineConfig, MonitorConfig

logger = logging.getLogger(__name__)

PREFIX = "Train/Samples/"
# Parts of an optimizer step that `wall_clock_breakdown` times.
PARTS = ("forward", "backward", "reduce", "step")


class Monitor:
    """One engine's.

    Args:
        is_trained: a forward-only engine has nothing to say.
        reduces_in_backward: whether gradients are reduced while backward runs, so that "reduce" has no time of
            its own.
    """

    def __init__(self, config: EngineConfig, device: torch.device, is_trained: bool, reduces_in_backward: bool):
        self._config = config
        self._device = device
        self._parts_apart = not reduces_in_backward
        self._every = config.steps_per_print
        self._writers: list[_Tensorboard | _Csv] = []
        is_heard = is_trained and distributed.is_main()
        if is_heard and config.tensorboard.enabled:
            self._writers.append(_Tensorboard(config.tensorboard))
        if is_heard and config.csv_monitor.enabled:
            self._writers.append(_Csv(config.csv_monitor))
        if is_heard and (self._every or config.wall_clock_breakdown):
            _make_heard()
        # decided by the config alone, so that all ranks agree on the sums they exchange
        self.wants_loss = bool(self._every or config.tensorboard.enabled or config.csv_monitor.enabled)
        self._times = config.wall_clock_breakdown
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._printed_at, self._printed_samples = time.perf_counter(), 0

    @contextmanager
    def clock(self, part: str) -> Iterator[None]:
        """Add the time inside to a part of the present optimizer step, when `wall_clock_breakdown` asks for it."""
        if not self._times:
            yield
            return
        self._wait_for_device()
        started = time.perf_counter()
        yield
        self._wait_for_device()
        self._seconds[part] += time.perf_counter() - started

    def resume(self, samples: int) -> None:
        """The run goes on from a checkpoint with that many samples: rates start anew."""
        self._printed_at, self._printed_samples = time.perf_counter(), samples

    def after_step(self, step: int, samples: int, loss: float, lr: float, grad_norm: float, loss_scale: float) -> None:
        """Say what is due after optimizer step number `step`.

        Args:
            samples: trained on so far, over all ranks.
            lr: the rate this step used.
        """
        if not distributed.is_main():
            return
        seconds, self._seconds = self._seconds, dict.fromkeys(PARTS, 0.0)
        if self._writers:
            events = {"lr": lr, "loss_scale": loss_scale}
            if not math.isnan(loss):
                events["train_loss"] = loss
            for writer in self._writers:
                writer.write({**events, **(self._events_of(seconds) if self._times else {})}, samples)
        if self._every and step % self._every == 0:
            now = time.perf_counter()
            rate = (samples - self._printed_samples) / (now - self._printed_at)
            self._printed_at, self._printed_samples = now, samples
            logger.info("step %d: loss %.4f, lr %.3e, grad norm %.3f, %.1f samples/s", step, loss, lr, grad_norm, rate)
        if self._times and step % (self._every or 1) == 0:
            inside = "%.1f ms" % (1000 * seconds["reduce"]) if self._parts_apart else "inside backward"
            logger.info(
                "step %d took: forward %.1f ms, backward %.1f ms, reduce %s, step %.1f ms",
                step,
                1000 * seconds["forward"],
                1000 * seconds["backward"],
                inside,
                1000 * seconds["step"],
            )

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
        self._writers = []

    def _events_of(self, seconds: dict[str, float]) -> dict[str, float]:
        milliseconds = {part: 1000 * value for part, value in seconds.items()}
        events = {
            "forward": milliseconds["forward"],
            "backward": milliseconds["backward"] + milliseconds["reduce"],
            "step": milliseconds["step"],
        }
        if self._parts_apart:
            events |= {"backward_inner": milliseconds["backward"], "backward_allreduce": milliseconds["reduce"]}
        return {f"elapsed_time_ms_{part}": value for part, value in events.items()}

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


@cache
def warn_once(line: str) -> None:
    """On the main rank, a line that several engines would repeat."""
    if distributed.is_main():
        logger.warning(line)


def _make_heard() -> None:
    """Lines that the config asks for must be seen without the caller setting up logging."""
    logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler(sys.stderr))


class _Tensorboard:
    def __init__(self, config: MonitorConfig):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError("tensorboard.enabled is true but tensorboard is not installed: pip install it") from None
        self._writer = SummaryWriter(str(Path(config.output_path) / config.job_name))

    def write(self, events: dict[str, float], samples: int) -> None:
        for name, value in events.items():
            self._writer.add_scalar(PREFIX + name, value, samples)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Csv:
    """One file an event name; an earlier run's files in the folder are gone on with."""

    def __init__(self, config: MonitorConfig):
        self._folder = Path(config.output_path) / config.job_name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, tuple[TextIO, Any]] = {}

    def write(self, events: dict[str, float], samples: int) -> None:
        for name, value in events.items():
            if name not in self._files:
                path = self._folder / f"{(PREFIX + name).replace('/', '_')}.csv"
                is_new = not path.exists()
                file = path.open("a", newline="", encoding="utf-8")
                self._files[name] = (file, csv.writer(file))
                if is_new:
                    self._files[name][1].writerow(["step", name])
            file, writer = self._files[name]
            writer.writerow([samples, value])
            file.flush()

    def close(self) -> None:
        for file, _ in self._files.values():
            file.close()
        self._files = {}
