"""``rlhf run``: SFT, reward model and PPO, one after the other, each in processes of its own.

A stage that is complete with the same arguments is not run again; one that was cut short goes on from its
last checkpoint, if it has one. The first failure stops the run with its true cause. Into OUTPUT go ``sft/``,
``reward/``, ``ppo/``, ``summary.json`` and ``report.html``.
"""

from __future__ import annotations

import re
import shlex
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from rich.console import Console

from rlhf import pipeline_recipes, report
from rlhf.arguments import STAGE_PARSERS, parse
from rlhf.choices import ESTIMATORS
from rlhf.flags import Parser, flags_of, spelled
from rlhf.launch import run_stage
from rlhf.launch_flags import Nodes, add_launch_flags, launch_plan
from rlhf.pipeline_state import changed_arguments, has_checkpoint, is_newer, read_run, remove_checkpoints
from rlhf.ppo_options import resolve_options

STAGES = ("sft", "reward", "ppo")
TITLES = {"sft": "SFT", "reward": "reward model", "ppo": "PPO"}
PASS_THROUGH = tuple(f"--{stage}-args" for stage in STAGES)
BATCH_SIZES = (
    "per_device_train_batch_size",
    "per_device_generation_batch_size",
    "per_device_training_batch_size",
)


GOES_ON = "goes on from its last checkpoint"


@dataclass(frozen=True)
class Step:
    """One stage as it will be run: its number from 1, its folder, its command line and what that reads as."""

    number: int
    stage: str
    folder: Path
    argv: list[str]
    args: Namespace

    @property
    def title(self) -> str:
        return f"Step {self.number} ({TITLES[self.stage]})"


def parser() -> Parser:
    """Flags of ``rlhf run``: DeepSpeed-Chat's launcher's, and a few of our own."""
    result = Parser("rlhf run", "The whole pipeline. Without flags: a small model on the bundled dialogues.")
    add = result.add_argument_group("what").add_argument
    add("--step", type=int, nargs="+", choices=(1, 2, 3), default=[1, 2, 3], help="1 SFT, 2 reward, 3 PPO")
    add(
        "--actor-model",
        default=pipeline_recipes.SAMPLE_MODEL,
        help="folder or hub name, a size of OPT such as 1.3b, or a recipe",
    )
    add("--reward-model", help="the same, for the reward model; starts from the SFT model when not given")
    source = pipeline_recipes.SAMPLE_DATA
    add("--data-path", nargs="+", default=[source], metavar="SOURCE", help="files, folders or hub names")
    add("--output-dir", default="./output", help="folder of all results")
    add(
        "--advantage_estimator", choices=ESTIMATORS, default="gae", help="of PPO; all but gae train without a critic"
    )
    add("--seed", type=int, default=1234, help="seed of all three stages")
    add("--dry_run", action="store_true", help="print each stage's plan: flags, batches, steps, memory; and stop")
    add = result.add_argument_group("how").add_argument
    zero = {"choices": ("", "0", "1", "2", "3"), "default": ""}
    add("--actor-zero-stage", **zero, help="of SFT and PPO's actor; 3 with several processes, else 0")
    add("--reward-zero-stage", **zero, help="of the reward model and PPO's critic; likewise")
    deployment = ("single_gpu", "single_node", "multi_node")
    add(
        "--deployment-type",
        choices=deployment,
        default="single_node",
        help="one process, one machine, several",
    )
    for stage in STAGES:
        add(f"--{stage}-args", default="", help=f'flags of the {stage} stage, e.g. "--max_steps 10"')
    add_launch_flags(result)
    return result


def main(argv: Sequence[str]) -> None:
    """Run the pipeline that the flags ask for.

    Raises:
        StageFailed: a stage did not end well; later ones were not started.
        ValueError, FileNotFoundError: what was asked for cannot be run.
    """
    flags = parser()
    args = parse(flags, join_pass_through(spelled(argv, flags_of(flags))))
    if args.deployment_type == "multi_node" and args.nnodes < 2:
        raise ValueError("--deployment-type multi_node needs --nnodes, --node_rank and --master_addr")
    if args.deployment_type == "single_gpu":
        args.nproc = 1
    nproc, nodes = launch_plan(args)
    steps = plan(args, nproc * nodes.count)
    if args.dry_run:
        return dry_run(args, steps, nproc * nodes.count)
    run(steps, Path(args.output_dir), nproc, nodes)


