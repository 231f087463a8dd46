"""Reading command lines: one-line errors that offer the nearest flag, YAML files of flags, number types.

Imports nothing heavy, so that a misspelt flag is answered at once.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn
from urllib.parse import urlsplit


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line on standard error, with exit status 2.

    Only rank 0 of a distributed run prints them.
    """

    def __init__(self, prog: str, description: str, usage: str = "%(prog)s [flags]"):
        super().__init__(
            prog, usage=usage, description=description, allow_abbrev=False, formatter_class=_HelpFormatter
        )

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {self.prog}: {message}", file=sys.stderr, flush=True)
        raise SystemExit(2)


class _HelpFormatter(argparse.HelpFormatter):
    """Short value names, and the default at the end of each help."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=42, width=110)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return getattr(action.type, "metavar", "N" if action.type is int else "TEXT")

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        if action.default in (None, argparse.SUPPRESS, [], "") or isinstance(action.default, bool):
            return text
        default = " ".join(map(str, action.default)) if isinstance(action.default, list) else "%(default)s"
        return f"{text} ({default})"


def parse(parser: Parser, argv: Sequence[str] | None = None, ranks: int | None = None) -> argparse.Namespace:
    """Read ``argv`` (default: this process's). Any error is one line and ``SystemExit(2)``.

    ``ranks``: processes that will share the work, as many as torchrun started when not given.
    """
    known = flags_of(parser)
    argv = spelled(sys.argv[1:] if argv is None else argv, known)
    # Looked at first: argparse would complain of a missing required flag before it names the misspelt one.
    for word in argv:
        name = word.split("=")[0]
        if name.startswith("--") and " " not in name and len(name) > 2 and name not in known:
            parser.error(f"unknown flag {name}{nearest(name, known)} (--help lists them all)")
    argv = [*_config_argv(parser, argv), *argv]
    ranks = ranks or int(os.environ.get("WORLD_SIZE", "1"))
    args, extra = parser.parse_known_args([*_deepspeed_argv(parser, argv, known, ranks), *argv])
    if extra:
        parser.error(f"unexpected argument {extra[0]!r}")
    return args


def spelled(argv: Sequence[str], known: Sequence[str]) -> list[str]:
    """``argv`` with every flag as its parser spells it: ``--output-dir`` and ``--output_dir`` mean the same."""
    folded = {flag.replace("_", "-"): flag for flag in known}
    words = []
    for word in argv:
        name, equals, value = word.partition("=")
        meant = folded.get(name.replace("_", "-"), name) if name.startswith("--") and name not in known else name
        words.append(meant + equals + value)
    return words


def flags_of(parser: argparse.ArgumentParser) -> list[str]:
    """Every long flag of a parser."""
    return [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]


def nearest(name: str, known: Sequence[str]) -> str:
    """``"; did you mean X?"`` for the known name closest to ``name``; an empty string when none is close."""
    folded = {option.replace("_", "-").lower(): option for option in known}
    close = difflib.get_close_matches(name.replace("_", "-").lower(), folded, n=1, cutoff=0.6)
    return f"; did you mean {folded[close[0]]}?" if close else ""


def _deepspeed_argv(parser: Parser, argv: list[str], known: Sequence[str], ranks: int) -> list[str]:
    """What the JSON of ``--deepspeed_config`` says of the flags, to be read before all others."""
    if "--deepspeed_config" not in known:
        return []
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--deepspeed_config")
    path = finder.parse_known_args(argv)[0].deepspeed_config
    if path is None:
        return []
    from rlhf import deepspeed_config

    try:
        return deepspeed_config.words(path, known, argv, ranks)
    except (ValueError, OSError) as error:
        parser.error(str(error))


def _config_argv(parser: Parser, argv: list[str]) -> list[str]:
    """The values of ``--config file.yaml`` as command-line words, to be read before the user's own flags."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    path = finder.parse_known_args(argv)[0].config
    if path is None:
        return []
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.safe_load(file) or {}
    except OSError as error:
        parser.error(f"--config {path}: {error.strerror}")
    except yaml.YAMLError as error:
        parser.error(f"--config {path}: not YAML: {' '.join(str(error).split())}")
    if not isinstance(values, dict):
        parser.error(f"--config {path}: expected lines of `name: value`, got a {type(values).__name__}")

    actions = {
        flag.lstrip("-").replace("-", "_"): action for action in parser._actions for flag in action.option_strings
    }
    words: list[str] = []
    for key, value in values.items():
        action = actions.get(str(key).lstrip("-").replace("-", "_"))
        if action is None or action.dest in ("config", "help"):
            parser.error(f"--config {path}: unknown name {key}{nearest(str(key), sorted(actions))}")
        flag = action.option_strings[-1]
        if action.nargs == 0:
            if not isinstance(value, bool):
                parser.error(f"--config {path}: {key} is true or false, got {value!r}")
            words += [flag] if value else []
        elif isinstance(value, (list, tuple)):
            if action.nargs is None:
                parser.error(f"--config {path}: {key} takes one value, got a list of {len(value)}")
            words += [flag, *map(str, value)]
        elif isinstance(value, dict):
            parser.error(f"--config {path}: {key} takes a value, got a mapping")
        elif value is not None:
            words.append(f"{flag}={value}")
    return words


def _number(kind: type, rule: str, accepts: Callable[[float], bool]) -> Callable[[str], float]:
    """A converter for argparse that refuses what ``accepts`` refuses and names the rule."""

    def convert(text: str):
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{rule}, got {text!r}") from None
        if not accepts(value):
            raise argparse.ArgumentTypeError(f"{rule}, got {text}")
        return value

    convert.metavar = "N" if kind is int else "X"
    return convert


# `v < inf` is false for nan too.
positive_int = _number(int, "must be a whole number of at least 1", lambda v: v >= 1)
non_negative_int = _number(int, "must be a whole number of at least 0", lambda v: v >= 0)
positive_float = _number(float, "must be a number above 0", lambda v: 0 < v < float("inf"))
non_negative_float = _number(float, "must be a number of at least 0", lambda v: 0 <= v < float("inf"))
finite_float = _number(float, "must be a number", lambda v: abs(v) < float("inf"))
fraction = _number(float, "must be between 0 and 1", lambda v: 0 <= v <= 1)
eval_fraction = _number(float, "must be at least 0 and below 1", lambda v: 0 <= v < 1)
positive_fraction = _number(float, "must be above 0 and at most 1", lambda v: 0 < v <= 1)
half = _number(float, "must be at least 0 and below 0.5", lambda v: 0 <= v < 0.5)


def http_url(text: str) -> str:
    """A converter for argparse that takes addresses of HTTP and HTTPS only."""
    try:
        parts = urlsplit(text)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets or a port that are none
        is_good = False
    if not is_good:
        raise argparse.ArgumentTypeError(f"must be an address like http://host:8000/score, got {text!r}")
    return text


http_url.metavar = "URL"
