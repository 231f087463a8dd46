"""Every worked example and every command of the README, run dry: the scripts by bash, their stages in this process.

The README's Python runs as it stands.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf import cli
from rlhf.arguments import STAGE_PARSERS
from tests.rlhf import tiny_models
from tests.rlhf.test_cli import readme_commands
from tests.stages.kit import write_rows

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(path.relative_to(ROOT) for path in (ROOT / "scripts").glob("*/*/*.sh"))
PLACES = {"single_gpu": 1, "single_node": 8, "multi_node": 64}
# Of the actor with its adapters.
ACTORS = {
    "opt/single_gpu/run_1.3b": "1.43 B",
    "opt/single_node/run_1.3b": "1.32 B",
    "opt/single_node/run_13b": "13.3 B",
    "opt/multi_node/run_66b": "67.1 B",
    "llama2/single_node/run_7b": "6.9 B",
    "qwen3/single_gpu/run_4b": "4.15 B",
}
DEVICE_GIB = 80
# Stands for Python: notes the command, words apart from each other.
FAKE_PYTHON = """#!/usr/bin/env bash
printf '%s\\0' "$@" >> "$CALLS"; printf '\\n' >> "$CALLS"
"""


@pytest.fixture
def bash(tmp_path):
    """`bash(script, *flags, **environment)` returns the `rlhf` commands that the script would run, as words."""
    (tmp_path / "env" / "bin").mkdir(parents=True)
    python = tmp_path / "env" / "bin" / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    calls = tmp_path / "calls"

    def run(*command, **environment):
        calls.write_text("")
        variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CALLS": str(calls), "VIRTUAL_ENV": str(tmp_path / "env")}
        done = subprocess.run(
            ["bash", *command], cwd=tmp_path, env={**variables, **environment}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        words = [line.split("\0")[:-1] for line in calls.read_text().splitlines()]
        return [line[2:] for line in words if line[:2] == ["-m", "rlhf"]]

    return run


def test_the_examples_that_were_promised_are_there():
    assert {str(path.relative_to("scripts")).removesuffix(".sh") for path in SCRIPTS} == ACTORS.keys()
    for path in SCRIPTS:
        commands = [line for line in (ROOT / path).read_text().splitlines() if line.startswith("stage ")]
        assert [line.split()[1] for line in commands] == ["sft", "reward", "ppo"]


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_a_worked_example_runs_dry(script, bash, capsys):
    commands = bash(str(ROOT / script), "--dry_run", HF_HUB_OFFLINE="1")
    assert [words[0] for words in commands] == ["sft", "reward", "ppo"]
    ranks = PLACES[script.parts[2]]
    for words in commands:
        cli.main(words)
        told = capsys.readouterr().out
        assert f"on {ranks} process" in told
        (device,) = re.findall(r"all models on the device: ([\d.]+) GiB", told)
        assert float(device) < DEVICE_GIB
    assert re.search(rf"actor +{ACTORS[str(script.relative_to('scripts')).removesuffix('.sh')]} ", told)


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_a_real_run_takes_the_earlier_stages_folders(script, bash):
    sft, reward, ppo = bash(str(ROOT / script), "--max_steps", "3", OUT="my run")
    assert sft[sft.index("--output_dir") + 1] == "my run/sft"
    assert ppo[ppo.index("--actor_model_name_or_path") + 1] == "my run/sft"
    assert ppo[ppo.index("--critic_model_name_or_path") + 1] == "my run/reward"
    assert all(words[-2:] == ["--max_steps", "3"] for words in (sft, reward, ppo))


def test_slurm_starts_one_launcher_a_node(bash, tmp_path):
    for name, text in {
        "scontrol": "printf 'node7\\nnode8\\n'",
        "srun": '[ "$3" = 9 ] || exit 1; shift 3; for node in 0 1; do SLURM_NODEID=$node "$@"; done',
    }.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script = str(ROOT / "scripts/opt/multi_node/run_66b.sh")
    slurm = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "41", "SLURM_CPUS_PER_TASK": "9"}
    commands = bash(str(ROOT / "scripts/slurm.sbatch"), script, "--dry_run", **slurm)
    assert len(commands) == 6
    for node, words in ((0, commands[0]), (1, commands[3])):
        where = words[words.index("--nproc") :]
        expected = f"--nproc 8 --nnodes 2 --node_rank {node} --master_addr node7 --master_port 20041 --dry_run"
        assert where == expected.split()


def test_the_readmes_commands_run_dry(tmp_path, monkeypatch, capsys):
    """Those that train: with data and models of the names that the README uses."""
    for name in ("dialogues.jsonl", "more.jsonl"):
        write_rows(tmp_path / name)
    for name in ("out/sft", "out/reward", "FOLDER_OR_HUB_NAME"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(tiny_models.folder())
    monkeypatch.chdir(tmp_path)
    ran = set()
    for command, *flags in readme_commands():
        if command in (*STAGE_PARSERS, "run"):
            cli.main([command, *flags, *([] if "--dry_run" in flags else ["--dry_run"])])
            assert "memory of a process" in capsys.readouterr().out, shlex.join([command, *flags])
            ran.add(command)
    assert ran == {*STAGE_PARSERS, "run"}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "FOLDER_OR_HUB_NAME", "dialogues.jsonl", "more.jsonl", "out",
    ]  # fmt: skip


def test_the_readmes_python_runs(tmp_path, monkeypatch, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/sft").symlink_to(tiny_models.folder())
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) == 1
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.count("tensor(") == 6
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in ("out/sft", "out/mine"))
    assert not torch.equal(before.lm_head.weight, after.lm_head.weight)