def plan(args: Namespace, world_size: int) -> list[Step]:
    """The steps to run, every flag checked, before any of them starts."""
    output = Path(args.output_dir)
    actor_zero = args.actor_zero_stage or ("3" if world_size > 1 else "0")
    reward_zero = args.reward_zero_stage or ("3" if world_size > 1 else "0")
    actor = model_name(args.actor_model)
    shared = {"data_path": args.data_path, "seed": args.seed}
    wiring = {
        "sft": {**shared, "model_name_or_path": actor, "zero_stage": actor_zero},
        "reward": {
            **shared,
            "model_name_or_path": model_name(args.reward_model) if args.reward_model else output / "sft",
            "zero_stage": reward_zero,
        },
        "ppo": {
            **shared,
            "actor_model_name_or_path": output / "sft",
            "critic_model_name_or_path": output / "reward",
            "actor_zero_stage": actor_zero,
            "critic_zero_stage": reward_zero,
            "advantage_estimator": args.advantage_estimator,
        },
    }
    numbers = pipeline_recipes.recipe(actor, args.data_path, world_size, args.advantage_estimator)
    steps = []
    for number in sorted(set(args.step)):
        stage = STAGES[number - 1]
        flags = {**_divided(numbers[stage], world_size), **wiring[stage], "output_dir": output / stage}
        own = shlex.split(getattr(args, f"{stage}_args"))
        argv = [*_words(flags), *own]
        parsed = parse(STAGE_PARSERS[stage](), argv, world_size)
        if stage == "ppo":
            resolve_options(parsed)  # as the stage records them in its run.json
        steps.append(Step(number, stage, output / stage, argv, parsed))
    return steps


def run(steps: Sequence[Step], output: Path, nproc: int, nodes: Nodes) -> None:
    """Run the steps in order and report on them."""
    console = Console(soft_wrap=True, highlight=False)
    output.mkdir(parents=True, exist_ok=True)
    _check_inputs(steps, output)
    main_node = nodes.rank == 0
    seconds = report.read_seconds(output)
    ran: set[Path] = set()
    for step in steps:
        words = step.argv
        verdict = _verdict(step, output, ran)
        if verdict == "complete":
            console.print(f"{step.title} is complete in {step.folder}: not run again")
            continue
        console.print(f"[bold]Running {step.title}[/bold]{verdict and f': {verdict}'}")
        if verdict == GOES_ON:
            words = [*words, "--resume"]
        elif main_node and not step.args.resume:
            remove_checkpoints(step.folder)
        started = time.monotonic()
        run_stage(step.stage, words, nproc, nodes)
        ran.add(step.folder)
        seconds[step.stage] = time.monotonic() - started
        console.print(f"Finished {step.title} in {timedelta(seconds=round(seconds[step.stage]))}\n")
        if main_node:
            report.write_summary(output, seconds)
    if main_node:
        report.write(output, seconds, console)


def dry_run(args: Namespace, steps: Sequence[Step], ranks: int) -> None:
    """Print every step's plan; what an earlier step will have made is planned as the model it starts from."""
    from rlhf.dry_run import dry_run as print_plan  # builds models, and takes seconds to import

    output, actor = Path(args.output_dir), model_name(args.actor_model)
    reward = model_name(args.reward_model) if args.reward_model else actor
    for step in steps:
        print(f"--- {step.title}", flush=True)
        print_plan(step.stage, step.args, ranks, {str(output / "sft"): actor, str(output / "reward"): reward})


def _verdict(step: Step, output: Path, ran: set[Path]) -> str:
    """``complete``, ``GOES_ON``, or what to say beside the header of a stage that starts anew."""
    before = read_run(step.folder)
    if before is None:
        return ""
    changed = changed_arguments(before, vars(step.args))
    inputs = [output / stage for stage in STAGES[: step.number - 1] if _reads(step, output / stage)]
    if changed:
        return f"ran before with other arguments ({changed})"
    if any(folder in ran or is_newer(folder, step.folder) for folder in inputs):
        return "ran before, and what it starts from has changed"
    if before.get("status") == "complete":
        return "complete"
    return GOES_ON if has_checkpoint(step.folder) else ""


def _check_inputs(steps: Sequence[Step], output: Path) -> None:
    """A step that starts from an earlier one's result needs that step in this run or complete on disk."""
    running = {step.stage for step in steps}
    for step in steps:
        for number, stage in enumerate(STAGES[: step.number - 1], start=1):
            folder = output / stage
            if stage not in running and _reads(step, folder):
                if (read_run(folder) or {}).get("status") != "complete":
                    raise FileNotFoundError(
                        f"{step.title} starts from {folder}, which is not complete: run --step {number} first"
                    )


def _reads(step: Step, folder: Path) -> bool:
    names = ("model_name_or_path", "actor_model_name_or_path", "critic_model_name_or_path")
    return str(folder) in [getattr(step.args, name, None) for name in names]


def model_name(name: str) -> str:
    """DeepSpeed-Chat's launcher names OPT models by size alone: ``1.3b`` is ``facebook/opt-1.3b``."""
    return (
        f"facebook/opt-{name}" if re.fullmatch(r"\d+(\.\d+)?[mb]", name) and not Path(name).exists() else name
    )


def _divided(flags: pipeline_recipes.Flags, world_size: int) -> pipeline_recipes.Flags:
    return {
        name: max(1, value // world_size) if name in BATCH_SIZES else value for name, value in flags.items()
    }


def _words(flags: pipeline_recipes.Flags) -> list[str]:
    words: list[str] = []
    for name, value in flags.items():
        if isinstance(value, bool):
            words += [f"--{name}"] if value else []
        elif isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        else:
            words += [f"--{name}", str(value)]
    return words


def join_pass_through(argv: Sequence[str]) -> list[str]:
    """``--sft-args "--resume"`` as one word: argparse would take the value for a flag."""
    words: list[str] = []
    for word in argv:
        if words and words[-1] in PASS_THROUGH:
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words
