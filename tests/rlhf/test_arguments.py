"""The stages' flags: DeepSpeed-Chat's names and defaults, one-line errors, YAML files."""

import math

import pytest

from rlhf.arguments import INERT, STAGE_PARSERS, parse, ppo_parser, resolve_dtype, reward_parser, sft_parser
from rlhf.flags import nearest

MODEL = ["--model_name_or_path", "m", "--output_dir", "o"]
PPO = ["--actor_model_name_or_path", "a", "--critic_model_name_or_path", "c", "--output_dir", "o"]

SHARED = {
    "data_split": "2,4,4",
    "num_train_epochs": 1,
    "gradient_accumulation_steps": 1,
    "lr_scheduler_type": "cosine",
    "seed": 1234,
    "local_rank": -1,
    "offload": False,
    "enable_tensorboard": False,
}
ONE_MODEL = {
    "per_device_train_batch_size": 16,
    "per_device_eval_batch_size": 16,
    "max_seq_len": 512,
    "weight_decay": 0.0,
    "num_warmup_steps": 0,
    "gradient_checkpointing": False,
    "dropout": None,
    "zero_stage": 0,
}
DEFAULTS = {
    "sft": {**SHARED, **ONE_MODEL, "learning_rate": 1e-3, "sft_only_data_path": [], "print_loss": False},
    "reward": {**SHARED, **ONE_MODEL, "learning_rate": 5e-5, "eval_interval": 0, "eval_iters": 100},
    "dpo": {**SHARED, **ONE_MODEL, "learning_rate": 1e-3, "beta": 0.1, "label_smoothing": 0.0},
    "ppo": {
        **SHARED,
        "per_device_generation_batch_size": 16,
        "per_device_training_batch_size": 16,
        "generation_batches": 1,
        "ppo_epochs": 1,
        "max_prompt_seq_len": 256,
        "max_answer_seq_len": 256,
        "actor_learning_rate": 9.65e-6,
        "critic_learning_rate": 5e-6,
        "actor_weight_decay": 0.0,
        "critic_weight_decay": 0.0,
        "num_warmup_steps": 100,
        "inference_tp_size": 1,
        "tp_gather_partition_size": 8,
        "actor_zero_stage": 0,
        "critic_zero_stage": 0,
        "actor_dropout": None,
        "enable_ema": False,
        "print_answers_interval": 1,
        "unsup_coef": 27.8,
        "kl_ctl": 0.1,
        "clip_reward_value": 5.0,
        "cliprange": 0.2,
        "cliprange_value": 0.2,
        "gamma": 1.0,
        "lam": 0.95,
    },
}


@pytest.mark.parametrize("stage", STAGE_PARSERS)
def test_names_and_defaults_are_deepspeed_chats(stage):
    args = vars(parse(STAGE_PARSERS[stage](), PPO if stage == "ppo" else MODEL))
    assert {name: args[name] for name in DEFAULTS[stage]} == DEFAULTS[stage]


@pytest.mark.parametrize("stage", STAGE_PARSERS)
def test_every_flag_has_a_one_line_help_and_reads_its_own_default(stage):
    for action in STAGE_PARSERS[stage]()._actions:
        assert action.help and "\n" not in action.help and len(action.help) < 110, action.dest
        if action.type is not None and action.default is not None:
            values = action.default if isinstance(action.default, list) else [action.default]
            assert [action.type(str(value)) for value in values] == values


def test_inert_flags_say_so():
    for build in STAGE_PARSERS.values():
        helps = {action.dest: action.help for action in build()._actions}
        assert all("not needed" in helps[name] for name in INERT if name in helps)


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


def test_deepspeed_chats_own_scripts_parse():
    """Flags as DeepSpeed-Chat's single-node scripts for OPT pass them."""
    shared = ["--data_path", "a/b", "c/d", "--data_split", "2,4,4", "--gradient_accumulation_steps", "1"]
    shared += ["--lr_scheduler_type", "cosine", "--seed", "1234", "--deepspeed", "--output_dir", "o"]
    sizes = ["--per_device_train_batch_size", "8", "--per_device_eval_batch_size", "8"]
    model = ["--model_name_or_path", "facebook/opt-1.3b", "--zero_stage", "2", "--num_warmup_steps", "0"]
    parse(sft_parser(), [*shared, *sizes, *model, "--learning_rate", "9.65e-6", "--num_train_epochs", "16"])
    reward = ["--weight_decay", "0.1", "--dropout", "0.0", "--num_padding_at_beginning", "1"]
    parse(reward_parser(), [*shared, *sizes, *model, *reward])
    ppo = ["--actor_model_name_or_path", "a", "--critic_model_name_or_path", "c", "--inference_tp_size", "1"]
    ppo += ["--num_padding_at_beginning", "1", "--per_device_generation_batch_size", "4", "--enable_ema"]
    ppo += ["--per_device_training_batch_size", "4", "--generation_batches", "1", "--ppo_epochs", "1"]
    ppo += ["--actor_zero_stage", "2", "--critic_zero_stage", "2", "--enable_hybrid_engine"]
    ppo += ["--actor_gradient_checkpointing", "--critic_gradient_checkpointing", "--actor_dropout", "0.0"]
    assert parse(ppo_parser(), [*shared, *ppo]).enable_ema
