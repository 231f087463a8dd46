"""Data sets of the `datasets` library: saved folders and names on the hub."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from data.sources import Source
from data.unpacking import one_line

EVAL_NAMES = ("test", "validation", "valid", "eval", "dev")

ALIASES = {
    "mkqa-Chinese": ("mkqa", "mkqa-zh_cn"),
    "mkqa-Japanese": ("mkqa", "mkqa-ja"),
}
"""Names that mean a part of a hub set: the set's own name and the shape that picks the part."""


def open_saved(source: Source, folder: Path) -> tuple[Any, Any | None]:
    """(train, eval or None) of a folder written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`.

    Raises:
        ValueError: it is not whole, or has no such split.
    """
    import datasets
    import pyarrow

    try:
        found = datasets.load_from_disk(str(folder))
    except (OSError, KeyError, TypeError, pyarrow.ArrowException) as error:
        raise ValueError(
            f"{folder}: the saved data set is damaged or not whole ({one_line(error)}): save it again"
        ) from error
    return _parts(source, found)


def resolve_alias(source: Source) -> Source:
    """The source under the hub's own name, with the shape its alias stands for."""
    if source.name not in ALIASES:
        return source
    name, shape = ALIASES[source.name]
    return replace(source, name=name, shape=source.shape or shape)


def open_hub(source: Source, streaming: bool = False) -> tuple[Any, Any | None]:
    """(train, eval or None) of a hub data set.

    Raises:
        ValueError: it cannot be had, or has no such split.
    """
    import datasets

    try:
        found = datasets.load_dataset(source.name, source.subset, revision=source.revision, streaming=streaming)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a set that is a script
        raise ValueError(
            f"no data at {source.name}: it is no local path, and the hub's data set could not be loaded "
            f"({one_line(error)})"
        ) from error
    return _parts(source, found)


def _parts(source: Source, found: Any) -> tuple[Any, Any | None]:
    import datasets

    if isinstance(found, datasets.Dataset | datasets.IterableDataset):
        return found, None
    for name in filter(None, (source.split, source.eval_split)):
        if name not in found:
            raise ValueError(f"{source.name}: has no split {name!r}: it has {', '.join(found)}")
    held_out = source.eval_split or next((name for name in EVAL_NAMES if name in found and name != source.split), None)
    return found[source.split], None if held_out is None else found[held_out]
