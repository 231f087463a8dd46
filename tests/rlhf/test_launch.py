"""The launcher: causes in one line, and no process left behind, one process and two."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf import launch_flags
from rlhf.failure import Failure, describe, first_cause, is_user_error, one_line
from rlhf.launch import Interrupted, StageFailed, run_stage
from rlhf.launch_flags import ONE_NODE, Nodes, default_nproc, take_launch_flags

FAKE = "tests.rlhf.fake_stage"
ROOT = Path(__file__).resolve().parents[2]


def argv(tmp_path):
    return ["--model_name_or_path", "m", "--output_dir", str(tmp_path / "sft")]


def gone(pid):
    state = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True
    ).stdout.strip()
    return not state or state.startswith("Z")


def pids(tmp_path):
    return {path.name: int(path.read_text()) for path in (tmp_path / "sft").glob("pid-*")}


def wait_for(condition, what):
    deadline = time.monotonic() + 120  # starting torch thrice on a busy machine takes its time
    while not condition():
        assert time.monotonic() < deadline, f"still waiting for {what}"
        time.sleep(0.1)


def failure_of(tmp_path, monkeypatch, mode, nproc):
    monkeypatch.setenv("FAKE_MODE", f"{mode}:sft")
    with pytest.raises(StageFailed) as failed:
        run_stage("sft", argv(tmp_path), nproc, module=FAKE)
    assert len(pids(tmp_path)) == nproc and all(gone(pid) for pid in pids(tmp_path).values())
    assert "\n" not in str(failed.value)
    return failed.value


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_stage_that_ends_well(tmp_path, nproc):
    before = dict(os.environ)
    run_stage("sft", argv(tmp_path), nproc, module=FAKE)
    assert (tmp_path / "sft" / "run.json").exists()
    assert dict(os.environ) == before


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_killed_rank_is_named(tmp_path, monkeypatch, nproc):
    failure = failure_of(tmp_path, monkeypatch, "kill", nproc)
    words = f"stage sft failed: rank {nproc - 1} was killed by signal 9 (SIGKILL); the system does this when"
    assert str(failure).startswith(words) and failure.details == ""


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_users_error_is_one_line_of_its_rank(tmp_path, monkeypatch, nproc):
    failure = failure_of(tmp_path, monkeypatch, "user", nproc)
    rank = "rank 1: " if nproc == 2 else ""  # one process alone needs no number
    assert str(failure).startswith(f"stage sft failed: {rank}no folder ")
    assert failure.details == ""


def test_a_bug_keeps_its_traceback(tmp_path, monkeypatch, capfd):
    failure = failure_of(tmp_path, monkeypatch, "bug", 1)
    assert str(failure) == "stage sft failed: ValueError: raised outside of our packages"
    assert "in fail\n" in failure.details
    assert capfd.readouterr().err == ""  # the launcher tells it, once


def test_a_silent_exit_is_named(tmp_path, monkeypatch):
    assert "rank 0 ended with exit status 3" in str(failure_of(tmp_path, monkeypatch, "exit", 1))


LAUNCHER = f"""
import sys
from rlhf.launch import Interrupted, run_stage
try:
    run_stage("sft", sys.argv[2:], int(sys.argv[1]), module={FAKE!r})
except Interrupted as stop:
    sys.exit(128 + stop.signum)
