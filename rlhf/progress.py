"""Live progress with the time left: a bar on a terminal, else a plain line now and then. Rank 0 only.

with Progress(total_steps, "SFT") as progress:
    for step in range(1, total_steps + 1):
        ...
        progress.update(step, loss=loss, lr=lr)
"""

from __future__ import annotations

import os
import time
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

PLAIN_INTERVAL = 10.0  # seconds between plain lines
UNKNOWN = "-:--:--"


class Progress:
    """Progress of one loop.

    Args:
        total: the number of steps at the end.
        description: what is running, a word or two.
        start: steps already done (a resumed run), so that the time left is estimated from new steps alone.
        console: where to draw; standard output by default.
    """

    def __init__(self, total: int, description: str, *, start: int = 0, console: Console | None = None):
        self.total = total
        self.description = description
        self._start = start
        self._began = time.monotonic()
        self._last_line = self._began
        self._enabled = os.environ.get("RANK", "0") == "0"
        self._console = console or Console(soft_wrap=True)
        self._bar: RichProgress | None = None
        if self._enabled and self._console.is_terminal:
            self._bar = RichProgress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left {task.fields[left]}"),
                TextColumn("{task.fields[shown]}", style="cyan"),
                console=self._console,
            )
            self._task = self._bar.add_task(description, total=total, completed=start, left=UNKNOWN, shown="")
            self._bar.start()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def update(self, step: int, **shown: float | int | str | None) -> None:
        """Say that ``step`` steps are done; ``shown`` are the figures to show beside them."""
        if not self._enabled:
            return
        text = "  ".join(f"{name} {_short(value)}" for name, value in shown.items() if value is not None)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, left=self._left(step), shown=text)
            return
        now = time.monotonic()
        if now - self._last_line >= PLAIN_INTERVAL or step >= self.total:
            self._last_line = now
            elapsed = timedelta(seconds=round(now - self._began))
            line = f"{self.description} {step}/{self.total}  {elapsed}  left {self._left(step)}  {text}"
            self.print(line.rstrip())

    def print(self, line: str) -> None:
        """Print one line without tearing the bar."""
        if self._enabled:
            self._console.print(Text(line))

    def close(self) -> None:
        """Stop drawing; the last state stays on the screen."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _left(self, step: int) -> str:
        done = step - self._start
        if done <= 0:
            return UNKNOWN
        seconds = (time.monotonic() - self._began) / done * max(0, self.total - step)
        return str(timedelta(seconds=round(seconds)))


def _short(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
