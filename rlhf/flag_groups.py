"""The groups of command-line flags that several stages share; each function adds its group to a parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from rlhf.flags import Parser, fraction, non_negative_float, non_negative_int, positive_int

LORA_BLOCKS = "decoder.layers."  # what DeepSpeed-Chat's default finds in OPT; `rlhf.lora` takes it for any family's
EOT_TOKEN = "<|endoftext|>"
SCHEDULES = ("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup")


def model_group(parser: Parser, dropout: str = "dropout in training; the model's own when not given") -> None:
    add = parser.add_argument_group("model").add_argument
    add(
        "--model_name_or_path",
        required=True,
        help="Hugging Face folder or name, or a recipe such as recipe:llama-1m",
    )
    add("--dropout", type=fraction, help=dropout)
    add("--disable_dropout", dest="dropout", action="store_const", const=0.0, help="an older name of --dropout 0")
    eot_flag(add)


def eot_flag(add: Callable[..., argparse.Action], token: str = EOT_TOKEN) -> None:
    add(
        "--add_eot_token",
        action="store_true",
        help=f"end answers with {token}, as one token; without it with the tokenizer's own end token",
    )


def training_group(parser: Parser, learning_rate: float) -> argparse._ArgumentGroup:
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
    shared_training(add)
    add("--gradient_checkpointing", action="store_true", help="recompute activations to save memory")
    return group


def shared_training(add: Callable[..., argparse.Action]) -> None:
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


def lora_group(parser: Parser, models: tuple[str, ...] = ("",)) -> None:
    """`models`: prefixes of the flags of each model that can have adapters, such as `actor_`."""
    add = parser.add_argument_group("LoRA").add_argument
    for model in models:
        add(f"--{model}lora_dim", type=non_negative_int, default=0, help="rank of the adapters; 0: none")
        add(
            f"--{model}lora_module_name",
            default=LORA_BLOCKS,
            metavar="PART",
            help="part of the adapted layers' names, or several by commas; default: all in any family's blocks",
        )
        rate = {"type": non_negative_float, "default": 5e-4}
        add(f"--{model}lora_learning_rate", **rate, help="peak rate of the adapters; all else has the stage's own")
    add(
        "--only_optimize_lora",
        action="store_true",
        help="with adapters, train them alone (and a score head); without this the unadapted rest trains too",
    )


def evaluation_group(parser: Parser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("evaluation")
    add = group.add_argument
    add("--per_device_eval_batch_size", type=positive_int, default=16, help="rows per process and batch")
    add("--eval_interval", type=non_negative_int, default=0, help="steps between evaluations; 0: every epoch")
    return group


def output_group(parser: Parser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("output")
    add = group.add_argument
    add("--output_dir", required=True, help="folder of the model, metrics and checkpoints")
    add("--dry_run", action="store_true", help="print flags, batches, steps and memory of a process, and stop")
    add("--save_interval", type=non_negative_int, default=0, help="steps between checkpoints; 0: none")
    add("--resume", action="store_true", help="go on from the latest checkpoint in --output_dir")
    add("--enable_tensorboard", action="store_true", help="write TensorBoard events")
    add("--tensorboard_path", help="folder of the events; OUTPUT_DIR/tensorboard when not given")
    return group


def add_inference_dtype(add: Callable[..., argparse.Action]) -> None:
    _dtype(add, "type of weights and arithmetic")


def _dtype(add: Callable[..., argparse.Action], what: str) -> None:
    kinds = ("auto", "fp16", "bf16", "fp32")
    add("--dtype", choices=kinds, default="auto", help=f"{what}; auto: bf16 or fp16 on a GPU, fp32 on a CPU")


def dtype_and_inert(add: Callable[..., argparse.Action]) -> None:
    _dtype(add, "compute type, over fp32 master weights")
    add("--offload", action="store_true", help="keep optimizer states in CPU memory (ZeRO 1 to 3), in 3 parameters too")
    add("--deepspeed", action="store_true", help="accepted and not needed: the engine is always on")
    add("--deepspeed_config", metavar="FILE", help="DeepSpeed JSON over what the flags make; given flags win")
    add("--local_rank", type=int, default=-1, help="accepted and not needed: torchrun sets it")
    add("--compute_fp32_loss", action="store_true", help="accepted and not needed: losses are always fp32")


def scale_group(parser: Parser) -> None:
    add = parser.add_argument_group("scale").add_argument
    add("--zero_stage", type=int, choices=(0, 1, 2, 3), default=0, help="what is sharded over processes")
    dtype_and_inert(add)


def inert_padding(parser: Parser) -> None:
    text = "accepted and not needed: padding is known from masks"
    parser.add_argument_group("compatibility").add_argument(
        "--num_padding_at_beginning", type=int, default=1, help=text
    )


def unquantized(add: Callable[..., argparse.Action]) -> None:
    text = "accepted and not needed: frozen weights travel in the compute type"
    add("--enable_mixed_precision_lora", action="store_true", help=text)


def per_model(add: Callable[..., argparse.Action], name: str, *, help: str, **options) -> None:
    """One flag for the actor and the same for the critic."""
    for model in ("actor", "critic"):
        add(f"--{model}_{name}", help=help.format(model), **options)
