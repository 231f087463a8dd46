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
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from data.cache import content_hash, ends_hash, key_of
from data.files import BadRecord, Record, count_file, file_kind, naming, read_file
from data.shapes import SHAPES
from data.splits import Ratios, parse_ratios

SAMPLE = Path(__file__).parent / "sample"
JSONFILE = "local/jsonfile"
"""A name from older scripts: data/train.json and data/eval.json in the working directory."""
_SPLIT_NAMES = {
    "train": re.compile(r"^train", re.I),
    "eval": re.compile(r"^(eval|test|valid|val(?![a-z])|dev(?![a-z]))", re.I),
}
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


class Records:
    """The records of one part (training or evaluation) of a source, read as a stream as often as asked.

    `files` are what is read, in order; empty for a data set in `table`, a `datasets.Dataset` of the given `name`, of
    which the files of a saved one are in `behind`.
    """

    def __init__(
        self,
        files: list[Path] | None = None,
        table: Any = None,
        limit: int | None = None,
        name: str = "a data set",
        behind: Sequence[Path] = (),
    ):
        self.files, self.table, self.limit, self.name, self.behind = files or [], table, limit, name, behind
        self._count: int | None = None

    def __iter__(self) -> Iterator[tuple[str, Record | BadRecord]]:
        """(place of the record in words, record) in order; a record that cannot be read is a BadRecord."""
        for number, place_record in enumerate(self._all()):
            if self.limit is not None and number >= self.limit:
                return
            yield place_record

    def _all(self) -> Iterator[tuple[str, Record | BadRecord]]:
        for path in self.files:
            for number, record in enumerate(read_file(path), 1):
                yield f"{path} row {number}", record
        if self.table is not None:
            with naming(self.name):
                for number, record in enumerate(self.table, 1):
                    yield f"{self.name} row {number}", record

    def count(self) -> int:
        """Number of records, bad ones included; counted once."""
        if self._count is None:
            if self.files:
                size = sum(map(count_file, self.files))
            else:
                size = 0 if self.table is None else len(self.table)
            self._count = size if self.limit is None else min(size, self.limit)
        return self._count


    def content(self, hash_of: Callable[[Path], str]) -> list[str | None]:
        """The hash of each file, and a table's fingerprint if it has one."""
        found: list[str | None] = []
        for path in (*self.files, *self.behind):
            with naming(path):
                found.append(hash_of(path))
        return [*found, getattr(self.table, "_fingerprint", None)]

    def is_remote(self) -> bool:
        """Whether there is no file that could tell the content."""
        return not (self.files or self.behind)


@dataclass
class Opened:
    """A source that was found: its training and evaluation records and the files nobody reads."""

    source: Source
    train: Records
    eval: Records | None
    unused: list[str] = field(default_factory=list)

    def content_hash(self) -> str:
        """SHA-256 of the bytes of all files; of a hub set, of its fingerprints."""
        return key_of([part.content(content_hash) for part in (self.train, self.eval) if part is not None])

    def content_mark(self) -> str:
        """What a stream can know of the training part's content without reading it through: SHA-256 of the size,
        beginning and end of all files; of a hub set, of its name and revision."""
        hub = (self.source.name, self.source.subset, self.source.revision) if self.train.is_remote() else None
        return key_of([self.train.content(ends_hash), hub])


def open_source(text: SourceLike, streaming: bool = False) -> Opened:
    """Finds a source and its parts; reads no row yet. With `streaming` a hub set is not downloaded first.

    Raises:
        FileNotFoundError: a path with nothing there. ValueError: a folder or hub set without data.
    """
    source = parse_source(text)
    path = Path(os.path.expanduser(source.name))
    if source.name == "sample" and not path.exists():
        path = SAMPLE
    if os.path.isfile(path):
        if file_kind(path) is None:
            next(iter(read_file(path)))  # raises, naming the kinds
        return Opened(source, Records([path], limit=source.limit), None)
    if os.path.isdir(path):
        return _open_folder(source, path)
    if _looks_like_path(source.name):
        raise FileNotFoundError(f"no data at {source.name}: give a file, a folder, or a hub name like owner/name")
    if source.name == JSONFILE and Path("data").is_dir():
        return _open_folder(source, Path("data"))
    from data.hub import open_hub, resolve_alias

    source = resolve_alias(source)
    train, held_out = open_hub(source, streaming)
    return Opened(
        source,
        Records(table=train, limit=source.limit, name=source.name),
        None if held_out is None else Records(table=held_out, name=source.name),
    )


def _looks_like_path(name: str) -> bool:
    """A hub name is `name` or `owner/name`; anything with a file's ending or a path's look is a path."""
    return (
        name.startswith((".", "/", "~"))
        or name.count("/") != 1
        and "/" in name
        or "\\" in name
        or file_kind(Path(name)) is not None
        or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)
    )


def _open_folder(source: Source, folder: Path) -> Opened:
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        from data.hub import open_saved

        train, held_out = open_saved(source, folder)
        rest = None if held_out is None else _saved(held_out, source.name)
        return Opened(source, _saved(train, source.name, source.limit), rest)
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and file_kind(path)
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    if not files:
        raise ValueError(f"{folder}: the folder holds no data file (json, jsonl, csv, tsv, parquet, arrow)")
    parts: dict[str, list[Path]] = {"train": [], "eval": [], "other": []}
    for path in files:
        parts[_part_of(path.relative_to(folder))].append(path)
    if source.eval_split is not None:
        parts["eval"] = [path for path in files if path.name.startswith(source.eval_split)]
    train, unused = (parts["train"], parts["other"]) if parts["train"] else (parts["other"], [])
    if not train:
        raise ValueError(f"{folder}: only evaluation files here ({parts['eval'][0].name}): add a train file")
    held_out = Records(parts["eval"]) if parts["eval"] else None
    return Opened(source, Records(train, limit=source.limit), held_out, [path.name for path in unused])


def _saved(table: Any, name: str, limit: int | None = None) -> Records:
    return Records(table=table, limit=limit, name=name, behind=[Path(file["filename"]) for file in table.cache_files])


def _part_of(path: Path) -> str:
    """ "train", "eval" or "other" by the name of the file, else of the folders it lies in."""
    for name in reversed(path.parts):
        for part, pattern in _SPLIT_NAMES.items():
            if pattern.match(name):
                return part
    return "other"
