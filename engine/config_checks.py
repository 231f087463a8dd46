"""Checks of a config across its keys, and its errors as one line each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

if TYPE_CHECKING:
    from engine.config import EngineConfig


def solve_batch(config: EngineConfig, world_size: int) -> dict[str, int]:
    """The three batch sizes by DeepSpeed's rule, from whichever are given.

    train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks. Of two given
    ones the third follows; one alone takes an accumulation of 1. A config that gives no batch size is only
    accepted without an optimizer (a forward-only engine, or an optimizer of the caller's own), with a
    micro-batch of 1.

    Raises:
        ValueError: nothing to solve from, or a product that does not hold, with the product and rank count.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}: it counts ranks, so it is at least 1")
    train = config.train_batch_size
    micro = config.train_micro_batch_size_per_gpu
    accumulation = config.gradient_accumulation_steps
    if train is None and micro is None:
        if config.optimizer is not None and config.optimizer.type is not None:
            raise ValueError(
                "config gives neither train_batch_size nor train_micro_batch_size_per_gpu: give one of them"
            )
        micro = 1
    if train is not None and micro is not None and accumulation is None:
        accumulation = train // micro // world_size
    elif train is not None and micro is None:
        accumulation = accumulation or 1
        micro = train // world_size // accumulation
    accumulation = 1 if accumulation is None else accumulation
    if train is None:
        train = micro * accumulation * world_size
    product = micro * accumulation * world_size
    if product != train:
        raise ValueError(
            f"train_batch_size {train} is not train_micro_batch_size_per_gpu {micro} x "
            f"gradient_accumulation_steps {accumulation} x {world_size} ranks = {product}: "
            "change one of them or leave one out"
        )
    return {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }


def cross_check(config: EngineConfig, world_size: int) -> list[str]:
    """Keys of the config that have no effect beside its others.

    Raises:
        ValueError: two keys, or a key and the rank count, contradict each other.
    """
    if config.fp16.enabled and config.bf16.enabled:
        raise ValueError("fp16.enabled and bf16.enabled are both true: enable one of them")
    if config.fp16.loss_scale == 0 and config.fp16.min_loss_scale > 2.0**config.fp16.initial_scale_power:
        raise ValueError(
            f"fp16.min_loss_scale {config.fp16.min_loss_scale} is above the first scale 2 to the power of "
            f"fp16.initial_scale_power {config.fp16.initial_scale_power}: lower the one or raise the other"
        )
    zero, hybrid = config.zero_optimization, config.hybrid_engine
    if hybrid.enabled and world_size % hybrid.inference_tp_size:
        raise ValueError(
            f"hybrid_engine.inference_tp_size {hybrid.inference_tp_size} does not divide the "
            f"{world_size} ranks: use a divisor"
        )
    if zero.stage == 3 and zero.zero_hpz_partition_size > 1 and world_size % zero.zero_hpz_partition_size:
        raise ValueError(
            f"zero_optimization.zero_hpz_partition_size {zero.zero_hpz_partition_size} does not divide the "
            f"{world_size} ranks: use a divisor"
        )
    without_effect = {
        "offload_param": zero.offload_param.device != "none" and not zero.offloads_parameters,
        "offload_optimizer": zero.offload_optimizer.device != "none" and not zero.offloads_optimizer,
        "zero_hpz_partition_size": zero.zero_hpz_partition_size > 1 and zero.stage < 3,
    }
    unused = [f"zero_optimization.{key} (at stage {zero.stage})" for key, is_so in without_effect.items() if is_so]
    # Sharded gradients are divided by FSDP2 in its own order; DeepSpeed refuses both keys beside reduce_scatter.
    order = {"prescale_gradients": config.prescale_gradients, "gradient_predivide_factor": _predivides(config)}
    return unused + [f"{key} (at stage {zero.stage})" for key, is_so in order.items() if is_so and zero.stage > 0]


def _predivides(config: EngineConfig) -> bool:
    return config.gradient_predivide_factor != 1.0


def one_line(error: ValidationError) -> str:
    """The first of the schema's complaints: key, value, what is allowed; and how many more there are."""
    problems = error.errors(include_url=False)
    first = problems[0]
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if first["type"] == "value_error" and isinstance(first["input"], dict):
        return f"{first['ctx']['error']}{more}"  # the check of a whole section names its key itself
    key = ".".join(str(part) for part in first["loc"])
    return f"config key {key} is {_shown(first['input'])}: {_allowed(first)}{more}"


def _allowed(problem: dict[str, Any]) -> str:
    context = problem.get("ctx", {})
    match problem["type"]:
        case "value_error":
            return str(context["error"])
        case "greater_than_equal":
            return f"use a number of {context['ge']} or more"
        case "greater_than":
            return f"use a number above {context['gt']}"
        case "less_than_equal":
            return f"use a number of at most {context['le']}"
        case "int_type" | "int_parsing" | "int_from_float":
            return "use a whole number"
        case "float_type" | "float_parsing":
            return "use a number"
        case "bool_type" | "bool_parsing":
            return "use true or false"
        case "model_type" | "dict_type":
            return "use a JSON object"
        case "string_type":
            return "use a text"
    return problem["msg"].replace("\n", " ").replace("Input should be", "use")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
