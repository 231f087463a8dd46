"""Records of tables: csv and tsv, parquet, arrow."""

from __future__ import annotations

import csv
import io
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data.unpacking import PACKINGS, BadRecord, Record, all_bytes, one_line, open_bytes

BATCH_ROWS = 4096


def read_table(path: Path, delimiter: str) -> Iterator[Record | BadRecord]:
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


def read_parquet(path: Path) -> Iterator[Record | BadRecord]:
    import pyarrow
    import pyarrow.parquet

    try:
        source = path if path.suffix.lower() not in PACKINGS else pyarrow.BufferReader(all_bytes(path))
        file = pyarrow.parquet.ParquetFile(source)
        _check_columns(path, file.schema_arrow.names)
        for batch in file.iter_batches(BATCH_ROWS):
            yield from _batch_rows(batch)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: not a parquet file ({one_line(error)})") from error


def read_arrow(path: Path) -> Iterator[Record | BadRecord]:
    """Arrow's file format or, as `datasets` writes it, its stream format."""
    import pyarrow

    packed = path.suffix.lower() in PACKINGS
    source = pyarrow.BufferReader(all_bytes(path)) if packed else pyarrow.memory_map(str(path))
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
