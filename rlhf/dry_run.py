"""`--dry_run`: what a stage would do, without doing it: the flags that are not their defaults, the batches, the steps,
and the memory of a rank by model and kind. Needs no weights and no accelerator, and writes nothing.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from data import open_source
from data.sources import JSONFILE, dealt_sources
from data.splits import hold_out, split_bounds
from engine.config import EngineConfig
from engine.memory import estimate_memory
from engine.precision import compute_dtype
from rlhf.arguments import STAGE_PARSERS
from rlhf.dry_run_models import Planned, planned_models
from rlhf.gold import load_gold
from rlhf.ppo_options import answers_per_iteration, count_ppo_steps, resolve_options
from rlhf.ptx import text_source
from rlhf.steps import count_steps

GIB = 1024**3
PART = {"sft": 0, "reward": 1, "dpo": 1, "ppo": 2}  # of --data_split
KINDS = ("parameters", "masters", "gradients", "moments", "working")


def dry_run(
    stage: str, args: Namespace, ranks: int | None = None, stand_ins: Mapping[str, str] | None = None
) -> None:
    """Print the plan of a run on `ranks` processes (default: as many as torchrun started); rank 0 prints.

    Args:
        stand_ins: models by the names of folders that are not there yet, because an earlier stage makes them.

    Raises:
        FileNotFoundError, ValueError: what the run itself would stop at: a model, data or function that is not there,
            flags or a config that contradict each other. One line.
    """
    ranks = ranks or int(os.environ.get("WORLD_SIZE", "1"))
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(plan(stage, args, ranks, stand_ins or {})), flush=True)


def plan(stage: str, args: Namespace, ranks: int, stand_ins: Mapping[str, str]) -> list[str]:
    """The lines that `dry_run` prints."""
    if stage == "ppo":
        resolve_options(args)
        _look_up(args)
    models = planned_models(stage, args, stand_ins)
    processes = "process" if ranks == 1 else "processes"
    lines = [f"dry run of {stage} on {ranks} {processes}: nothing is trained or written", "", "flags:"]
    lines += [f"  {name}  {value}" for name, value in _given(stage, args)]
    lines += ["", "batches:", *_indent(_batches(stage, args, ranks))]
    lines += ["", "steps:", *_indent(_steps(stage, args, ranks))]
    with_average = getattr(args, "enable_ema", False)
    lines += ["", "memory of a process, GiB, before activations:", *_indent(_memory(models, ranks, with_average))]
    if stage == "ppo":
        lines += _indent(_generation(models[0], args, ranks))
    return lines


def _look_up(args: Namespace) -> None:
    """Raises FileNotFoundError or ValueError where a function or the texts that PPO's flags name cannot be had."""
    for spec in (args.reward_fn, args.gold_fn):
        if spec:
            load_gold(spec)
    name = args.unsupervised_dataset_name
    if name and _is_here(name):
        open_source(text_source(name, args.unsupervised_dataset_config_name))


def _given(stage: str, args: Namespace) -> list[tuple[str, object]]:
    """(flag, value) of all that is not its default."""
    defaults = {action.dest: action.default for action in STAGE_PARSERS[stage]()._actions}
    skipped = {"dry_run", "config"}
    values = ((name, value) for name, value in vars(args).items() if name in defaults and name not in skipped)
    return [
        (f"--{name}", " ".join(map(str, value)) if isinstance(value, list) else value)
        for name, value in values
        if value != defaults[name]
    ]


