"""DeepSpeed-Chat's flags, all of them: name, default and type over our parsers, and what is ours instead."""

from __future__ import annotations

import os
import tempfile

import pytest

from rlhf import chat, eval_flags, pipeline
from rlhf.arguments import INERT, STAGE_PARSERS, parse
from tests.rlhf.anchor_recipes import RECIPES, command

SWITCH = "switch"
DATA_FILES = os.path.join(tempfile.gettempdir(), "data_files")
# name: (type, default)
SHARED = {
    "data_path": ("texts", ["Dahoas/rm-static"]),
    "data_split": (str, "2,4,4"),
    "data_output_path": (str, DATA_FILES),
    "num_train_epochs": (int, 1),
    "lr_scheduler_type": (str, "cosine"),
    "gradient_accumulation_steps": (int, 1),
    "output_dir": (str, None),
    "local_rank": (int, -1),
    "offload": (SWITCH, False),
    "dtype": (str, "fp16"),
    "only_optimize_lora": (SWITCH, False),
    "compute_fp32_loss": (SWITCH, False),
    "enable_tensorboard": (SWITCH, False),
    "add_eot_token": (SWITCH, False),
    "deepspeed": (SWITCH, False),
    "deepspeed_config": (str, None),
}
ONE_MODEL = {
    **SHARED,
    "model_name_or_path": (str, None),
    "per_device_train_batch_size": (int, 16),
    "per_device_eval_batch_size": (int, 16),
    "max_seq_len": (int, 512),
    "weight_decay": (float, 0.0),
    "num_warmup_steps": (int, 0),
    "seed": (int, 1234),
    "gradient_checkpointing": (SWITCH, False),
    "dropout": (float, None),
    "zero_stage": (int, 0),
    "lora_dim": (int, 0),
    "lora_module_name": (str, "decoder.layers."),
    "lora_learning_rate": (float, 5e-4),
}
TABLE = {
    "sft": {
        **ONE_MODEL,
        "sft_only_data_path": ("texts", []),
        "learning_rate": (float, 1e-3),
        "eot_token": (str, "<|endoftext|>"),
        "print_loss": (SWITCH, False),
        "tensorboard_path": (str, "step1_tensorboard"),
    },
    "reward": {
        **ONE_MODEL,
        "learning_rate": (float, 5e-5),
        "num_padding_at_beginning": (int, 1),
        "eval_interval": (int, 0),
        "eval_iters": (int, 100),
        "tensorboard_path": (str, "step2_tensorboard"),
    },
    "dpo": {
        **ONE_MODEL,
        "learning_rate": (float, 1e-3),
        "beta": (float, 0.1),
        "label_smoothing": (float, 0.0),
        "tensorboard_path": (str, "step2_tensorboard"),
    },
    "ppo": {
        **SHARED,
        "unsupervised_dataset_name": (str, None),
        "unsupervised_dataset_config_name": (str, None),
        "unsup_coef": (float, 27.8),
        "actor_model_name_or_path": (str, None),
        "critic_model_name_or_path": (str, None),
        "num_padding_at_beginning": (int, 1),
        "per_device_generation_batch_size": (int, 16),
        "per_device_training_batch_size": (int, 16),
        "generation_batches": (int, 1),
        "ppo_epochs": (int, 1),
        "max_prompt_seq_len": (int, 256),
        "max_answer_seq_len": (int, 256),
        "actor_learning_rate": (float, 9.65e-6),
        "critic_learning_rate": (float, 5e-6),
        "actor_weight_decay": (float, 0.0),
        "critic_weight_decay": (float, 0.0),
        "num_warmup_steps": (int, 100),
        "seed": (int, None),
        "preprocessing_num_workers": (int, None),
        "enable_hybrid_engine": (SWITCH, False),
        "unpin_actor_parameters": (SWITCH, False),
        "release_inference_cache": (SWITCH, False),
        "inference_tp_size": (int, 1),
        "tp_gather_partition_size": (int, 8),
        "offload_reference_model": (SWITCH, False),
        "offload_reward_model": (SWITCH, False),
        "actor_zero_stage": (int, 0),
        "critic_zero_stage": (int, 0),
        "actor_gradient_checkpointing": (SWITCH, False),
        "critic_gradient_checkpointing": (SWITCH, False),
        "actor_dropout": (float, None),
        "critic_dropout": (float, None),
        "actor_lora_dim": (int, 0),
        "critic_lora_dim": (int, 0),
        "actor_lora_module_name": (str, "decoder.layers."),
        "critic_lora_module_name": (str, "decoder.layers."),
        "actor_lora_learning_rate": (float, 5e-4),
        "critic_lora_learning_rate": (float, 5e-4),
        "enable_ema": (SWITCH, False),
        "enable_mixed_precision_lora": (SWITCH, False),
        "tensorboard_path": (str, "step3_tensorboard"),
        "align_overflow": (SWITCH, False),
        "print_answers": (SWITCH, False),
        "print_answers_interval": (int, 1),
        "enable_test_mode": (SWITCH, False),
        "test_stop_step": (int, 0),
    },
}
# Names that older scripts use, and what they mean now.
OLDER = {
    "ppo": {
        "per_device_train_batch_size": ("per_device_generation_batch_size", "7", 7),
        "per_device_mini_train_batch_size": ("per_device_training_batch_size", "7", 7),
        "generation_batch_numbers": ("generation_batches", "7", 7),
        "disable_actor_dropout": ("actor_dropout", None, 0.0),
        "disable_critic_dropout": ("critic_dropout", None, 0.0),
    },
    "sft": {"disable_dropout": ("dropout", None, 0.0)},
    "reward": {"disable_dropout": ("dropout", None, 0.0)},
    "dpo": {"disable_dropout": ("dropout", None, 0.0)},
}
# What is ours instead; the modules' texts and the flags' helps say so.
OURS = {"data_path": ["sample"], "dtype": "auto", "tensorboard_path": None}
# the critic is asked for where its estimator needs one, see rlhf.ppo_options
REQUIRED = {"output_dir", "model_name_or_path", "actor_model_name_or_path"}
EXAMPLES = {
    "data_split": "1,2,3",
    "lr_scheduler_type": "linear",
    "dtype": "bf16",
    "dropout": "0.5",
    "actor_dropout": "0.5",
    "critic_dropout": "0.5",
    "label_smoothing": "0.25",
}
ROWS = [(stage, name) for stage, table in TABLE.items() for name in table]
MODELS = {name: name for name in REQUIRED}


