"""The folder of checkpoints: how one takes its place at once, what makes one good, and which is the last good one.

    FOLDER/latest              the tag of the last complete checkpoint
    FOLDER/TAG/...             a complete one
    FOLDER/TAG/files_RANK.json what rank RANK wrote there: size and CRC-32 of each file
    FOLDER/.TAG.tmp            one being written or removed: never read
    FOLDER/.TAG.old            the one that TAG is about to replace: read only where TAG is not there

A kill between any two lines here leaves a folder in which `find` names a complete checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from pathlib import Path

LATEST = "latest"
_CHUNK = 1 << 22


def check_tag(tag: str) -> str:
    """The tag itself, when it can name a folder.

    Raises:
        ValueError: it cannot.
    """
    if not tag or tag.startswith(".") or Path(tag).name != tag or tag == LATEST:
        raise ValueError(f"checkpoint tag {tag!r} cannot name a folder: use letters, digits, '-' and '_'")
    return tag


def begin(folder: Path, tag: str) -> None:
    """Make the empty folder that a checkpoint is written to. On one rank."""
    _recover(folder, tag)
    temporary = temporary_folder(folder, tag)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)


def temporary_folder(folder: Path, tag: str) -> Path:
    return folder / f".{tag}.tmp"


def seal(path: Path, rank: int, ranks: int) -> None:
    """Bring this rank's files to the disk, and write down what they are."""
    mine = [*path.glob(f"state/__{rank}_*"), path / f"rng_{rank}.pt"]
    if rank == 0:
        mine += [path / "state" / ".metadata", path / "engine.pt"]
    files = {}
    for file in mine:
        _sync(file)
        files[str(file.relative_to(path))] = [file.stat().st_size, _checksum(file)]
    listing = path / f"files_{rank}.json"
    listing.write_text(json.dumps({"ranks": ranks, "files": files}))
    _sync(listing)


def commit(folder: Path, tag: str, keep_last: int | None) -> None:
    """Put the written checkpoint in its place and move `latest` to it. On one rank, after all have sealed theirs."""
    final, temporary, old = folder / tag, temporary_folder(folder, tag), _old_folder(folder, tag)
    _sync(temporary / "state")
    _sync(temporary)
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.replace(final, old)
    os.replace(temporary, final)
    _sync(folder)
    pointer = folder / f".{LATEST}.tmp"
    pointer.write_text(tag)
    _sync(pointer)
    os.replace(pointer, folder / LATEST)
    _sync(folder)
    shutil.rmtree(old, ignore_errors=True)
    if keep_last is not None:
        for name in complete_tags(folder)[:-keep_last]:
            # out of sight first: a kill must not leave half a checkpoint under a name that is read
            shutil.rmtree(temporary_folder(folder, name), ignore_errors=True)
            os.replace(folder / name, temporary_folder(folder, name))
            shutil.rmtree(temporary_folder(folder, name))


def find(folder: Path, tag: str | None) -> str:
    """The tag to load: the given one, or what `latest` names. On one rank.

    Raises:
        FileNotFoundError: it is not there; the line names the last good one that is.
    """
    if tag is None:
        if not (folder / LATEST).exists():
            raise FileNotFoundError(f"no checkpoint in {folder}: the file {LATEST!r} is missing{offer(folder)}")
        tag = (folder / LATEST).read_text().strip()
        if not tag:
            raise FileNotFoundError(f"the file {LATEST!r} in {folder} is empty{offer(folder)}")
    check_tag(tag)
    _recover(folder, tag)
    if not (folder / tag).is_dir():
        raise FileNotFoundError(f"no checkpoint {folder / tag}{offer(folder)}")
    return tag


def problem(path: Path, part: int = 0, parts: int = 1) -> str | None:
    """What is wrong with a checkpoint, or None. Of its files, each of `parts` callers reads its own part."""
    files: dict[str, list[int]] = {}
    rank, ranks = 0, 1
    while rank < ranks:
        listing = path / f"files_{rank}.json"
        if not listing.exists():
            return f"{listing.name} is missing"
        try:
            content = json.loads(listing.read_text())
            ranks = content["ranks"]
            files |= content["files"]
        except (ValueError, KeyError, TypeError):
            return f"{listing.name} cannot be read"
        rank += 1
    for number, (name, (size, checksum)) in enumerate(sorted(files.items())):
        file = path / name
        if not file.exists():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
        if number % parts == part and _checksum(file) != checksum:
            return f"the content of {name} has changed since it was written"
    return None


def offer(folder: Path, without: str | None = None) -> str:
    """How an error line ends: with the last good checkpoint, if there is one beside `without`."""
    for tag in reversed(complete_tags(folder)):
        if tag != without and problem(folder / tag) is None:
            return f"; the last good one there is tag {tag!r}"
    return "; there is no other good one in that folder"


def complete_tags(folder: Path) -> list[str]:
    """Tags of the checkpoints in a folder, in the order they were saved in."""
    listings = [p for p in folder.glob("*/files_0.json") if not p.parent.name.startswith(".")]
    return [p.parent.name for p in sorted(listings, key=lambda p: (p.stat().st_mtime_ns, p.parent.name))]


def _old_folder(folder: Path, tag: str) -> Path:
    return folder / f".{tag}.old"


def _recover(folder: Path, tag: str) -> None:
    """Undo a replacement that was killed halfway."""
    final, old = folder / tag, _old_folder(folder, tag)
    if old.exists() and not final.exists():
        os.replace(old, final)


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