def _batches(stage: str, args: Namespace, ranks: int) -> list[str]:
    accumulation = args.gradient_accumulation_steps
    if stage != "ppo":
        micro = args.per_device_train_batch_size
        rows = micro * accumulation * ranks
        return [f"{micro} rows x {accumulation} micro-batches x {ranks} processes = {rows} rows an update"]
    prompts, batches = args.per_device_generation_batch_size, args.generation_batches
    samples, answers = args.num_samples_per_prompt, answers_per_iteration(args)
    micro = args.per_device_training_batch_size
    each, update = -(-answers // micro), micro * accumulation * ranks
    return [
        f"{prompts} prompts x {samples} answers x {batches} generation batches x {ranks} processes = "
        f"{answers * ranks} answers an iteration",
        f"{micro} answers x {accumulation} micro-batches x {ranks} processes = {update} answers an update",
        f"{each} micro-batches x {args.ppo_epochs} epochs / {accumulation} = "
        f"{each * args.ppo_epochs / accumulation:g} updates an iteration",
    ]


def _steps(stage: str, args: Namespace, ranks: int) -> list[str]:
    rows, lines = _rows(stage, args)
    if rows is None:
        limit = f"at most --max_steps {args.max_steps}" if args.max_steps else "known when the data is read"
        return [*lines, f"optimizer steps: {limit}"]
    if args.streaming:
        count = count_ppo_steps(None, 0, args) if stage == "ppo" else count_steps(None, args)
        return [*lines, f"a stream of about {rows} rows, pass after pass: {count} optimizer steps"]
    try:
        if stage == "ppo":
            prompts = args.per_device_generation_batch_size * args.generation_batches
            steps = count_ppo_steps(rows // (prompts * ranks), answers_per_iteration(args), args)
        else:
            steps = count_steps(rows // (args.per_device_train_batch_size * ranks), args)
    except ValueError as error:
        return [*lines, f"about {rows} rows: {error}"]
    return [*lines, f"about {rows} rows x {args.num_train_epochs} epochs make {steps} optimizer steps"]


def _rows(stage: str, args: Namespace) -> tuple[int | None, list[str]]:
    """Training rows before any is dropped, and a line for each source; None when one is not on this machine."""
    only = getattr(args, "sft_only_data_path", ())
    total: int | None = 0
    lines = []
    for source, ratios in dealt_sources("sft" if stage == "sft" else "reward", args.data_path, args.data_split, only,
                                        args.data_format):  # fmt: skip
        if not _is_here(source.name):
            lines.append(f"{source.name}: on the hub, not looked at")
            total = None
            continue
        opened = open_source(source)
        count = opened.train.count()
        bounds = split_bounds(count, ratios)
        part = range(bounds[PART[stage]], bounds[PART[stage] + 1])
        train = part if opened.eval is not None else hold_out(part, args.eval_fraction)[0]
        used = int(len(train) * source.weight + 0.5)
        lines.append(f"{source.name}: {count} rows, {used} of them to train on in this stage")
        total = None if total is None else total + used
    return total, lines


def _is_here(name: str) -> bool:
    """A hub name is not: to ask the network is not a dry run's business. What looks like a path must be there."""
    if name in ("sample", JSONFILE) or Path(name).expanduser().exists():
        return True
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or bool(Path(name).suffix)


def _memory(models: list[Planned], ranks: int, with_average: bool) -> list[str]:
    """A row for each model, and what they need together; with the moving average of the first where one is kept."""
    head = ["model", "size", "trains", "ZeRO", "type", "weights", *KINDS[1:], "in all", "of it on the host"]
    table, device = [head], 0
    for model in models:
        config = EngineConfig.load(model.config, ranks)
        estimate = estimate_memory(model.module, config, ranks)
        device += estimate.device
        stage, kind = str(config.zero_optimization.stage), str(compute_dtype(config)).removeprefix("torch.")
        sizes = [getattr(estimate, name) for name in KINDS] + [estimate.total, estimate.host]
        trained = _count(model.trained) if model.trained else "no"
        table.append([model.name, _count(model.numel), trained, stage, kind, *map(_gib, sizes)])
        if with_average and model is models[0]:
            # kept as the optimizer keeps each of Adam's two moments
            average = estimate_memory(model.module, {**model.config, "optimizer": {"type": "Adam"}}, ranks).moments // 2
            device += average
            row = ["moving average", "", "no", stage, "float32", _gib(average)]
            table.append([*row, *["0.00"] * 4, _gib(average), "0.00"])
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    return [*lines, f"all models on the device: {_gib(device)} GiB"]


def _generation(actor: Planned, args: Namespace, ranks: int) -> list[str]:
    """What generation needs on top while it runs: the weights laid out for it, and keys and values of all answers."""
    config = EngineConfig.load(actor.config, ranks)
    width, shape, tp = compute_dtype(config).itemsize, actor.shape, args.inference_tp_size
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    size = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    answers = args.per_device_generation_batch_size * args.num_samples_per_prompt
    tokens = answers * (args.max_prompt_seq_len + args.max_answer_seq_len)
    cache = 2 * shape.num_hidden_layers * heads * size * tokens * width
    return [
        f"generation over {tp} process{'es' if tp > 1 else ''}: weights {_gib(actor.numel * width // tp)} GiB, "
        f"keys and values at most {_gib(cache)} GiB"
    ]


def _count(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def _indent(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]