def required(stage):
    names = [action.dest for action in STAGE_PARSERS[stage]()._actions if action.required]
    return [word for name in names for word in (f"--{name}", "x")]


@pytest.mark.parametrize("stage", TABLE)
def test_defaults(stage):
    args = vars(parse(STAGE_PARSERS[stage](), required(stage)))
    ours = OURS | ({"seed": 1234} if stage == "ppo" else {})
    expected = {name: ours.get(name, default) for name, (_, default) in TABLE[stage].items() if name not in REQUIRED}
    assert {name: args[name] for name in expected} == expected
    needed = {action.dest for action in STAGE_PARSERS[stage]()._actions if action.required}
    assert needed == REQUIRED & TABLE[stage].keys()


@pytest.mark.parametrize(("stage", "name"), ROWS)
def test_types(stage, name, capsys, tmp_path):
    kind, _ = TABLE[stage][name]
    words, value = [], True
    if name == "deepspeed_config":
        words = [value := str(tmp_path / "empty.json")]
        (tmp_path / "empty.json").write_text("{}")
    elif kind == "texts":
        words = value = ["a", "b:2"]
    elif kind is str:
        words = [value := EXAMPLES.get(name, "some text")]
    elif kind is not SWITCH:
        words = [EXAMPLES.get(name, "0.125" if kind is float else "3")]
        value = kind(words[0])
    args = vars(parse(STAGE_PARSERS[stage](), [*required(stage), f"--{name}", *words]))
    assert args[name] == value and type(args[name]) is type(value)
    if kind in (int, float):
        with pytest.raises(SystemExit):
            parse(STAGE_PARSERS[stage](), [*required(stage), f"--{name}", "many"])
        assert name in capsys.readouterr().err


@pytest.mark.parametrize(("stage", "name"), [(stage, name) for stage, names in OLDER.items() for name in names])
def test_older_names(stage, name, tmp_path):
    today, word, value = OLDER[stage][name]
    words = [] if word is None else [word]
    assert vars(parse(STAGE_PARSERS[stage](), [*required(stage), f"--{name}", *words]))[today] == value
    (tmp_path / "c.yaml").write_text(f"{name}: {'true' if word is None else word}\n")
    config = ["--config", str(tmp_path / "c.yaml")]
    assert vars(parse(STAGE_PARSERS[stage](), [*required(stage), *config]))[today] == value


def test_the_launcher_chat_and_evaluation():
    run = vars(parse(pipeline.parser(), []))
    assert run["step"] == [1, 2, 3] and run["output_dir"] == "./output"
    assert run["actor_zero_stage"] == "" and run["reward_zero_stage"] == ""
    words = ["--step", "1", "3", "--actor-model", "1.3b", "--reward-model", "350m", "--actor-zero-stage", "3"]
    words += ["--reward-zero-stage", "0", "--output-dir", "o", "--deployment-type", "single_gpu"]
    args = vars(parse(pipeline.parser(), words))
    assert (args["step"], args["actor_zero_stage"], args["deployment_type"]) == ([1, 3], "3", "single_gpu")
    for stage in ("", "0", "1", "2", "3"):
        parse(pipeline.parser(), ["--actor-zero-stage", stage, "--reward-zero-stage", stage])
    for name in ("1.3b", "facebook/opt-1.3b"):
        assert pipeline.model_name(name) == "facebook/opt-1.3b"
    for kind in ("single_gpu", "single_node", "multi_node"):
        parse(pipeline.parser(), ["--deployment-type", kind])
    assert vars(parse(chat.parser(), ["--path", "m"]))["max_new_tokens"] == 128
    answers = ["--model_name_or_path_baseline", "a", "--model_name_or_path_finetune", "b", "--add_eot_token"]
    args = vars(parse(eval_flags.prompt_eval_parser(), answers))
    expected = {"num_beams": 1, "num_beam_groups": 1, "top_k": 4, "penalty_alpha": 0.6, "num_return_sequences": 1}
    expected |= {"max_new_tokens": 100, "language": "English"}
    assert {name: args[name] for name in expected} == expected
    args = parse(eval_flags.reward_eval_parser(), ["--model_name_or_path", "a", "--add_eot_token"])
    assert args.num_padding_at_beginning == 1


def test_inert_flags_say_so():
    for build in STAGE_PARSERS.values():
        helps = {action.dest: action.help for action in build()._actions}
        assert all("not needed" in helps[name] for name in INERT if name in helps)


@pytest.mark.parametrize("name", RECIPES)
def test_published_recipes_parse(name):
    stage, words = command(name)
    args = vars(parse(STAGE_PARSERS[stage](), words))
    assert args["deepspeed"] and args["output_dir"]
