"""Sources that were found: their training and evaluation part, ready to be read.

`data.sources` says how they are asked for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.cache import content_hash, ends_hash, key_of
from data.files import count_file, file_kind, read_file
from data.sources import JSONFILE, Source, SourceLike, parse_source
from data.unpacking import BadRecord, Record, naming

SAMPLE = Path(__file__).parent / "sample"
_SPLIT_NAMES = {
    "train": re.compile(r"^train", re.I),
    "eval": re.compile(r"^(eval|test|valid|val(?![a-z])|dev(?![a-z]))", re.I),
}


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
