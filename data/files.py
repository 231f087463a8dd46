"""Records of one data file: json, jsonl, csv, tsv, parquet, arrow, each also gzipped or zstd.

A file is read as a stream, record by record, with the number of each record; only a .json file that is one list
is read whole. Text is UTF-8, with or without a byte order mark, and lines end in a line feed and nothing else.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

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
PACKINGS = (".gz", ".gzip", ".zst", ".zstd")
BATCH_ROWS = 4096

Record = dict[str, Any]


class BadRecord(ValueError):
    """One record that cannot be read; the file goes on behind it. `reason` is what is counted."""

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.field = "the whole row"


def file_kind(path: Path) -> str | None:
    """The kind of a data file by its name, compression aside; None for any other file."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in PACKINGS:
        suffixes.pop()
    return KINDS.get(suffixes[-1]) if suffixes else None


def open_bytes(path: Path) -> IO[bytes]:
    """The unpacked bytes of a file. Raises EOFError for a packed file of no bytes: its packing alone has some."""
    suffix = path.suffix.lower()
    if suffix in PACKINGS and path.stat().st_size == 0:
        raise EOFError("it is empty")
    if suffix in (".gz", ".gzip"):
        return gzip.open(path, "rb")
    if suffix in (".zst", ".zstd"):
        import pyarrow

        return io.BufferedReader(_ArrowRaw(pyarrow.CompressedInputStream(str(path), "zstd")))
    return open(path, "rb")


class _ArrowRaw(io.RawIOBase):
    """An arrow stream as a plain Python one, which can be buffered and read by lines."""

    def __init__(self, stream: Any):
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()


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


@contextlib.contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Errors of reading and unpacking as a ValueError that names the file."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: the compressed file is damaged or cut off ({error}): fetch it again") from error
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({one_line(error)})") from error


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


def _read_table(path: Path, delimiter: str) -> Iterator[Record | BadRecord]:
    csv.field_size_limit(sys.maxsize)
    with io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="") as file:
        try:
            rows = csv.reader(file, delimiter=delimiter, strict=True)
            header = [name.strip() for name in next(filter(None, rows), [])]
            if not header:
                return
            _check_columns(path, header)
            for row in rows:
                if not row:
                    continue
                if len(row) != len(header):
                    detail = f"line {rows.line_num} has {len(row)} cells, the header has {len(header)}"
                    yield BadRecord("wrong number of cells", detail)
                else:
                    # a table cannot tell an empty text from none, which is what most empty cells are
                    yield {name: cell or None for name, cell in zip(header, row, strict=True)}
        except csv.Error as error:
            raise ValueError(f"{path}: not a table at line {rows.line_num}: {error}") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 near line {rows.line_num}: save it as UTF-8") from error


def _check_columns(path: Path, names: Sequence[str]) -> None:
    """Raises ValueError for a table with two columns of one name: a record has room for one of them."""
    twice = next((name for name, count in Counter(names).items() if name and count > 1), None)
    if twice is not None:
        raise ValueError(f"{path}: it has several columns named {twice!r}: rename or remove all but one")


def _read_parquet(path: Path) -> Iterator[Record | BadRecord]:
    import pyarrow
    import pyarrow.parquet

    try:
        source = path if path.suffix.lower() not in PACKINGS else pyarrow.BufferReader(_all_bytes(path))
        file = pyarrow.parquet.ParquetFile(source)
        _check_columns(path, file.schema_arrow.names)
        for batch in file.iter_batches(BATCH_ROWS):
            yield from _batch_rows(batch)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: not a parquet file ({one_line(error)})") from error


def _read_arrow(path: Path) -> Iterator[Record | BadRecord]:
    """Arrow's file format or, as `datasets` writes it, its stream format."""
    import pyarrow

    packed = path.suffix.lower() in PACKINGS
    source = pyarrow.BufferReader(_all_bytes(path)) if packed else pyarrow.memory_map(str(path))
    try:
        try:
            reader = pyarrow.ipc.open_file(source)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        except pyarrow.ArrowInvalid:
            source.seek(0)
            batches = reader = pyarrow.ipc.open_stream(source)
        _check_columns(path, reader.schema.names)
        for batch in batches:
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield from _batch_rows(batch.slice(start, BATCH_ROWS))
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: not an arrow file ({one_line(error)})") from error


def _batch_rows(batch: Any) -> Iterator[Record | BadRecord]:
    """The rows of an arrow batch; one by one when one of them has text that is no UTF-8."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for number in range(batch.num_rows):
            try:
                yield from batch.slice(number, 1).to_pylist()
            except UnicodeDecodeError as error:
                yield BadRecord("not UTF-8", f"byte {error.start} of a text")


def _all_bytes(path: Path) -> bytes:
    with open_bytes(path) as file:
        return file.read()


def one_line(error: Exception) -> str:
    """The error's text in one line, or its type when it has none."""
    return " ".join(str(error).split()) or type(error).__name__


_READERS = {
    "json": _read_json,
    "jsonl": _read_jsonl,
    "csv": lambda path: _read_table(path, ","),
    "tsv": lambda path: _read_table(path, "\t"),
    "parquet": _read_parquet,
    "arrow": _read_arrow,
}
