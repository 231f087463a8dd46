"""A DeepSpeed JSON beside the flags: what becomes a flag's value, what is laid over, and which of two wins."""

from __future__ import annotations

import json

import pytest

from engine import EngineConfig
from rlhf.arguments import parse, ppo_parser, sft_parser
from rlhf.training import inference_config, train_config
from tests.stages.kit import run, trained, write_rows

SFT = ["--model_name_or_path", "m", "--output_dir", "o"]
PPO = ["--actor_model_name_or_path", "a", "--critic_model_name_or_path", "c", "--output_dir", "o"]
CONTENT = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.25,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True},
    "bfloat16": {"enabled": True},
    "optimizer": {"type": "Adam", "params": {"lr": 3e-4, "betas": [0.8, 0.9], "weight_decay": "auto"}},
}


@pytest.fixture
def file(tmp_path):
    def write(content):
        path = tmp_path / "ds.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return ["--deepspeed_config", str(path)]

    return write


def config_of(args):
    config = train_config(
        args,
        zero_stage=args.zero_stage,
        micro_batch=args.per_device_train_batch_size,
        learning_rate=args.learning_rate,
        weight_decay=args.weight_decay,
        total_steps=10,
    )
    return EngineConfig.load(config, world_size=1)


def test_the_file_gives_flags_their_values_and_the_engine_the_rest(file):
    args = parse(sft_parser(), [*SFT, *file(CONTENT), "--weight_decay", "0.1"])
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps, args.zero_stage) == (4, 2, 2)
    assert args.learning_rate == 3e-4 and args.dtype == "bf16" and args.offload
    config = config_of(args)
    assert config.gradient_clipping == 0.25 and config.optimizer.type == "Adam"
    assert config.optimizer.params == {"lr": 3e-4, "betas": [0.8, 0.9], "weight_decay": 0.1}
    assert config.scheduler.type == "cosine" and config.bf16.enabled and not config.fp16.enabled
    assert config.zero_optimization.offloads_optimizer and config.train_batch_size == 8


def test_given_flags_win_and_yaml_stands_between(file, tmp_path):
    (tmp_path / "c.yaml").write_text("learning_rate: 5e-5\ngradient_accumulation_steps: 3\n")
    words = [*file(CONTENT), "--config", str(tmp_path / "c.yaml"), "--gradient_accumulation_steps", "5"]
    args = parse(sft_parser(), [*SFT, *words, "--zero_stage", "3", "--dtype", "fp16"])
    assert (args.learning_rate, args.gradient_accumulation_steps, args.zero_stage) == (5e-5, 5, 3)
    config = config_of(args)
    assert config.optimizer.params["lr"] == 5e-5 and config.zero_optimization.stage == 3
    assert config.fp16.enabled and not config.bf16.enabled and config.fp16.loss_scale_window == 100


def test_a_schedule_in_the_file_replaces_the_flags_one(file):
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 7}}
    content = {"scheduler": schedule, "fp16": {"enabled": "auto", "loss_scale_window": 50}}
    config = config_of(parse(sft_parser(), [*SFT, *file(content)]))
    assert config.scheduler.type == "WarmupLR" and config.scheduler.params == {"warmup_num_steps": 7}
    assert not config.fp16.enabled and config.fp16.loss_scale_window == 50


def test_auto_in_a_schedule_is_what_the_flags_say(file):
    params = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}
    words = file({"scheduler": {"type": "WarmupDecayLR", "params": params}})
    words += ["--learning_rate", "2e-4", "--num_warmup_steps", "3"]
    config = config_of(parse(sft_parser(), [*SFT, *words]))
    assert config.scheduler.params == {"warmup_max_lr": 2e-4, "warmup_num_steps": 3, "total_num_steps": 10}


def test_another_optimizer_has_none_of_adams_parameters(file):
    content = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}
    config = config_of(parse(sft_parser(), [*SFT, *file(content)]))
    assert config.optimizer.type == "SGD"
    assert config.optimizer.params == {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}


