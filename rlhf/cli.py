"""The ``rlhf`` command: ``run``, the stages, ``eval``, ``chat``, ``report``, ``data inspect``.

Whatever fails ends in one line on standard error, ``error: …``, and a status other than 0: 2 for a command
line that cannot be read, 128 plus the signal's number after an interruption, 1 for the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from rlhf.arguments import STAGE_PARSERS, nearest, parse
from rlhf.failure import is_user_error, one_line
from rlhf.launch import Interrupted, StageFailed, run_stage
from rlhf.launch_flags import add_launch_flags, take_launch_flags

USAGE = """\
usage: rlhf COMMAND [flags]

  run            the whole pipeline: SFT, reward model, PPO; without flags on the bundled sample
  sft            step 1 alone: supervised fine-tuning
  reward         step 2 alone: the reward model
  dpo            preferences without a reward model, in place of steps 2 and 3
  ppo            step 3 alone: PPO
  eval           rlhf eval reward: a reward model on pairs;  rlhf eval prompts: two models side by side
  chat           talk to a model:  rlhf chat --path OUTPUT/ppo/actor
  report         draw a run's report again:  rlhf report OUTPUT
  data           what a source holds and what would be dropped:  rlhf data inspect SOURCE

`rlhf COMMAND --help` lists the flags of each.
"""
COMMANDS = ("run", "sft", "reward", "dpo", "ppo", "eval", "chat", "report", "data")


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command; returns only when all of it was done."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        _dispatch(argv)
    except StageFailed as failure:
        _show_cursor()
        _fail(str(failure), 1, failure.details)
    except Interrupted as stop:
        _show_cursor()
        _fail(str(stop), 128 + stop.signum)
    except KeyboardInterrupt:
        _fail("stopped by SIGINT", 130)
    except (ValueError, OSError) as error:
        if not is_user_error(error):
            raise
        _fail(one_line(error), 1)


def _dispatch(argv: list[str]) -> None:
    command, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if command in ("-h", "--help", "help"):
        print(USAGE, end="")
    elif command in STAGE_PARSERS:
        _stage(command, rest)
    elif command == "run":
        from rlhf import pipeline

        pipeline.main(rest)
    elif command == "chat":
        from rlhf import chat

        chat.main(rest)
    elif command == "report":
        from rlhf import report

        report.main(rest)
    elif command == "eval":
        _eval(rest)
    elif command == "data":
        _data(rest)
    else:
        _fail(f"rlhf: unknown command {command}{nearest(command, COMMANDS)} (rlhf --help lists them all)", 2)


def _data(rest: list[str]) -> None:
    if rest[:1] in (["-h"], ["--help"]):
        print("usage: rlhf data inspect SOURCE...   (rlhf data inspect --help lists the flags)")
        raise SystemExit(0)
    elif rest[:1] == ["inspect"]:
        from data import inspection

        inspection.main(rest[1:])
    else:
        _fail("rlhf data knows one command: rlhf data inspect SOURCE", 2)


def _eval(rest: list[str]) -> None:
    if rest[:1] == ["reward"]:
        from rlhf import eval_reward

        eval_reward.main(rest[1:])
    elif rest[:1] == ["prompts"]:
        from rlhf import eval_prompts

        eval_prompts.main(rest[1:])
    elif rest[:1] in (["-h"], ["--help"]):
        print("usage: rlhf eval reward|prompts [flags]   (rlhf eval reward --help lists the flags)")
        raise SystemExit(0)
    else:
        _fail("rlhf eval knows two commands: rlhf eval reward and rlhf eval prompts", 2)


def _stage(stage: str, argv: list[str]) -> None:
    parser = STAGE_PARSERS[stage]()
    add_launch_flags(parser)
    parse(parser, argv)  # here, so that a slip is answered before any process starts
    nproc, nodes, rest = take_launch_flags(argv)
    args = parse(parser, argv, nproc * nodes.count)
    if args.dry_run:
        from rlhf.dry_run import dry_run

        return dry_run(stage, args, nproc * nodes.count)
    run_stage(stage, rest, nproc, nodes)


def _show_cursor() -> None:
    """A progress bar that was killed leaves the cursor hidden, and its line open."""
    if sys.stdout.isatty():
        print("\x1b[?25h", flush=True)


def _fail(line: str, status: int, details: str = "") -> NoReturn:
    print(f"{details}error: {line}", file=sys.stderr, flush=True)
    raise SystemExit(status)
