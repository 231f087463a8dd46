"""What went wrong, in one line: how a rank reports an exception, and which of several failures came first."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OWN_PACKAGES = ("engine", "data", "rlhf", "stages")
PEER_GONE = ("closed by peer", "reset by peer", "remote process exited")  # how gloo and NCCL say it
LONGEST_LINE = 600  # characters
MEMORY_ADVICE = "lower the batch size or the sequence lengths, or raise the ZeRO stage"


@dataclass(frozen=True)
class Failure:
    """How one rank ended.

    Args:
        rank: its number in the whole run.
        code: exit status; minus the signal's number when a signal ended it.
        message: what the rank itself said, or None when it could not.
        details: its traceback when the cause is not a plain user error, else empty.
        when: seconds since the epoch of the report, infinite without one.
    """

    rank: int
    code: int
    message: str | None = None
    details: str = ""
    when: float = float("inf")

    @staticmethod
    def of(rank: int, code: int, error_file: str) -> Failure:
        """Read the rank's own report, if it left one."""
        if not os.path.isfile(error_file):
            return Failure(rank, code)
        report = json.loads(Path(error_file).read_text(encoding="utf-8"))["message"]
        extra = report["extraInfo"]
        return Failure(rank, code, report["message"], extra["py_callstack"], extra["precise_time"])


def first_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that the others followed from.

    A rank that dies takes the others down: their talk with it breaks off, or the launcher ends them (SIGTERM).
    So a rank killed by any other signal comes first, then the earliest report, then a silent exit, and what
    others saw of it last.
    """

    def order(failure: Failure) -> tuple[int, float, int]:
        if failure.code < 0 and failure.code != -signal.SIGTERM:
            kind = 0
        elif failure.message is not None and not any(words in failure.message for words in PEER_GONE):
            kind = 1
        elif failure.message is None and failure.code > 0:
            kind = 2
        else:
            kind = 3
        return kind, failure.when, failure.rank

    return min(failures, key=order)


def describe(failure: Failure) -> str:
    """One line about a failure, with what to change where that is known."""
    who = f"rank {failure.rank}"
    if failure.message is not None:
        return f"{who}: {failure.message}"
    if failure.code < 0:
        try:
            name = signal.Signals(-failure.code).name
        except ValueError:
            name = "an unknown signal"
        line = f"{who} was killed by signal {-failure.code} ({name})"
        if -failure.code == signal.SIGKILL:
            line += f"; the system does this when memory runs out: if so, {MEMORY_ADVICE}"
        return line
    return f"{who} ended with exit status {failure.code}; its own output above says why"


def report_of(error: BaseException) -> dict:
    """A report in the form torchrun's agent reads: message, time, traceback (empty for a user error)."""
    now = time.time()
    details = "" if is_user_error(error) else "".join(traceback.format_exception(error))
    extra = {"py_callstack": details, "timestamp": str(int(now)), "precise_time": now}
    return {"message": {"message": one_line(error), "extraInfo": extra}}


def one_line(error: BaseException) -> str:
    """The error's text in one line, led by its type unless it was written for the user."""
    text = " ".join(str(error).split())
    if is_out_of_memory(error):
        text = f"out of memory: {MEMORY_ADVICE} ({text})"
    elif not is_user_error(error) or not text:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= LONGEST_LINE else text[: LONGEST_LINE - 1] + "…"


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def is_user_error(error: BaseException) -> bool:
    """Whether the message alone tells the user what to change: no traceback is needed.

    These are the values and files that our own code refuses, and a full disk or memory; the same types from
    inside a library are faults whose place matters.
    """
    if is_out_of_memory(error) or (isinstance(error, OSError) and error.errno == errno.ENOSPC):
        return True
    if not isinstance(error, (ValueError, OSError)) or isinstance(error, UnicodeError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return True
    raised_in = Path(frames[-1].filename)
    return raised_in.is_relative_to(ROOT) and raised_in.relative_to(ROOT).parts[0] in OWN_PACKAGES
