"""Starting a stage as processes, and ending it cleanly whatever happens.

``run_stage("sft", argv, nproc=2)`` starts ``python -m stages.sft`` once per process (through torchrun's agent
when there are several) and returns when all ended well. Otherwise ``StageFailed`` says in one line which rank
failed first and why. No process is left behind: the ranks are ended when one of them fails, when the launcher
is interrupted, and by themselves when the launcher dies without a word.

``stage_main`` is the other side: the decorator of a stage's main function. A failing rank writes its cause as
torchrun's agent expects it (the file named in TORCHELASTIC_ERROR_FILE), so that the launcher can tell the
first cause from the failures that followed from it.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rlhf.failure import Failure, describe, first_cause, one_line, report_of
from rlhf.launch_flags import ONE_NODE, Nodes

ROOT = Path(__file__).resolve().parent.parent
GRACE_SECONDS = 10  # between asking a process to end and ending it
LAUNCHER = "RLHF_LAUNCHER_PID"  # in a rank's environment: whom to follow into death
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StageFailed(RuntimeError):
    """A stage did not end well. The message is one line: which stage, which rank, why.

    ``details`` is the failing rank's traceback when the cause was not a plain user error, else empty.
    """

    def __init__(self, message: str, details: str = ""):
        super().__init__(message)
        self.details = details


class Interrupted(BaseException):
    """The launcher was asked to stop (Ctrl-C, kill); ``signum`` says how."""

    def __init__(self, signum: int):
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


def run_stage(
    stage: str, argv: Sequence[str], nproc: int = 1, nodes: Nodes = ONE_NODE, module: str | None = None
) -> None:
    """Run one stage to its end, in ``nproc`` processes on this machine.

    Args:
        stage: ``sft``, ``reward``, ``dpo`` or ``ppo``; names the stage in messages.
        argv: the stage's flags.
        module: the module to run, ``stages.<stage>`` by default.

    Raises:
        StageFailed: with the first cause in one line.
        Interrupted: when a signal asked the launcher to stop; every rank has ended by then.
    """
    command = [sys.executable, "-m", module or f"stages.{stage}", *argv]
    with tempfile.TemporaryDirectory(prefix="rlhf-") as folder, _stage_environment(nproc), _signals_raise():
        alone = nproc == 1 and nodes.count == 1
        if alone:
            failures = _run_single(command, os.path.join(folder, "error.json"))
        else:
            failures = _run_agent(command, nproc, nodes, folder)
    if failures:
        cause = first_cause(failures)
        why = describe(cause).removeprefix("rank 0: ") if alone else describe(cause)
        raise StageFailed(f"stage {stage} failed: {why}", cause.details)


def stage_main(stage: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator of a stage's ``main(argv=None)``: reports failures, follows the launcher, cleans up.

    User errors (a ValueError or OSError of our own) end in one line and exit status 1; anything else shows
    its traceback above that line.
    """

    def decorate(main: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(main)
        def run(argv: Sequence[str] | None = None) -> None:
            launcher = os.environ.get(LAUNCHER)
            if launcher is not None:
                _follow(int(launcher))
            if os.getcwd() not in sys.path:
                sys.path.append(os.getcwd())  # the user's own modules (a judge), after ours
            try:
                main(argv)
            except KeyboardInterrupt:
                _leave(130)
            except Exception as error:  # the process boundary: every failure is told once, in one place
                _tell(stage, error, told_by_launcher=launcher is not None)
                _leave(1)
            _end_process_group()

        return run

    return decorate


# --- the launcher's side


def _run_single(command: list[str], error_file: str) -> list[Failure]:
    environment = {**os.environ, "TORCHELASTIC_ERROR_FILE": error_file}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        code = process.wait()
    finally:
        _end_group(process)
    return [] if code == 0 else [Failure.of(0, code, error_file)]


def _run_agent(command: list[str], nproc: int, nodes: Nodes, folder: str) -> list[Failure]:
    """Several ranks, by the agent that stands behind torchrun."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    alone = nodes.count == 1
    config = LaunchConfig(
        min_nodes=nodes.count,
        max_nodes=nodes.count,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex if alone else "rlhf",
        # Port 0: the system gives a free one.
        rdzv_backend="c10d" if alone else "static",
        rdzv_endpoint="localhost:0" if alone else f"{nodes.address}:{nodes.port}",
        rdzv_configs={} if alone else {"rank": nodes.rank},
        local_addr="localhost" if alone else None,
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=folder),
        # The launcher's own handlers stay in place for these: see _signals_raise.
        signals_to_handle="SIGQUIT",
        shutdown_timeout=GRACE_SECONDS,
    )
    with _quiet_agent():
        try:
            elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            return [Failure.of(rank, f.exitcode, f.error_file) for rank, f in error.failures.items()]
        except SignalException as stop:
            raise Interrupted(stop.sigval) from None
        except (DistError, RendezvousError) as error:
            place = config.rdzv_endpoint
            raise StageFailed(
                f"{nodes.count} machine(s) did not meet at {place}: {one_line(error)}"
            ) from error
    return []


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Turn the first stop signal into ``Interrupted``; the ones that follow wait for the clean-up to end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, _frame: FrameType | None) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(signum)

    # One that is ignored (nohup, a background job) stays ignored.
    before = {each: signal.getsignal(each) for each in SIGNALS if signal.getsignal(each) != signal.SIG_IGN}
    for each in before:
        signal.signal(each, stop)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler or signal.SIG_DFL)


def _end_group(process: subprocess.Popen) -> None:
    """End a process and all it started (it leads its own process group), politely first."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # nobody is left, as it should be


@contextmanager
def _stage_environment(nproc: int) -> Iterator[None]:
    """What a stage's processes inherit. The user's own settings win."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        cores = os.cpu_count() or 1
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores // nproc)),
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # else ranks whose launcher was killed print frames of a broken store
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    }
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # PYTHONSAFEPATH: a folder named `data` where the user stands must not hide ours.
    forced = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", LAUNCHER: str(os.getpid())}
    before = dict(os.environ)
    os.environ.update({**{k: v for k, v in defaults.items() if k not in before}, **forced})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """Silence the agent's own log: what it knows is said once, in the launcher's final line."""
    prefixes = ("torch.distributed.elastic", "torch.distributed.launcher")
    loggers = [logging.getLogger(n) for n in logging.root.manager.loggerDict if n.startswith(prefixes)]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


# --- the rank's side


def _follow(launcher: int) -> None:
    """End this process, and what it started, as soon as the launcher is gone."""

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(0.5)
        _end_own_group()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="follow-launcher").start()


def _end_own_group() -> None:
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)


def _tell(stage: str, error: Exception, told_by_launcher: bool) -> None:
    """Hand the cause to the launcher through its file, or print it where there is no launcher of ours."""
    report = report_of(error)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        Path(path).write_text(json.dumps(report), encoding="utf-8")
    if not told_by_launcher:
        details = report["message"]["extraInfo"]["py_callstack"]
        print(f"{details}error: stage {stage}: {one_line(error)}", file=sys.stderr, flush=True)


def _leave(code: int) -> None:
    """Exit now. With peers, without waiting for anything: they may be gone, and threads may wait for them."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is not None and os.getppid() != int(launcher):
        # the launcher is gone, and a peer that saw it first has closed its connections: what this rank started
        # would be left to nobody
        _end_own_group()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)


def _end_process_group() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
