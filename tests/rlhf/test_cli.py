"""The ``rlhf`` command: which command runs, and how each kind of failure ends."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf import chat, cli, pipeline
from rlhf.arguments import STAGE_PARSERS, parse
from rlhf.eval_flags import prompt_eval_parser, reward_eval_parser
from rlhf.launch import Interrupted, StageFailed
from rlhf.launch_flags import take_launch_flags

ROOT = Path(__file__).resolve().parents[2]


def ending(capsys, argv):
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    out = capsys.readouterr()
    return stop.value.code, out.out, out.err


def test_help_lists_the_commands(capsys):
    for argv in ([], ["--help"], ["help"]):
        cli.main(argv)
        out = capsys.readouterr().out
        assert all(f"\n  {command} " in out for command in cli.COMMANDS)


@pytest.mark.parametrize("command", [*cli.COMMANDS])
def test_every_command_has_help(capsys, command):
    status, out, _ = ending(capsys, [command, "--help"])
    assert status == 0 and out.startswith(f"usage: rlhf {command}")


def test_a_misspelt_command_offers_the_nearest(capsys):
    status, out, err = ending(capsys, ["rewrd"])
    assert (status, out) == (2, "")
    assert err == "error: rlhf: unknown command rewrd; did you mean reward? (rlhf --help lists them all)\n"


def test_a_stage_is_started_with_its_own_flags(monkeypatch):
    started = []
    monkeypatch.setattr(cli, "run_stage", lambda *args: started.append(args))
    cli.main(["sft", "--nproc", "2", "--model_name_or_path", "m", "--output_dir", "o"])
    stage, argv, nproc, nodes = started[0]
    assert (stage, argv, nproc, nodes.count) == (
        "sft",
        ["--model_name_or_path", "m", "--output_dir", "o"],
        2,
        1,
    )


def test_a_misspelt_flag_starts_nothing(monkeypatch, capsys):
    monkeypatch.setattr(cli, "run_stage", lambda *args: pytest.fail("started"))
    status, _, err = ending(capsys, ["reward", "--nprc", "2"])
    assert status == 2 and "did you mean --nproc?" in err


def raising(error):
    def main(_argv):
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (StageFailed("stage ppo failed: rank 1: no"), 1, "error: stage ppo failed: rank 1: no\n"),
        (StageFailed("stage ppo failed: x", "Traceback …\n"), 1, "Traceback …\nerror: stage ppo failed: x\n"),
        (Interrupted(15), 143, "error: stopped by SIGTERM\n"),
        (KeyboardInterrupt(), 130, "error: stopped by SIGINT\n"),
    ],
)
def test_failures_end_in_one_line(monkeypatch, capsys, error, status, line):
    monkeypatch.setattr(pipeline, "main", raising(error))
    assert ending(capsys, ["run"]) == (status, "", line)


def test_our_own_errors_are_one_line_and_others_keep_their_traceback(monkeypatch, capsys, tmp_path):
    status, _, err = ending(capsys, ["report", str(tmp_path / "none")])
    assert status == 1 and err == f"error: no folder {tmp_path / 'none'}: give the --output-dir of a run\n"
    monkeypatch.setattr(pipeline, "main", raising(ValueError("from elsewhere")))
    with pytest.raises(ValueError, match="from elsewhere"):
        cli.main(["run"])


def test_python_dash_m():
    done = subprocess.run([sys.executable, "-m", "rlhf", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == cli.USAGE and done.stderr == ""


def readme_commands():
    """The README's commands that read flags, continued lines joined, comments and ellipses left out."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    for block in text.split("```bash\n")[1:]:
        for line in block.split("```")[0].splitlines():
            words = [word for word in shlex.split(line, comments=True) if word != "…"]
            if words[:3] == ["python", "-m", "rlhf"]:
                yield words[3:]
            elif (
                words[:1] == ["bash"]
                and words[1].removeprefix("scripts/").removesuffix(".sh") in STAGE_PARSERS
            ):
                yield [words[1].removeprefix("scripts/").removesuffix(".sh"), *words[2:]]


def test_the_readmes_commands_parse():
    parsers = {**STAGE_PARSERS, "run": pipeline.parser, "chat": chat.parser}
    commands = list(readme_commands())
    assert {words[0] for words in commands} == {*cli.COMMANDS}
    for command, *flags in commands:
        if command == "eval":
            parse({"reward": reward_eval_parser, "prompts": prompt_eval_parser}[flags[0]](), flags[1:])
        if command in STAGE_PARSERS:
            *_, flags = take_launch_flags(flags)
        if command in parsers:
            parse(parsers[command](), flags)
