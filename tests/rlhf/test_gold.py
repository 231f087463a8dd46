"""Functions given by name, and what is said when they cannot be had."""

from __future__ import annotations

import pytest

from rlhf.gold import load_gold


@pytest.fixture
def judge(tmp_path):
    path = tmp_path / "judge.py"
    path.write_text("LIMIT = 3\n\ndef score(prompt, answer):\n    return float(len(answer) > LIMIT)\n")
    return path


def test_from_a_file_and_from_a_module(judge):
    assert load_gold(f"{judge}:score")("q", "long answer") == 1.0
    assert load_gold("math:hypot")(3, 4) == 5.0


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("math", ValueError, "'math' names no function: write module:function or file.py:function"),
        ("{judge}:", ValueError, "names no function"),
        ("{folder}/absent.py:score", FileNotFoundError, "no file .*absent.py"),
        ("no_such_module_here:score", FileNotFoundError, "no module no_such_module_here"),
        ("{judge}:grade", ValueError, "judge.py has no function grade: it has score"),
        ("{judge}:LIMIT", ValueError, "LIMIT is a int, not a function"),
    ],
)
def test_errors_are_one_line(judge, spec, error, message):
    with pytest.raises(error, match=message) as caught:
        load_gold(spec.format(judge=judge, folder=judge.parent))
    assert "\n" not in str(caught.value)


def test_a_file_that_fails_names_its_own_error(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import a_package_nobody_has\n")
    with pytest.raises(ValueError, match="broken.py fails when imported: ModuleNotFoundError.*a_package_nobody_has"):
        load_gold(f"{path}:score")
