"""Built once, by one process a node, while the others wait; found again by content.

A cache is a folder whose name is the hash of all it depends on. It is built under a temporary name and renamed
when it is whole, so that a kill in the middle or a second run at the same time can never leave half of one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

META = "meta.json"
LEFTOVER_SECONDS = 24 * 3600
END_BYTES = 1 << 16
_LEFTOVER = re.compile(r"\..+-\d+-[0-9a-f]{8}(\.tmp-damaged)?\.tmp")
"""Temporary names of `build_once`."""


def content_hash(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def ends_hash(path: Path) -> str:
    """SHA-256 of a file's size and of its first and last bytes: cheap for a file of any size."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        digest = hashlib.sha256(str(size).encode())
        for start in (0, max(size - END_BYTES, 0)):
            file.seek(start)
            digest.update(file.read(END_BYTES))
    return digest.hexdigest()


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 of all that decides a tokenizer's ids: model, normalizer, control tokens, chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        content = json.loads(backend.to_str())
        content.pop("padding", None)  # left behind by the last call, without effect on ours
        content.pop("truncation", None)
    else:
        content = sorted(tokenizer.get_vocab().items())
    parts = [type(tokenizer).__name__, content, tokenizer.chat_template, tokenizer.special_tokens_map]
    return key_of(parts)


def key_of(parts: Any) -> str:
    """SHA-256 of anything JSON can hold."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def default_folder() -> Path:
    """Where caches go when nobody says: under the system's temporary folder, one for each user."""
    return Path(tempfile.gettempdir()) / f"data_files_{os.getuid() if hasattr(os, 'getuid') else 'user'}"


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Errors of writing into `folder` as a ValueError, in one line."""
    try:
        yield
    except OSError as error:
        what, mend = error.strerror, "give another folder by --data_output_path"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            what, mend = "no space left for it", f"make room, or {mend}"
        raise ValueError(f"the data cache cannot be written to {folder} ({what}): {mend}") from error


def read_meta(folder: Path) -> dict[str, Any] | None:
    """What the cache's builder wrote into it; None when the cache is missing or a file of it is not whole."""
    try:
        meta = json.loads((folder / META).read_text())
        sizes = {name: (folder / name).stat().st_size for name in meta["sizes"]}
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):  # ValueError: no JSON, no UTF-8
        return None
    except OSError as error:
        raise ValueError(
            f"the data cache {folder} cannot be read ({error.strerror}): give another folder by --data_output_path"
        ) from error
    return meta if sizes == meta["sizes"] else None


def build_once(folder: Path, build: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """The meta data of the cache `folder`; `build(temporary folder)` makes it when it is not there.

    Two runs at once may both build: the first to finish wins, the other takes the winner's.
    """
    meta = read_meta(folder)
    if meta is not None:
        return meta
    with writing(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(folder.parent)
    temporary = folder.with_name(f".{folder.name}.{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        with writing(folder.parent):
            temporary.mkdir()
        meta = build(temporary)
        meta["sizes"] = {
            str(path.relative_to(temporary)): path.stat().st_size
            for path in sorted(temporary.rglob("*"))
            if path.is_file()
        }
        with writing(folder.parent):
            (temporary / META).write_text(json.dumps(meta, indent=1))
            _put_in_place(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return read_meta(folder) or meta


def _put_in_place(temporary: Path, folder: Path) -> None:
    if folder.exists() and read_meta(folder) is None:
        with contextlib.suppress(FileNotFoundError):  # another run was faster
            folder.rename(temporary.with_name(f"{temporary.name}-damaged.tmp"))
    try:
        temporary.rename(folder)
    except OSError:
        if read_meta(folder) is None:  # else another run was faster
            raise


def _clear_leftovers(folder: Path) -> None:
    """Removes what killed builds left behind a day ago or earlier; nothing of others, whose folder this may be too."""
    for path in folder.glob(".*.tmp"):
        if not _LEFTOVER.fullmatch(path.name):
            continue
        try:
            latest = max(part.stat().st_mtime for part in (path, *path.rglob("*")))
        except FileNotFoundError:
            continue
        if time.time() - latest > LEFTOVER_SECONDS:
            shutil.rmtree(path, ignore_errors=True)


def on_one_rank(work: Callable[[], Any]) -> Any:
    """`work()` done by one process of each node, its result (small, picklable) on all ranks.

    The others wait without a time limit of their own, however long the work takes. An error of the worker is
    raised on every rank.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return work()
    outcome: tuple[str, Any] = ("waited", None)
    error: Exception | None = None
    if int(os.environ.get("LOCAL_RANK", dist.get_rank())) == 0:
        try:
            outcome = ("done", work())
        except Exception as caught:  # noqa: BLE001 - raised again below, once the other ranks know
            error, outcome = caught, ("failed", (type(caught).__name__, str(caught)))
    group = dist.new_group(backend="gloo", timeout=timedelta(days=7))
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome, group=group)
    dist.destroy_process_group(group)
    if error is not None:
        raise error
    for kind, value in outcomes:
        if kind == "failed":
            name, message = value
            raise (FileNotFoundError if name == "FileNotFoundError" else ValueError)(message)
    return next(value for kind, value in outcomes if kind == "done")
