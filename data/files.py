"""Records of one data file: json, jsonl, csv, tsv, parquet, arrow, each also gzipped or zstd.

A file is read as a stream, record by record, with the number of each record; only a .json file that is one list
is read whole. Text is UTF-8, with or without a byte order mark, and lines end in a line feed and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.tables import read_arrow, read_parquet, read_table
from data.unpacking import PACKINGS, BadRecord, Record, naming, one_line, open_bytes

KINDS = {
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}


def file_kind(path: Path) -> str | None:
    """The kind of a data file by its name, compression aside; None for any other file."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in PACKINGS:
        suffixes.pop()
    return KINDS.get(suffixes[-1]) if suffixes else None


def read_file(path: Path) -> Iterator[Record | BadRecord]:
    """The records of `path` in order; a record that cannot be read comes as a BadRecord in its place.

    Raises:
        ValueError: the file as a whole is damaged or of no known kind; the message names it.
    """
    kind = file_kind(path)
    if kind is None:
        known = ", ".join(KINDS)
        raise ValueError(f"{path}: not a data file: its name must end in one of {known} (and .gz or .zst)")
    with naming(path):
        yield from _READERS[kind](path)


def count_file(path: Path) -> int:
    """Number of records that `read_file` gives, without taking them apart where the kind of file allows it."""
    kind = file_kind(path)
    if kind == "jsonl":
        with naming(path), open_bytes(path) as file:
            return sum(1 for line in file if line.strip())
    if kind == "parquet" and path.suffix.lower() == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            with naming(path):
                return pyarrow.parquet.read_metadata(path).num_rows
        except pyarrow.ArrowException as error:
            raise ValueError(f"{path}: not a parquet file ({one_line(error)})") from error
    return sum(1 for _ in read_file(path))


def _text_line(line: bytes) -> str:
    return line.decode("utf-8-sig" if line.startswith(b"\xef\xbb\xbf") else "utf-8")


def _read_jsonl(path: Path) -> Iterator[Record | BadRecord]:
    with open_bytes(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _parse_line(line, number)


def _parse_line(line: bytes, number: int) -> Record | BadRecord:
    try:
        record = json.loads(_text_line(line))
    except UnicodeDecodeError as error:
        return BadRecord("not UTF-8", f"line {number}, byte {error.start}")
    except json.JSONDecodeError as error:
        return BadRecord("not JSON", f"line {number}, column {error.colno}: {error.msg}")
    except RecursionError:
        return BadRecord("not JSON", f"line {number}: nested too deep")
    except ValueError as error:  # a number of thousands of digits
        return BadRecord("not JSON", f"line {number}: {error}")
    return _as_record(record)


def _as_record(record: Any) -> Record | BadRecord:
    if isinstance(record, dict):
        return record
    return BadRecord("not an object", f"a {type(record).__name__} in place of columns and values")


def _read_json(path: Path) -> Iterator[Record | BadRecord]:
    """One list of records, an object that holds one list or a list for each column, or lines of JSON under the wrong
    name."""
    with open_bytes(path) as file:
        content = file.read()
    try:
        text = _text_line(content)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {error.start}: save it as UTF-8") from error
    if not text.strip():
        return
    try:
        whole = json.loads(text)
    except json.JSONDecodeError as error:
        lines = content.split(b"\n")
        first = next(line for line in lines if line.strip())
        if first.strip().startswith(b"{") and not isinstance(_parse_line(first, 1), BadRecord):
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _parse_line(line, number)
            return
        raise ValueError(f"{path}: not JSON at line {error.lineno}, column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise ValueError(f"{path}: its JSON is nested too deep") from error
    except ValueError as error:  # a number of thousands of digits
        raise ValueError(f"{path}: {error}") from error
    if isinstance(whole, dict):
        lists = [value for value in whole.values() if isinstance(value, list) and _holds_records(value)]
        if not lists and _is_columns(whole):
            whole = [dict(zip(whole, cells, strict=True)) for cells in zip(*whole.values(), strict=True)]
        else:
            whole = lists[0] if len(lists) == 1 and not _is_row(whole) else [whole]
    if not isinstance(whole, list):
        raise ValueError(f"{path}: a {type(whole).__name__} in place of a list of rows")
    for record in whole:
        yield _as_record(record)


def _is_columns(whole: dict[str, Any]) -> bool:
    """True for a table written by columns: lists of one length."""
    sizes = {len(value) if isinstance(value, list) else -1 for value in whole.values()}
    return len(whole) > 1 and len(sizes) == 1 and -1 not in sizes


def _holds_records(value: list[Any]) -> bool:
    return bool(value) and all(isinstance(part, dict) for part in value)


def _is_row(record: Record) -> bool:
    """True for the one record of a file of one row: its list is a dialogue or sits beside other columns."""
    from data.shapes import recognise
    from data.turns import RowError

    try:
        recognise(record)
    except RowError:
        return False
    return True


_READERS = {
    "json": _read_json,
    "jsonl": _read_jsonl,
    "csv": lambda path: read_table(path, ","),
    "tsv": lambda path: read_table(path, "\t"),
    "parquet": read_parquet,
    "arrow": read_arrow,
}
