"""Finding and reading Hugging Face folders: which path is meant, and one-line errors when it cannot be had."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.utils import logging as transformers_logging

# what the hub calls a model: NAME or OWNER/NAME
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?")


def resolve(path: str | Path) -> str:
    """The local folder `path` stands for, or the hub name it is. A local folder always wins.

    Raises:
        FileNotFoundError: it looks like a local path and is no model folder; nothing was asked of the network.
    """
    text = str(path)
    folder = Path(text).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"{folder} is not a model folder: it has no config.json{_nearby(folder)}")
        return str(folder)
    if folder.is_file():
        raise FileNotFoundError(f"{folder} is a file: give the Hugging Face folder that holds config.json")
    # A name such as out/sft could be on the hub, but where out/ is a folder of ours it means a path.
    looks_local = not HUB_NAME.fullmatch(text) or ("/" in text and folder.parent.is_dir())
    if looks_local:
        raise FileNotFoundError(f"no model folder {folder}: {_first_missing(folder)}")
    return text


def _nearby(folder: Path) -> str:
    """A hint at sub-folders that are model folders, as the stages write them."""
    found = sorted(child.parent.name for child in folder.glob("*/config.json"))[:4]
    return f" (did you mean its {' or '.join(found)}?)" if found else ""


def _first_missing(folder: Path) -> str:
    missing = folder
    while not missing.parent.exists():
        missing = missing.parent
    return f"{missing} does not exist"


def read(load: Callable[..., Any], path: str | Path, what: str, **options: Any) -> Any:
    """`load(path, **options)`, with transformers' error pages boiled down to one line.

    Raises:
        FileNotFoundError: as `resolve` does, or the hub does not have (or cannot give) the model's files.
        ValueError: the files are there and cannot be read as what they should be.
    """
    name = resolve(path)
    try:
        return load(name, **options)
    except OSError as error:
        if Path(name).is_dir():
            raise FileNotFoundError(f"cannot load the {what} of {name}: {one_line(error)}") from error
        raise FileNotFoundError(
            f"no folder {name} here, and the hub gave no {what} of that name ({one_line(error)}): check the path, "
            "the spelling, or the network"
        ) from error
    except (ValueError, KeyError, ImportError) as error:
        raise ValueError(f"cannot load the {what} of {name}: {one_line(error)}") from error


def one_line(error: BaseException, limit: int = 200) -> str:
    """The first sentence or so of an error message."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


def read_config(path: str | Path, dropout: float | None = None) -> PretrainedConfig:
    """The model's config; with a `dropout`, every dropout probability of the family set to it."""
    config = read(AutoConfig.from_pretrained, path, "configuration")
    if dropout is not None:
        set_dropout(config, dropout)
    return config


DROPOUT_KEYS = (
    "dropout", "attention_dropout", "hidden_dropout", "activation_dropout", "resid_pdrop", "embd_pdrop",
    "attn_pdrop", "resid_dropout", "embed_dropout", "embd_dropout", "attention_probs_dropout_prob",
    "hidden_dropout_prob",
)  # fmt: skip


def set_dropout(config: PretrainedConfig, dropout: float) -> None:
    """Set those of `DROPOUT_KEYS` that the family's config has.

    Raises:
        ValueError: it has none, so the request would be ignored in silence (0 is always met).
    """
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must be at least 0 and below 1, not {dropout}")
    own = [key for key in DROPOUT_KEYS if isinstance(getattr(config, key, None), int | float)]
    if not own and dropout > 0:
        raise ValueError(f"{config.model_type} models have no dropout to set to {dropout}: leave it out")
    for key in own:
        setattr(config, key, dropout)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' bars, and its table of missing and unexpected weights, which callers check themselves."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
