"""``rlhf chat --path FOLDER``: talk to a model in the terminal.

Answers appear as they are made, and earlier turns are remembered. ``/clear`` forgets them, ``/quit`` or
Ctrl-D ends (``clear`` and ``quit`` alone do so too, as in DeepSpeed-Chat), Ctrl-C cuts an answer short. Lines
piped into it are answered one after the other: ``echo "Hello" | rlhf chat --path FOLDER``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from rlhf.arguments import parse
from rlhf.flag_groups import add_inference_dtype
from rlhf.flags import Parser, non_negative_float, positive_fraction, positive_int

NEXT_TURN = (
    "\n\nHuman:"  # a model that was never taught to stop goes on as the other side: not part of its answer
)
HELP = "/clear forgets the conversation, /quit ends, Ctrl-C cuts an answer short"
Turns = list[dict[str, str]]
# Answers the turns piece by piece through the callback, and returns the whole answer.
Answer = Callable[[Turns, Callable[[str], None]], str]


class TooLong(ValueError):
    """A question that does not fit into the model's context."""


class _NextTurn(Exception):
    """The model has gone on as the other side: enough."""


def parser() -> Parser:
    """Flags of ``rlhf chat``."""
    result = Parser(
        "rlhf chat", "Talk to a model in the terminal. " + HELP + ".", "%(prog)s --path FOLDER [flags]"
    )
    result.add_argument(
        "--path", required=True, metavar="FOLDER", help="Hugging Face folder or name of the model"
    )
    result.add_argument("--max_new_tokens", type=positive_int, default=128, help="longest answer, tokens")
    result.add_argument(
        "--temperature", type=non_negative_float, default=0.7, help="0 is the same as --greedy"
    )
    result.add_argument(
        "--top_p", type=positive_fraction, default=0.95, help="share of the probability to sample in"
    )
    result.add_argument("--greedy", action="store_true", help="always the likeliest token")
    result.add_argument("--seed", type=int, default=1234, help="of the sampling")
    add_inference_dtype(result.add_argument)
    return result


def main(argv: Sequence[str]) -> None:
    """Run the chat until its input ends.

    Raises:
        FileNotFoundError, ValueError: there is no chat model in the folder.
    """
    args = parse(parser(), argv)
    answer = load(args)
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        import readline  # noqa: F401  line editing and history for input()

        print(f"{args.path}: {HELP}")
    converse(answer, _lines(interactive), sys.stdout, interactive)


def converse(answer: Answer, lines: Iterator[str], out: TextIO, interactive: bool) -> None:
    """The loop of a conversation: a line in, an answer out, until the lines end or ``/quit``."""
    turns: Turns = []

    def emit(piece: str) -> None:
        out.write(piece)
        out.flush()

    for line in lines:
        text = line.strip()
        if not text:
            continue
        if text in ("/quit", "quit"):
            break
        if text in ("/clear", "clear"):
            turns = []
            if interactive:
                emit("(cleared)\n")
            continue
        if text.startswith("/"):
            emit(f"unknown command {text}: {HELP}\n")
            continue
        turns.append({"role": "user", "content": text})
        try:
            reply = answer(turns, emit)
        except KeyboardInterrupt:
            turns.pop()
            emit("\n(cut short and forgotten)\n")
            continue
        except TooLong as error:
            turns.pop()
            emit(f"{error}\n")
            continue
        emit("\n")
        turns.append({"role": "assistant", "content": reply})


def visible(text: str, finished: bool) -> str:
    """The part of a growing answer that can be shown: nothing of a next turn, nothing that may begin one.

    Half a character (a byte-level tokenizer shows it as U+FFFD at the end) waits for its other half too.
    """
    cut = text.find(NEXT_TURN)
    if cut >= 0:
        return text[:cut].rstrip()
    if finished:
        return text.rstrip()
    text = text.rstrip("\ufffd")
    held = next((n for n in range(len(NEXT_TURN) - 1, 0, -1) if text.endswith(NEXT_TURN[:n])), 0)
    return text[: len(text) - held].rstrip()


def fitting(turns: Turns, encode: Callable[[Turns], list[int]], room: int) -> list[int]:
    """Token ids of the latest turns that fit in ``room`` tokens; the question itself always stays whole.

    Raises:
        TooLong: the question alone does not fit.
    """
    for first in range(0, len(turns), 2):
        ids = encode(turns[first:])
        if len(ids) <= room:
            return ids
    raise TooLong(f"the question has {len(ids)} tokens and the model has room for {room}: ask a shorter one")


def load(args: argparse.Namespace) -> Answer:
    """Load the model and return what answers with it, through the decoder that PPO generates with."""
    import torch

    from data.chat import decode_response, encode_prompt, stop_token_ids
    from engine.hybrid import Generator
    from rlhf.answering import default_device, inference_type
    from rlhf.models import load_actor, load_tokenizer

    tokenizer = load_tokenizer(args.path)
    device = default_device()
    model = load_actor(args.path, inference_type(args.dtype)).to(device).eval()
    generator = Generator(model)
    room = getattr(model.config, "max_position_embeddings", 2048) - args.max_new_tokens
    greedy = args.greedy or args.temperature == 0
    sampling = {} if greedy else {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p}
    seeds = itertools.count(args.seed)

    def answer(turns: Turns, emit: Callable[[str], None]) -> str:
        prompt = torch.tensor(
            [fitting(turns, lambda some: encode_prompt(tokenizer, some), room)], device=device
        )
        ids: list[int] = []
        shown = ""

        def show(finished: bool) -> None:
            nonlocal shown
            whole = decode_response(tokenizer, ids)
            text = visible(whole, finished)
            if text.startswith(shown):
                emit(text[len(shown) :])
                shown = text
            if NEXT_TURN in whole and not finished:
                raise _NextTurn

        def on_token(_row: int, token: int) -> None:
            ids.append(token)
            show(finished=False)

        with contextlib.suppress(_NextTurn):
            generator.generate(
                prompt,
                max_new_tokens=args.max_new_tokens,
                eos_token_id=stop_token_ids(tokenizer),
                pad_token_id=tokenizer.pad_token_id,
                seed=next(seeds),
                on_token=on_token,
                **sampling,
            )
        show(finished=True)
        return shown

    return answer


def _lines(interactive: bool) -> Iterator[str]:
    """The user's lines; the end of the input, or Ctrl-C while waiting for a line, ends them."""
    while True:
        try:
            line = input("you> ") if interactive else sys.stdin.readline()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not interactive and not line:
            return
        yield line
