"""Progress: plain lines off a terminal, a bar on one, rank 0 only."""

import io

from rich.console import Console

from rlhf import progress
from rlhf.progress import Progress


def console(terminal):
    return Console(file=io.StringIO(), force_terminal=terminal, width=120, soft_wrap=True)


def test_plain_lines_come_at_the_interval_and_at_the_end(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    out = console(False)
    with Progress(40, "SFT", console=out) as bar:
        for step in range(1, 41):
            clock[0] += 1.0
            bar.update(step, loss=1 / 3, lr=1e-3, skipped=0, unknown=None)
    lines = out.file.getvalue().splitlines()
    assert lines[0] == "SFT 10/40  0:00:10  left 0:00:30  loss 0.3333  lr 0.001  skipped 0"
    assert [line.split()[1] for line in lines] == ["10/40", "20/40", "30/40", "40/40"]


def test_a_resumed_run_estimates_from_its_own_steps(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    out = console(False)
    bar = Progress(100, "PPO", start=80, console=out)
    clock[0] = 20.0
    bar.update(90)
    assert "left 0:00:20" in out.file.getvalue()


def test_other_ranks_are_silent(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    out = console(True)
    with Progress(2, "SFT", console=out) as bar:
        bar.update(2, loss=1.0)
        bar.print("hello")
    assert out.file.getvalue() == ""


def test_the_bar_shows_figures_and_prints_lines_as_they_are():
    out = console(True)
    with Progress(2, "SFT", console=out) as bar:
        bar.print("an [odd] line")
        bar.update(2, loss=0.5)
    text = out.file.getvalue()
    assert "an [odd] line" in text and "2/2" in text and "loss 0.5" in text
