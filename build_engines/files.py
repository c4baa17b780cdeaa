"""Files that are either whole or not there: hashing with a cache, atomic writes, atomic directories."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CHUNK = 8 << 20


def sha256_file(path: Path, advance: Callable[[int], None] | None = None) -> str:
    """Hex digest of a file's bytes; `advance` hears of every chunk read, in bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            if advance:
                advance(len(chunk))
    return digest.hexdigest()


def digest_of(value: Any) -> str:
    """Hex digest of plain data, the same for equal data whatever the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def fsync_path(path: Path) -> None:
    """Make what was written to a file or directory survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(data)
        fsync_path(part)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write plain data as indented JSON, atomically."""
    write_atomic(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def fsync_tree(directory: Path) -> None:
    """`fsync_path` for every file and directory below, links left alone."""
    for root, _, names in os.walk(directory):
        for name in names:
            if not (Path(root) / name).is_symlink():
                fsync_path(Path(root) / name)
        fsync_path(Path(root))


def replace_directory(new: Path, place: Path) -> None:
    """Put `new` where `place` is. A crash leaves the old one, none, or the new one: never a mixture."""
    fsync_tree(new)
    old = place.with_name(f".old-{place.name}")
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        place.rename(old)
    new.rename(place)
    fsync_path(place.parent)
    shutil.rmtree(old, ignore_errors=True)


class HashCache:
    """Content hashes of input files, kept between builds and believed while size and times stay the same."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[str, list[Any]] = {}
        with contextlib.suppress(OSError, ValueError):
            self._entries = json.loads(path.read_text())

    def sha256(self, file: Path, advance: Callable[[int], None] | None = None) -> str:
        """Hex digest of the file, from the cache when the file looks untouched."""
        known = self._entries.get(str(file))
        state = _state(file)
        if known and known[:-1] == state:
            return str(known[-1])
        digest = sha256_file(file, advance)
        self._entries[str(file)] = [*state, digest]
        return digest

    def knows(self, file: Path) -> bool:
        """Whether `sha256` will answer without reading the file."""
        known = self._entries.get(str(file))
        return known is not None and known[:-1] == _state(file)

    def save(self) -> None:
        """Keep the entries for the next build."""
        write_json(self._path, self._entries)


def _state(file: Path) -> list[Any]:
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
