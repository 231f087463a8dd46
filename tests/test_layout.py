"""The shape of the repository: who imports whom, how long files are, and that every flag is read."""

import ast
from pathlib import Path

import pytest

from rlhf import eval_flags
from rlhf.arguments import INERT, STAGE_PARSERS

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "engine": set(),
    "data": set(),
    "rlhf": {"engine", "data"},
    "stages": {"engine", "data", "rlhf"},
}
LONGEST_FILE = 500


def sources(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def imported(tree):
    """The top-level packages that a module imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_nobody_imports_upward(package):
    ours = {*MAY_IMPORT, "tests", "bench"}
    for path in sources(package):
        found = set(imported(ast.parse(path.read_text(encoding="utf-8")))) & ours
        assert found <= MAY_IMPORT[package] | {package}, f"{path.relative_to(ROOT)} imports {sorted(found)}"


def test_files_can_be_read_in_one_sitting():
    long = {
        str(path.relative_to(ROOT)): n
        for path in sources(*MAY_IMPORT, "tests")
        if (n := lines(path)) > LONGEST_FILE
    }
    assert not long


def lines(path):
    return path.read_text(encoding="utf-8").count("\n")


def test_every_module_says_what_it_is_for():
    silent = [
        str(path.relative_to(ROOT))
        for path in sources(*MAY_IMPORT)
        if path.read_text(encoding="utf-8").strip()
        and not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not silent


def flags_read(tree):
    """The flags that a module reads: ``args.name``, ``self._args.name``, ``getattr(args, "name", …)``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and is_args(node.value):
            yield node.attr
        elif (
            isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr" and is_args(node.args[0])
        ):
            yield getattr(node.args[1], "value", "")


def is_args(node):
    return getattr(node, "id", getattr(node, "attr", "")).lstrip("_") == "args"


@pytest.mark.parametrize("stage", STAGE_PARSERS)
def test_every_flag_is_read(stage):
    """By the stage or by what it shares with others in rlhf/; the flags' own definitions do not count."""
    definitions = {"arguments.py", "arguments_ppo.py", "data_flags.py", "flag_groups.py", "flags.py"}
    definitions |= {"pipeline_recipes.py", "pipeline_state.py", "pipeline.py"}
    readers = [path for path in sources("rlhf") if path.name not in definitions]
    read = set()
    for path in [ROOT / "stages" / f"{stage}.py", *readers]:
        read |= set(flags_read(ast.parse(path.read_text(encoding="utf-8"))))
    flags = {action.dest for action in STAGE_PARSERS[stage]()._actions} - {"help", "config", *INERT}
    assert flags <= read, f"read by nobody: {sorted(flags - read)}"


@pytest.mark.parametrize("kind", ["reward", "prompts"])
def test_every_flag_of_an_evaluation_is_read(kind):
    parser = {"reward": eval_flags.reward_eval_parser, "prompts": eval_flags.prompt_eval_parser}[kind]()
    read = {"prompt", "chosen", "rejected"} if kind == "reward" else set()  # by their names in turn
    for name in (f"eval_{kind}.py", "answering.py", "stage_data.py"):
        read |= set(flags_read(ast.parse((ROOT / "rlhf" / name).read_text(encoding="utf-8"))))
    flags = {action.dest for action in parser._actions} - {"help", "config", "add_eot_token", *INERT}
    assert flags <= read, f"read by nobody: {sorted(flags - read)}"


def test_scripts_are_named_in_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for script in sorted((ROOT / "scripts").glob("*.sh")):
        assert script.name in readme, script.name