"""


def heed_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGKILL"])
def test_nobody_is_left_when_the_launcher_is_stopped(tmp_path, nproc, name):
    signum = getattr(signal, name)
    environment = {**os.environ, "FAKE_MODE": "hang", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LAUNCHER, str(nproc), *argv(tmp_path)]
    # A shell's background job hands SIGINT down ignored, and an ignored signal stays so (by design): not here.
    launcher = subprocess.Popen(command, env=environment, preexec_fn=heed_interrupts)
    try:
        wait_for(lambda: len(pids(tmp_path)) == nproc + 1, "the ranks and a child of rank 0")
        wait_for(lambda: all((tmp_path / "sft" / n).read_text() for n in pids(tmp_path)), "their numbers")
        launcher.send_signal(signum)
        launcher.wait(60)
    finally:
        launcher.kill()
    assert launcher.returncode == (-signum if name == "SIGKILL" else 128 + signum)
    for pid in pids(tmp_path).values():
        wait_for(lambda pid=pid: gone(pid), f"process {pid} to end")


def test_a_stage_without_a_launcher_prints_its_own_error(tmp_path):
    environment = {**os.environ, "FAKE_MODE": "user:sft", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", FAKE, *argv(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: stage fake: no folder ") and done.stderr.count("\n") == 1


def test_a_folder_named_data_where_the_user_stands_does_not_hide_ours(tmp_path, monkeypatch):
    for name in ("data", "rlhf", "engine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path)
    run_stage("sft", argv(tmp_path), module=FAKE)
    assert (tmp_path / "sft" / "run.json").exists()


def test_two_machines_meet(tmp_path):
    """Two launchers of one process each, as on two machines."""
    from tests.helpers import free_port

    port = free_port()
    code = LAUNCHER.replace("int(sys.argv[1])", f"1, Nodes(2, int(sys.argv[1]), '127.0.0.1', {port})")
    code = code.replace("run_stage\n", "run_stage\nfrom rlhf.launch_flags import Nodes\n", 1)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    launchers = [
        subprocess.Popen([sys.executable, "-c", code, str(node), *argv(tmp_path)], env=environment)
        for node in (0, 1)
    ]
    try:
        assert [launcher.wait(120) for launcher in launchers] == [0, 0]
    finally:
        for launcher in launchers:
            launcher.kill()
    assert sorted(pids(tmp_path)) == ["pid-0", "pid-1"]


def test_the_first_cause_is_not_what_followed_from_it():
    peer = Failure(0, 1, "RuntimeError: Connection closed by peer [127.0.0.1]:1", "…", when=5.0)
    killed, ended = Failure(1, -9), Failure(2, -15)
    user, later = Failure(3, 1, "bad value", when=7.0), Failure(4, 1, "worse value", when=8.0)
    assert first_cause([peer, killed, ended]) is killed
    assert first_cause([peer, later, user, ended]) is user
    assert first_cause([peer, Failure(5, 3), ended]).code == 3
    assert first_cause([ended, peer]) is peer
    assert describe(Failure(0, -11)) == "rank 0 was killed by signal 11 (SIGSEGV)"


def test_errors_in_one_line():
    assert one_line(ValueError("a\n  b")) == "a b"
    assert one_line(KeyError("x")) == "KeyError: 'x'"
    assert one_line(MemoryError()).startswith("out of memory: lower the batch size")
    assert len(one_line(ValueError("x" * 5000))) == 600
    assert is_user_error(OSError(28, "No space left on device")) and not is_user_error(RuntimeError("x"))


def test_launch_flags_are_taken_out(monkeypatch):
    monkeypatch.setenv("NPROC", "3")
    assert take_launch_flags(["--seed", "1", "--nproc", "2"]) == (2, ONE_NODE, ["--seed", "1"])
    assert take_launch_flags(["--nnodes", "2", "--node-rank=1"])[1].rank == 1
    nproc, nodes, rest = take_launch_flags(
        ["--nnodes", "2", "--node_rank", "1", "--master_addr", "h", "--lr", "3"]
    )
    assert (nproc, nodes, rest) == (3, Nodes(2, 1, "h", 29500), ["--lr", "3"])
    with pytest.raises(ValueError, match="--node_rank 2 of --nnodes 2"):
        take_launch_flags(["--nnodes", "2", "--node_rank", "2"])


def test_the_default_number_of_processes(monkeypatch):
    monkeypatch.delenv("NPROC", raising=False)
    monkeypatch.setattr(launch_flags.Path, "exists", lambda self: False)
    assert default_nproc() == 1
    monkeypatch.setenv("NPROC", "two")
    with pytest.raises(ValueError, match="NPROC is the number of processes, at least 1, got 'two'"):
        default_nproc()


def test_interrupted_tells_how():
    assert str(Interrupted(signal.SIGTERM)) == "stopped by SIGTERM"
