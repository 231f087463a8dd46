"""The stages' flags: DeepSpeed-Chat's names and defaults, one-line errors, YAML files."""

import math

import pytest

from rlhf.arguments import STAGE_PARSERS, parse, ppo_parser, resolve_dtype, sft_parser
from rlhf.flags import nearest

MODEL = ["--model_name_or_path", "m", "--output_dir", "o"]
PPO = ["--actor_model_name_or_path", "a", "--critic_model_name_or_path", "c", "--output_dir", "o"]

# What DeepSpeed-Chat keeps fixed in its code.
FIXED = {
    "kl_ctl": 0.1, "clip_reward_value": 5.0, "cliprange": 0.2, "cliprange_value": 0.2, "gamma": 1.0, "lam": 0.95,
}  # fmt: skip


def test_constants_of_deepspeed_chat_are_defaults():
    args = vars(parse(ppo_parser(), PPO))
    assert {name: args[name] for name in FIXED} == FIXED


@pytest.mark.parametrize("stage", STAGE_PARSERS)
def test_every_flag_has_a_one_line_help_and_reads_its_own_default(stage):
    for action in STAGE_PARSERS[stage]()._actions:
        assert action.help and "\n" not in action.help and len(action.help) < 110, action.dest
        if action.type is not None and action.default is not None:
            values = action.default if isinstance(action.default, list) else [action.default]
            assert [action.type(str(value)) for value in values] == values


def error_of(capsys, build, argv):
    with pytest.raises(SystemExit) as stop:
        parse(build(), argv)
    assert stop.value.code == 2
    out = capsys.readouterr()
    assert out.out == "" and out.err.startswith("error: ") and out.err.count("\n") == 1
    return out.err


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("--lerning_rate", "--learning_rate"),
        ("--learning-rat", "--learning_rate"),
        ("--model_name_or_pth", "--model_name_or_path"),
        ("--max_seq_length", "--max_seq_len"),
        ("--zerostage", "--zero_stage"),
    ],
)
def test_a_misspelt_flag_offers_the_nearest(capsys, slip, meant):
    # Named even though required flags are missing too.
    assert f"unknown flag {slip}; did you mean {meant}?" in error_of(capsys, sft_parser, [slip, "3"])
    assert f"did you mean {meant}?" in error_of(capsys, sft_parser, [f"{slip}=3", *MODEL])


def test_hyphens_and_underscores_are_alike():
    args = parse(sft_parser(), ["--learning-rate", "3", "--max-seq_len=7", "--model-name-or-path", "a_b", *MODEL[2:]])
    assert (args.learning_rate, args.max_seq_len, args.model_name_or_path) == (3.0, 7, "a_b")


def test_a_flag_like_nothing_offers_nothing(capsys):
    assert "did you mean" not in error_of(capsys, sft_parser, ["--qqqqqq", *MODEL])
    assert nearest("--qqqqqq", ["--learning_rate"]) == ""


def test_no_abbreviations(capsys):
    assert "did you mean --learning_rate?" in error_of(capsys, sft_parser, ["--learning", "1", *MODEL])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--max_steps", "-3"], "at least 0, got -3"),
        (["--learning_rate", "nan"], "at least 0, got nan"),
        (["--learning_rate", "inf"], "at least 0, got inf"),
        (["--learning_rate", "fast"], "got 'fast'"),
        (["--per_device_train_batch_size", "0"], "at least 1, got 0"),
        (["--dtype", "fp8"], "fp8"),
        (["--dropout", "1.5"], "between 0 and 1, got 1.5"),
        (["stray"], "unexpected argument 'stray'"),
    ],
)
def test_bad_values_are_one_line(capsys, argv, words):
    assert words in error_of(capsys, sft_parser, [*MODEL, *argv])


@pytest.mark.parametrize("url", ["host:8000/score", "ftp://host/score", "file:///score", "http://", "http://[::1", "http://host:port/"])
def test_an_endpoint_is_an_http_address(capsys, url):
    words = ["--actor_model_name_or_path", "m", "--output_dir", "o", "--reward_url"]
    assert "--reward_url: must be an address like http" in error_of(capsys, ppo_parser, [*words, url])
    good = "https://user@host:8000/score?model=a"
    assert parse(ppo_parser(), [*words, good]).reward_url == good


def test_only_rank_zero_speaks(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        parse(sft_parser(), ["--nothing"])
    assert capsys.readouterr().err == ""


def write(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return str(path)


def test_a_yaml_file_gives_values_and_flags_win(tmp_path):
    text = "learning_rate: 3e-4\nmodel_name_or_path: m\noutput_dir: o\ndata_path: [a, b]\n"
    text += "gradient_checkpointing: true\nprint_loss: false\nmax_steps: 7\ndropout: null\n"
    args = parse(sft_parser(), ["--config", write(tmp_path, text), "--max_steps", "9"])
    assert math.isclose(args.learning_rate, 3e-4) and args.data_path == ["a", "b"]
    assert args.gradient_checkpointing and not args.print_loss and args.dropout is None
    assert args.max_steps == 9


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lerning_rate: 1", "unknown name lerning_rate; did you mean learning_rate?"),
        ("max_steps: -1", "at least 0, got -1"),
        ("max_steps: [1, 2]", "one value, got a list of 2"),
        ("print_loss: 3", "true or false, got 3"),
        ("- a", "expected lines of `name: value`"),
        ("a: [", "not YAML"),
        ("dropout: {a: 1}", "got a mapping"),
    ],
)
def test_a_bad_yaml_file_is_one_line(capsys, tmp_path, text, words):
    assert words in error_of(capsys, sft_parser, [*MODEL, "--config", write(tmp_path, text)])


def test_a_missing_yaml_file_is_one_line(capsys, tmp_path):
    path = str(tmp_path / "none.yaml")
    assert path in error_of(capsys, sft_parser, [*MODEL, "--config", path])


def test_dtype_auto_suits_the_device():
    assert resolve_dtype("auto", "cpu")[0] == "fp32"
    assert resolve_dtype("auto", "cuda", bf16_supported=True)[0] == "bf16"
    assert resolve_dtype("auto", "cuda", bf16_supported=False)[0] == "fp16"
    assert resolve_dtype("fp16", "cpu") == ("fp16", "asked for by --dtype")
