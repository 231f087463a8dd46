"""The command-line flags of the stages: DeepSpeed-Chat's names and defaults, and a few of our own.

``sft_parser()``, ``reward_parser()``, ``dpo_parser()`` and ``ppo_parser()`` build the parsers; ``parse()`` reads a
command line with one of them. Where the defaults differ from DeepSpeed-Chat's: ``--data_path`` is the bundled sample,
``--dtype`` is ``auto`` (what suits the device), PPO's ``--seed`` is a number like the other stages', and
``--tensorboard_path`` is the folder ``tensorboard`` in ``--output_dir``.
"""

from __future__ import annotations

from collections.abc import Callable

from rlhf.arguments_ppo import ppo_parser
from rlhf.data_flags import data_group
from rlhf.flag_groups import (
    EOT_TOKEN,
    evaluation_group,
    inert_padding,
    lora_group,
    model_group,
    output_group,
    scale_group,
    training_group,
)
from rlhf.flags import Parser, half, nearest, non_negative_float, parse, positive_float, positive_int

__all__ = [
    "INERT",
    "STAGE_PARSERS",
    "dpo_parser",
    "nearest",
    "parse",
    "ppo_parser",
    "resolve_dtype",
    "reward_parser",
    "sft_parser",
]

# Accepted so that DeepSpeed-Chat's scripts run as they are; each says in its help why nothing reads it.
INERT = ("deepspeed", "local_rank", "enable_hybrid_engine", "compute_fp32_loss", "num_padding_at_beginning")
INERT += ("enable_mixed_precision_lora", "preprocessing_num_workers")


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
    data.add_argument(
        "--packing", action="store_true", help="several dialogues share a row of --max_seq_len, each by itself"
    )
    data.add_argument("--eot_token", default=EOT_TOKEN, help="the end token that --add_eot_token stands for")
    data.add_argument("--train_on_prompt", action="store_true", help="train on the prompt's tokens too")
    model_group(parser)
    training_group(parser, learning_rate=1e-3)
    lora_group(parser)
    evaluation_group(parser)
    output = output_group(parser)
    output.add_argument("--print_loss", action="store_true", help="print the loss of every step")
    scale_group(parser)
    return parser


def reward_parser() -> Parser:
    """Flags of step 2, the reward model."""
    parser = Parser("rlhf reward", "Step 2: a reward model from pairs of answers, or single answers with a number.")
    data = data_group(parser, "reward")
    data.add_argument(
        "--single_answers",
        choices=("auto", "pair", "label", "score"),
        default="auto",
        help="what an answer with a number of its own is: of a pair, a label, a score; auto: see the README",
    )
    model_group(parser)
    training = training_group(parser, learning_rate=5e-5)
    training.add_argument(
        "--pair_loss",
        choices=("end", "token"),
        default="end",
        help="compare scores at the last token, or the mean over tokens from the first difference on",
    )
    training.add_argument(
        "--margin_scale",
        type=non_negative_float,
        default=0.0,
        help="factor of the data's margins, by which chosen answers must be better; 1 takes them as they are",
    )
    lora_group(parser)
    evaluation = evaluation_group(parser)
    evaluation.add_argument(
        "--eval_iters", type=positive_int, default=100, help="most batches in one evaluation"
    )
    output_group(parser)
    scale_group(parser)
    inert_padding(parser)
    return parser


def dpo_parser() -> Parser:
    """Flags of DPO, which may stand in for steps 2 and 3."""
    parser = Parser("rlhf dpo", "DPO: learn from pairs of answers without a reward model.")
    data_group(parser, "reward")
    model_group(parser, dropout="dropout in training; none when not given, so that the first loss is log 2")
    training = training_group(parser, learning_rate=1e-3)
    training.add_argument(
        "--beta", type=positive_float, default=0.1, help="how strongly the policy is held to the reference"
    )
    training.add_argument(
        "--label_smoothing", type=half, default=0.0, help="share of pairs taken to be the wrong way round, below 0.5"
    )
    lora_group(parser)
    evaluation_group(parser)
    output_group(parser)
    scale_group(parser)
    return parser


STAGE_PARSERS: dict[str, Callable[[], Parser]] = {
    "sft": sft_parser,
    "reward": reward_parser,
    "dpo": dpo_parser,
    "ppo": ppo_parser,
}