def test_adapters_keep_their_rate_under_a_schedule_of_deepspeeds(file, tmp_path):
    params = {"warmup_max_lr": 1e-3, "warmup_num_steps": 1, "warmup_type": "linear"}
    path = file({"scheduler": {"type": "WarmupLR", "params": params}})[1]
    flags = {"lora_dim": 2, "lora_learning_rate": 0.25, "max_steps": 4, "per_device_train_batch_size": 2}
    data = write_rows(tmp_path / "rows.jsonl")
    alone = run("sft", tmp_path / "alone", data, deepspeed_config=path, only_optimize_lora=True, **flags)
    beside = run("sft", tmp_path / "beside", data, deepspeed_config=path, **flags)
    assert (trained(alone)[-1]["lr"], trained(beside)[-1]["lr"]) == (0.25, 1e-3)


def test_ppo_gives_both_models_what_the_file_says_and_only_the_actor_generates(file):
    content = {**CONTENT, "hybrid_engine": {"enabled": True, "inference_tp_size": 2, "pin_parameters": False}}
    args = parse(ppo_parser(), [*PPO, *file(content), "--critic_learning_rate", "1e-6"])
    assert (args.actor_zero_stage, args.critic_zero_stage, args.inference_tp_size) == (2, 2, 2)
    assert (args.actor_learning_rate, args.critic_learning_rate) == (3e-4, 1e-6) and args.unpin_actor_parameters
    assert args.per_device_training_batch_size == 4 and args.per_device_generation_batch_size == 16
    shape = {"zero_stage": 2, "micro_batch": 4}
    critic = train_config(args, **shape, learning_rate=1e-6, weight_decay=0.0, total_steps=1)
    assert not critic["hybrid_engine"]["enabled"]
    reference = inference_config(args, **shape)
    assert "optimizer" not in reference and reference["bf16"]["enabled"]


@pytest.mark.parametrize(
    ("content", "flags", "ranks", "micro", "accumulation"),
    [
        ({"train_micro_batch_size_per_gpu": 4}, [], 2, 4, 3),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto"}, [], 1, 4, 6),
        ({"gradient_accumulation_steps": 3}, [], 2, 4, 3),
        ({}, [], 4, 6, 1),
        ({"train_micro_batch_size_per_gpu": "auto"}, ["--per_device_train_batch_size", "2"], 2, 2, 6),
        ({"train_micro_batch_size_per_gpu": 4}, ["--per_device_train_batch_size=2"], 1, 2, 12),
        ({"train_micro_batch_size_per_gpu": 4}, ["--gradient-accumulation-steps", "6"], 1, 4, 6),
    ],
)
def test_the_batch_size_that_is_missing_follows_from_the_global_one(file, content, flags, ranks, micro, accumulation):
    args = parse(sft_parser(), [*SFT, *file({"train_batch_size": 24, **content}), *flags], ranks)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (micro, accumulation)


def test_a_global_batch_that_no_accumulation_makes_is_one_line(file, capsys):
    with pytest.raises(SystemExit):
        parse(sft_parser(), [*SFT, *file({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 5})], 2)
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "train_batch_size 24 is no multiple of 10" in error


def test_sizes_that_contradict_each_other_are_one_line(file):
    args = parse(sft_parser(), [*SFT, *file({**CONTENT, "train_batch_size": 9})])
    with pytest.raises(ValueError, match="train_batch_size 9 is not train_micro_batch_size_per_gpu 4"):
        config_of(args)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "holds a list"),
        ({"zero_optimization": {"stage": 7}}, "invalid choice"),
        ({"train_micro_batch_size_per_gpu": 0}, "at least 1, got 0"),
    ],
)
def test_a_bad_file_is_one_line(file, capsys, content, words):
    with pytest.raises(SystemExit):
        parse(sft_parser(), [*SFT, *file(content)])
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_a_missing_file_is_one_line(capsys):
    with pytest.raises(SystemExit):
        parse(sft_parser(), [*SFT, "--deepspeed_config", "none.json"])
    assert "--deepspeed_config none.json: no such file" in capsys.readouterr().err


def test_a_stage_runs_under_it_and_records_what_it_resolved(file, tmp_path):
    content = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1e-3, "optimizer": {"params": {"lr": 0.5}}}
    path = file(content)[1]
    lines = run("sft", tmp_path / "sft", write_rows(tmp_path / "rows.jsonl"), deepspeed_config=path, max_steps=2)
    assert trained(lines)[0]["lr"] == 0.5
    arguments = json.loads((tmp_path / "sft/run.json").read_text())["arguments"]
    assert (arguments["per_device_train_batch_size"], arguments["learning_rate"]) == (2, 0.5)
    assert arguments["deepspeed_config"] == path
