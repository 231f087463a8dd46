"""The bytes of a file, packed or not, and what goes wrong in reading it."""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

PACKINGS = (".gz", ".gzip", ".zst", ".zstd")

Record = dict[str, Any]


class BadRecord(ValueError):
    """One record that cannot be read; the file goes on behind it. `reason` is what is counted."""

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.field = "the whole row"


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


@contextlib.contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Errors of reading and unpacking as a ValueError that names the file."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: the compressed file is damaged or cut off ({error}): fetch it again") from error
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({one_line(error)})") from error


def all_bytes(path: Path) -> bytes:
    with open_bytes(path) as file:
        return file.read()


def one_line(error: Exception) -> str:
    """The error's text in one line, or its type when it has none."""
    return " ".join(str(error).split()) or type(error).__name__
