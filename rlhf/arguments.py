"""The command-line flags of the three stages: DeepSpeed-Chat's names and defaults, and a few of our own.

``sft_parser()``, ``reward_parser()`` and ``ppo_parser()`` build the parsers; ``parse()`` reads a command line
with one of them. Where the defaults differ from DeepSpeed-Chat's: ``--data_path`` is the bundled sample,
``--dtype`` is ``auto`` (what suits the device), PPO's ``--seed`` is a number like the other stages', and
``--tensorboard_path`` is the folder ``tensorboard`` in ``--output_dir``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from rlhf.data_flags import data_group
from rlhf.flags import (
    Parser,
    fraction,
    nearest,
    non_negative_float,
    non_negative_int,
    parse,
    positive_float,
    positive_fraction,
    positive_int,
)

__all__ = [
    "INERT",
    "STAGE_PARSERS",
    "nearest",
    "parse",
    "ppo_parser",
    "resolve_dtype",
    "reward_parser",
    "sft_parser",
]

SCHEDULES = ("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup")
# Accepted so that DeepSpeed-Chat's scripts run as they are; each says in its help why nothing reads it.
INERT = ("deepspeed", "local_rank", "enable_hybrid_engine", "compute_fp32_loss", "num_padding_at_beginning")


def resolve_dtype(name: str, device_type: str, bf16_supported: bool = False) -> tuple[str, str]:
    """What ``--dtype`` means on this device, and why.

    Args:
        name: ``auto``, ``fp16``, ``bf16`` or ``fp32``.
        device_type: ``cpu`` or ``cuda``.
        bf16_supported: whether the accelerator computes in bf16.

    Returns:
        ``(dtype, reason)`` with dtype one of ``fp16``, ``bf16``, ``fp32``.
    """
    if name != "auto":
        return name, "asked for by --dtype"
    if device_type == "cpu":
        return "fp32", "the exact choice on a CPU"
    return (
        ("bf16", "this accelerator computes in bf16")
        if bf16_supported
        else ("fp16", "no bf16 on this accelerator")
    )


def sft_parser() -> Parser:
    """Flags of step 1, supervised fine-tuning."""
    parser = Parser("rlhf sft", "Step 1: supervised fine-tuning on dialogues.")
    data = data_group(parser, "sft")
    data.add_argument(
        "--sft_only_data_path",
        nargs="*",
        default=[],
        metavar="SOURCE",
        help="sources used whole, in this stage only",
    )
    data.add_argument("--train_on_prompt", action="store_true", help="train on the prompt's tokens too")
    _model_group(parser)
    _training_group(parser, learning_rate=1e-3)
    _evaluation_group(parser)
    output = _output_group(parser)
    output.add_argument("--print_loss", action="store_true", help="print the loss of every step")
    _scale_group(parser)
    return parser


def reward_parser() -> Parser:
    """Flags of step 2, the reward model."""
    parser = Parser("rlhf reward", "Step 2: a reward model from pairs of chosen and rejected answers.")
    data_group(parser, "reward")
    _model_group(parser)
    training = _training_group(parser, learning_rate=5e-5)
    training.add_argument(
        "--pair_loss",
        choices=("end", "token"),
        default="end",
        help="compare scores at the last token, or the mean over tokens from the first difference on",
    )
    evaluation = _evaluation_group(parser)
    evaluation.add_argument(
        "--eval_iters", type=positive_int, default=100, help="most batches in one evaluation"
    )
    _output_group(parser)
    _scale_group(parser)
    _inert_padding(parser)
    return parser


def ppo_parser() -> Parser:
    """Flags of step 3, PPO."""
    parser = Parser("rlhf ppo", "Step 3: PPO of the actor against the reward model.")
    add = data_group(parser, "ppo").add_argument
    add("--unsupervised_dataset_name", help="text source for the PTX loss; needs --unsup_coef above 0")
    add("--unsup_coef", type=non_negative_float, default=27.8, help="weight of the PTX loss")

    add = parser.add_argument_group("models").add_argument
    add("--actor_model_name_or_path", required=True, help="the SFT model: folder or hub name")
    add("--critic_model_name_or_path", required=True, help="the reward model the critic starts from")
    add("--reward_model_name_or_path", help="the reward model that scores; the critic's when not given")
    _per_model(
        add, "dropout", type=fraction, help="dropout of the {} in training; the model's own when not given"
    )

    _ppo_training_group(parser)
    _ppo_algorithm_group(parser)
    _ppo_sampling_group(parser)

    evaluation = parser.add_argument_group("evaluation")
    add = evaluation.add_argument
    add(
        "--eval_interval",
        type=non_negative_int,
        default=0,
        help="iterations between evaluations; 0: first and last",
    )
    add(
        "--num_eval_prompts",
        type=non_negative_int,
        default=0,
        help="held-out prompts judged each time; 0: all",
    )
    add(
        "--eval_samples", type=non_negative_int, default=8, help="prompts shown with answers before and after"
    )
    add("--gold_fn", help="module:name or file.py:name of a judge, called with (prompt, answer)")

    output = _output_group(parser)
    add = output.add_argument
    add("--print_answers", action="store_true", help="print one prompt with its answer now and then")
    add("--print_answers_interval", type=positive_int, default=1, help="iterations between printed answers")
    add("--enable_ema", action="store_true", help="keep and save a moving average of the actor")

    _ppo_scale_group(parser)
    _inert_padding(parser)
    return parser


STAGE_PARSERS: dict[str, Callable[[], Parser]] = {
    "sft": sft_parser,
    "reward": reward_parser,
    "ppo": ppo_parser,
}


def _model_group(parser: Parser) -> None:
    add = parser.add_argument_group("model").add_argument
    add(
        "--model_name_or_path",
        required=True,
        help="Hugging Face folder or name, or a recipe such as recipe:llama-1m",
    )
    add("--dropout", type=fraction, help="dropout in training; the model's own when not given")


def _training_group(parser: Parser, learning_rate: float) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("training")
    add = group.add_argument
    add(
        "--per_device_train_batch_size",
        type=positive_int,
        default=16,
        help="rows per process and micro-batch",
    )
    add("--learning_rate", type=non_negative_float, default=learning_rate, help="peak learning rate")
    add("--weight_decay", type=non_negative_float, default=0.0, help="decoupled; not on biases and norms")
    add("--num_train_epochs", type=positive_int, default=1, help="passes over the data")
    add("--num_warmup_steps", type=non_negative_int, default=0, help="optimizer steps of linear warm-up")
    _shared_training(add)
    add("--gradient_checkpointing", action="store_true", help="recompute activations to save memory")
    return group


def _shared_training(add: Callable[..., argparse.Action]) -> None:
    add(
        "--gradient_accumulation_steps",
        type=positive_int,
        default=1,
        help="micro-batches of one optimizer step",
    )
    add("--lr_scheduler_type", choices=SCHEDULES, default="cosine", help="shape of the learning rate")
    add(
        "--max_steps",
        type=non_negative_int,
        default=0,
        help="stop after this many optimizer steps; 0: no limit",
    )
    add("--seed", type=int, default=1234, help="seed of the data order, the sampling and new weights")


def _evaluation_group(parser: Parser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("evaluation")
    add = group.add_argument
    add("--per_device_eval_batch_size", type=positive_int, default=16, help="rows per process and batch")
    add("--eval_interval", type=non_negative_int, default=0, help="steps between evaluations; 0: every epoch")
    return group


def _output_group(parser: Parser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("output")
    add = group.add_argument
    add("--output_dir", required=True, help="folder of the model, metrics and checkpoints")
    add("--save_interval", type=non_negative_int, default=0, help="steps between checkpoints; 0: none")
    add("--resume", action="store_true", help="go on from the latest checkpoint in --output_dir")
    add("--enable_tensorboard", action="store_true", help="write TensorBoard events")
    add("--tensorboard_path", help="folder of the events; OUTPUT_DIR/tensorboard when not given")
    return group


def _dtype_and_inert(add: Callable[..., argparse.Action]) -> None:
    add(
        "--dtype",
        choices=("auto", "fp16", "bf16", "fp32"),
        default="auto",
        help="compute type, over fp32 master weights; auto: bf16 or fp16 on a GPU, fp32 on a CPU",
    )
    add("--offload", action="store_true", help="keep the optimizer's states and parameters in CPU memory")
    add("--deepspeed", action="store_true", help="accepted and not needed: the engine is always on")
    add("--local_rank", type=int, default=-1, help="accepted and not needed: torchrun sets it")
    add("--compute_fp32_loss", action="store_true", help="accepted and not needed: losses are always fp32")


def _scale_group(parser: Parser) -> None:
    add = parser.add_argument_group("scale").add_argument
    add("--zero_stage", type=int, choices=(0, 1, 2, 3), default=0, help="what is sharded over processes")
    _dtype_and_inert(add)


def _ppo_training_group(parser: Parser) -> None:
    add = parser.add_argument_group("training").add_argument
    size = {"type": positive_int, "default": 16}
    add("--per_device_generation_batch_size", **size, help="prompts per process and generation batch")
    add("--per_device_training_batch_size", **size, help="sequences per process and micro-batch")
    add("--generation_batches", type=positive_int, default=1, help="generation batches of one PPO iteration")
    add("--ppo_epochs", type=positive_int, default=1, help="passes over one iteration's experience")
    add("--actor_learning_rate", type=non_negative_float, default=9.65e-6, help="peak rate of the actor")
    add("--critic_learning_rate", type=non_negative_float, default=5e-6, help="peak rate of the critic")
    _per_model(
        add, "weight_decay", type=non_negative_float, default=0.0, help="of the {}; not on biases and norms"
    )
    add("--num_train_epochs", type=positive_int, default=1, help="passes over the prompts")
    add("--num_warmup_steps", type=non_negative_int, default=100, help="optimizer steps of linear warm-up")
    _shared_training(add)
    _per_model(add, "gradient_checkpointing", action="store_true", help="recompute the {}'s activations")


def _ppo_algorithm_group(parser: Parser) -> None:
    add = parser.add_argument_group("algorithm").add_argument
    add("--kl_ctl", type=non_negative_float, default=0.1, help="weight of the KL penalty in the reward")
    add(
        "--target_kl",
        type=non_negative_float,
        help="adapt the KL weight towards this KL per answer; fixed without",
    )
    add("--kl_horizon", type=positive_int, default=10000, help="answers over which the KL weight adapts")
    add(
        "--clip_reward_value",
        type=non_negative_float,
        default=5.0,
        help="scores are clipped to plus and minus this",
    )
    add(
        "--normalize_scores",
        action="store_true",
        help="shift and scale scores once, on the first actor's answers",
    )
    add("--cliprange", type=non_negative_float, default=0.2, help="clip of the policy's ratio")
    add("--cliprange_value", type=non_negative_float, default=0.2, help="clip of the value's change")
    add("--gamma", type=fraction, default=1.0, help="discount per token")
    add("--lam", type=fraction, default=0.95, help="lambda of the advantage estimate")
    add("--no_whiten_advantages", action="store_true", help="use advantages as they are")


def _ppo_sampling_group(parser: Parser) -> None:
    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", type=positive_float, default=1.0, help="of the answers that train the actor")
    add("--top_k", type=non_negative_int, default=0, help="sample among the k likeliest tokens; 0: all")
    add(
        "--top_p",
        type=positive_fraction,
        default=1.0,
        help="sample among the likeliest tokens of this total probability",
    )


def _ppo_scale_group(parser: Parser) -> None:
    add = parser.add_argument_group("scale").add_argument
    _per_model(add, "zero_stage", type=int, choices=(0, 1, 2, 3), default=0, help="what is sharded of the {}")
    add("--inference_tp_size", type=positive_int, default=1, help="processes that share one generating model")
    add("--release_inference_cache", action="store_true", help="free the generation memory after each use")
    add("--unpin_actor_parameters", action="store_true", help="do not pin the generating weights in memory")
    add(
        "--tp_gather_partition_size",
        type=positive_int,
        default=8,
        help="layers laid out for generation at once",
    )
    add(
        "--enable_hybrid_engine",
        action="store_true",
        help="accepted and not needed: generation always uses it",
    )
    _dtype_and_inert(add)


def _inert_padding(parser: Parser) -> None:
    text = "accepted and not needed: padding is known from masks"
    parser.add_argument_group("compatibility").add_argument(
        "--num_padding_at_beginning", type=int, default=1, help=text
    )


def _per_model(add: Callable[..., argparse.Action], name: str, *, help: str, **options) -> None:
    """One flag for the actor and the same for the critic."""
    for model in ("actor", "critic"):
        add(f"--{model}_{name}", help=help.format(model), **options)
