"""Where rows come from: a file, a folder, the bundled sample, or a name on the Hugging Face hub.

A source is written

    NAME[:WEIGHT][?option=value&...]

NAME is a data file, a folder of data files or a folder saved by `datasets`, `sample` for the bundled dialogues,
or a data set's name on the hub. A local path always wins and never touches the network. WEIGHT is how often the
source's training rows are used in an epoch: 0.5 takes half of them, 2 all of them twice. Options:

    limit=1000                  only the first rows
    split=train, eval=test      names of the splits
    subset=NAME, revision=REF   of a hub set
    shape=turns                 fixes the shape, see `data.shapes`
    columns=question>prompt,reply>response     column names of the source and what they stand for
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import parse_qsl

from data.shapes import SHAPES
from data.splits import Ratios, parse_ratios

JSONFILE = "local/jsonfile"
"""A name from older scripts: data/train.json and data/eval.json in the working directory."""
_OPTIONS = ("limit", "split", "eval", "subset", "revision", "shape", "columns")


@dataclass(frozen=True)
class Source:
    """One source as it was asked for; see this module for what the fields mean."""

    name: str
    weight: float = 1.0
    limit: int | None = None
    split: str = "train"
    eval_split: str | None = None
    subset: str | None = None
    revision: str | None = None
    shape: str | None = None
    columns: dict[str, str] = field(default_factory=dict)


SourceLike = str | os.PathLike[str] | Source


def as_list(paths: SourceLike | Sequence[SourceLike]) -> list[SourceLike]:
    """One source or several as a list."""
    return [paths] if isinstance(paths, str | os.PathLike | Source) else list(paths)


def parse_source(text: SourceLike) -> Source:
    """The `Source` a text describes.

    Raises:
        ValueError: an unknown option or a value that does not fit, named.
    """
    if isinstance(text, Source):
        return text
    text = os.fspath(text)
    if os.path.exists(text):
        return Source(text)
    name, _, query = text.partition("?")
    options: dict[str, Any] = dict(parse_qsl(query, keep_blank_values=True))
    for option in options:
        if option not in _OPTIONS:
            raise ValueError(f"source {text!r}: unknown option {option!r}: the options are {', '.join(_OPTIONS)}")
    weight = 1.0
    head, colon, tail = name.rpartition(":")
    if colon and head and not os.path.exists(name) and _is_number(tail):
        name, weight = head, float(tail)
        if not 0 <= weight < float("inf"):
            raise ValueError(f"source {text!r}: weight {tail} must be a number of at least 0")
    if not name.strip():
        raise ValueError(f"source {text!r} names nothing: give a file, a folder, a hub name, or sample")
    limit = options.get("limit")
    if limit is not None and not limit.isdecimal():
        raise ValueError(f"source {text!r}: limit {limit!r} must be a number of rows")
    shape = options.get("shape")
    if shape is not None and shape not in SHAPES:
        raise ValueError(f"source {text!r}: unknown shape {shape!r}: the shapes are {', '.join(SHAPES)}")
    return Source(
        name=name,
        weight=weight,
        limit=None if limit is None else int(limit),
        split=options.get("split", "train"),
        eval_split=options.get("eval"),
        subset=options.get("subset"),
        revision=options.get("revision"),
        shape=shape,
        columns=_parse_columns(text, options.get("columns", "")),
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _parse_columns(source: str, text: str) -> dict[str, str]:
    columns = {}
    for pair in filter(None, text.split(",")):
        name, arrow, meaning = pair.partition(">")
        if not (name and arrow and meaning):
            raise ValueError(f"source {source!r}: columns {pair!r} must be written like question>prompt")
        if name in columns or meaning in columns.values():
            raise ValueError(f"source {source!r}: columns {pair!r}: each name and each meaning can be there once")
        columns[name] = meaning
    return columns


def with_shape(text: SourceLike, shape: str | None) -> Source:
    """The source with its shape fixed, unless it names one itself. Raises ValueError for an unknown shape."""
    source = parse_source(text)
    if shape is not None and shape not in SHAPES:
        raise ValueError(f"data_format {shape!r} is unknown: the shapes are {', '.join(SHAPES)}")
    return replace(source, shape=source.shape or shape)


def dealt_sources(
    stage: str,
    data_path: SourceLike | Sequence[SourceLike],
    data_split: Ratios,
    sft_only_data_path: SourceLike | Sequence[SourceLike],
    data_format: str | None,
) -> list[tuple[Source, Ratios]]:
    """The sources of a stage, each with the shares by which its rows are dealt to the stages.

    Raises:
        ValueError: no source at all, an unknown shape, or shares that are none.
    """
    parse_ratios(data_split)
    shares = [(with_shape(path, data_format), data_split) for path in as_list(data_path)]
    if stage == "sft":
        shares += [(with_shape(path, data_format), "1,0,0") for path in as_list(sft_only_data_path)]
    if not shares:
        raise ValueError("data_path names no source: give a file, a folder, a hub name, or sample")
    return shares
