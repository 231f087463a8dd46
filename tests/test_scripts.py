"""The shell scripts: set up once, again when the requirements change, and start the right command anywhere."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Stands for Python: notes how it was called, and makes the environment it is asked for.
FAKE_PYTHON = """#!/usr/bin/env bash
echo "$(basename "$0")|$PWD|$PYTHONPATH|$*" >> "$CALLS"
if [ "$1 $2" = "-m venv" ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; fi
"""


@pytest.fixture
def clone(tmp_path):
    """A clone's scripts, a fake ``python3.11`` on the path, and ``run(script, *flags, **environment)``."""
    repo, tools, elsewhere = tmp_path / "a clone", tmp_path / "tools", tmp_path / "elsewhere"
    shutil.copytree(ROOT / "scripts", repo / "scripts")
    shutil.copytree(ROOT / ".ci", repo / ".ci")
    (repo / "requirements.txt").write_text("torch\n")
    tools.mkdir()
    elsewhere.mkdir()
    fake(tools / "python3.11")
    calls = tmp_path / "calls"

    def run(script, *flags, **environment):
        calls.write_text("")
        variables = {
            "PATH": f"{tools}:/usr/bin:/bin",
            "CALLS": str(calls),
            "HOME": os.environ.get("HOME", "/"),
        }
        command = ["bash", str(repo / script), *flags]
        done = subprocess.run(
            command, cwd=elsewhere, env={**variables, **environment}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return [line.split("|") for line in calls.read_text().splitlines()]

    run.repo, run.elsewhere = repo, elsewhere
    return run


def fake(path):
    path.write_text(FAKE_PYTHON)
    path.chmod(0o755)


def commands(calls):
    return [words for *_, words in calls]


def test_a_fresh_clone_is_set_up_once(clone):
    repo = clone.repo
    calls = commands(clone("scripts/rlhf.sh", "--seed", "7"))
    assert calls[1] == f"-m venv {repo}/.venv" and calls[2].startswith("-m pip install")
    assert calls[2].endswith(f"-r {repo}/requirements.txt") and calls[3:] == ["-m rlhf run --seed 7"]
    assert commands(clone("scripts/rlhf.sh")) == ["-m rlhf run"]
    (repo / "requirements.txt").write_text("torch\nnumpy\n")
    assert [words[:14] for words in commands(clone("scripts/rlhf.sh"))] == ["-m pip install", "-m rlhf run"]


def test_an_active_environment_is_used(clone, tmp_path):
    (tmp_path / "mine" / "bin").mkdir(parents=True)
    fake(tmp_path / "mine" / "bin" / "python")
    calls = commands(clone("scripts/sft.sh", VIRTUAL_ENV=str(tmp_path / "mine")))
    assert [words[:14] for words in calls] == ["-m pip install", "-m rlhf sft"]
    assert not (clone.repo / ".venv").exists()


@pytest.mark.parametrize("stage", ["sft", "reward", "dpo", "ppo"])
def test_a_stage_runs_where_the_user_stands_with_our_packages(clone, stage):
    name, folder, path, words = clone(f"scripts/{stage}.sh", "--data_path", "a b.jsonl")[-1]
    assert (name, folder, path) == ("python", str(clone.elsewhere), str(clone.repo))
    assert words == f"-m rlhf {stage} --data_path a b.jsonl"


@pytest.mark.parametrize("script", ["scripts/test.sh", ".ci/run"])
def test_the_tests_run_in_the_clone(clone, script):
    calls = clone(script)
    assert commands(calls)[-2:] == ["-m ruff check .", "-m pytest"]
    assert calls[-1][1] == str(clone.repo)


def test_an_install_that_fails_is_tried_again(clone):
    python = clone.repo / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/usr/bin/env bash\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(AssertionError):
        clone("scripts/rlhf.sh")
    fake(python)
    assert len(commands(clone("scripts/rlhf.sh"))) == 2
