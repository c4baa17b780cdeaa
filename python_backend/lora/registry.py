"""Adapters by name: where they lie, their task ids, and whether they fit. Looks at the files again for every request.

Knows nothing of the cache or of requests.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from python_backend.errors import BuildError, InvalidRequest, NotFound
from python_backend.lora.labels import LABELS_FILE, Labels
from python_backend.lora.modules import PROJECTIONS
from python_backend.lora.peft import CONFIG_FILE, WEIGHTS_FILE, PeftConfig, read_peft

if TYPE_CHECKING:
    from collections.abc import Mapping

    from python_backend.lora.adapter import Adapter
    from python_backend.lora.modules import BaseModel

_log = logging.getLogger(__name__)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_Stamp = tuple[tuple[int, int], ...]  # (modification time in ns, size) of each file


@dataclass(frozen=True, slots=True)
class Registered:
    """One adapter that may be named."""

    name: str
    directory: Path
    task_id: int
    rank: int
    modules: tuple[str, ...]
    nbytes: int
    content_hash: str
    base_model: str
    owner: str
    stamp: _Stamp = field(repr=False)

    @property
    def version_id(self) -> int:
        """A task id of this content: for engines that keep what they were sent first under an id, whatever follows."""
        return task_id_of(f"{self.name}/{self.content_hash}")


class AdapterRegistry:
    """Named directories, and every sub-directory of one directory that holds an adapter.

    What lies in the directory may come, change and go while the server runs.
    """

    def __init__(
        self,
        base: BaseModel,
        adapters: Mapping[str, Path],
        directory: Path | None = None,
        owners: Mapping[str, str] | None = None,
    ) -> None:
        """Check every adapter that is named; `owners` go before those of the adapters' own labels.

        Raises:
            BuildError: one of them cannot be served; those found in `directory` are logged and left out instead.
        """
        self._base, self._named, self._directory = base, dict(adapters), directory
        self._owners = dict(owners or {})
        self._lock = threading.Lock()
        self._entries: dict[str, Registered] = {}
        self._refused: dict[str, tuple[_Stamp, str]] = {}
        for name, place in self._named.items():
            _check_name(name)
            self._check_clash(name, place)
            self._entries[name] = self._load(name, place)[0]
        self.refresh()

    def names(self) -> list[str]:
        """Names that were good when last looked at."""
        return sorted(self._entries)

    def entries(self) -> list[Registered]:
        """What `names` tells, with the rest."""
        return [self._entries[name] for name in self.names()]

    def refused(self) -> list[tuple[str, str]]:
        """Names and reasons of those that lie in the directory and cannot be served."""
        return sorted((name, reason) for name, (_, reason) in self._refused.items())

    def find(self, name: str) -> Registered:
        """The entry, checked anew when its files have changed.

        Raises:
            NotFound: nobody registered the name, or its directory has gone; lists close names.
            InvalidRequest: its files are no longer good.
        """
        with self._lock:
            place = self._place(name)
            if place is None:
                self._entries.pop(name, None)
                self._scan()
                raise NotFound(f"lora_name {name!r} is not registered. {self._advice(name)}")
            stamp = _stamp(place)
            known = self._entries.get(name)
            if known is not None and known.stamp == stamp:
                return known
            refused = self._refused.get(name)
            if refused is None or refused[0] != stamp:
                self._try(name, place, stamp)
            if name in self._refused:
                raise InvalidRequest(f"lora_name {name!r} cannot be served: {self._refused[name][1]}")
            return self._entries[name]

    def load(self, entry: Registered) -> Adapter:
        """The adapter's matrices.

        Raises:
            InvalidRequest: its files are no longer good.
        """
        try:
            return self._load(entry.name, entry.directory)[1]
        except BuildError as error:
            raise InvalidRequest(f"lora_name {entry.name!r} cannot be served: {error}") from error

    def refresh(self) -> None:
        """Look at the whole directory again."""
        with self._lock:
            self._scan()

    def _place(self, name: str) -> Path | None:
        if name in self._named:
            place = self._named[name]
        elif self._directory is not None and _NAME.fullmatch(name):
            place = self._directory / name
        else:
            return None
        return place if (place / CONFIG_FILE).is_file() else None

    def _scan(self) -> None:
        found = dict(self._named)
        if self._directory is not None and self._directory.is_dir():
            for place in sorted(self._directory.iterdir()):
                if (place / CONFIG_FILE).is_file() and _NAME.fullmatch(place.name):
                    found.setdefault(place.name, place)
        for known_names in (self._entries, self._refused):
            for name in known_names.keys() - found.keys():
                del known_names[name]
        for name, place in found.items():
            stamp, known, refused = _stamp(place), self._entries.get(name), self._refused.get(name)
            if (known is None or known.stamp != stamp) and (refused is None or refused[0] != stamp):
                self._try(name, place, stamp)

    def _try(self, name: str, place: Path, stamp: _Stamp) -> None:
        self._entries.pop(name, None)
        self._refused.pop(name, None)
        try:
            self._entries[name] = self._load(name, place)[0]
        except BuildError as error:
            self._refused[name] = (stamp, str(error))
            _log.warning("Adapter %s is not served: %s", name, error)

    def _load(self, name: str, place: Path) -> tuple[Registered, Adapter]:
        if self._directory is not None and name not in self._named:
            inside = place.resolve().is_relative_to(self._directory.resolve())
            if not inside:
                raise BuildError(f"{place} leads out of {self._directory}; put the files into the directory.")
        task_id, stamp, labels = task_id_of(name), _stamp(place), Labels.read(place)
        expected = self._base.checkpoint_hash
        if labels.checkpoint_hash and expected and labels.checkpoint_hash != expected:
            raise BuildError(
                f"{place / LABELS_FILE}: checkpoint_hash is {labels.checkpoint_hash}; this deployment's is {expected}. "
                "The adapter was trained on other weights."
            )
        adapter = read_peft(place, self._base, task_id)
        entry = Registered(
            name=name,
            directory=place,
            task_id=task_id,
            rank=adapter.rank,
            modules=tuple(module for module, projection in PROJECTIONS.items() if projection in adapter.projections),
            nbytes=adapter.nbytes,
            content_hash=f"{adapter.version:016x}",
            base_model=PeftConfig.read(place).base_model,
            owner=self._owners.get(name) or labels.owner,
            stamp=stamp,
        )
        return entry, adapter

    def _check_clash(self, name: str, place: Path) -> None:
        other = None if self._directory is None else self._directory / name
        if other is not None and (other / CONFIG_FILE).is_file() and other.resolve() != place.resolve():
            raise BuildError(f"Adapter name {name!r} is that of {place} and of {other}; rename one of them.")

    def _advice(self, name: str) -> str:
        known = self.names()
        if not known:
            return "This deployment has no adapters; remove it."
        close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        return f"Did you mean {', '.join(close)}?" if close else f"Registered are: {', '.join(known[:20])}."


def task_id_of(name: str) -> int:
    """The adapter's task id: made from its name, so it is the same on every server and after every restart.

    48 bits, so that JSON numbers hold it exactly.
    """
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "little")


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise BuildError(f"Adapter name {name!r}: allowed are letters, digits and . _ -, up to 100, not . _ - first.")


def _stamp(place: Path) -> _Stamp:
    found = []
    for file in (CONFIG_FILE, WEIGHTS_FILE, LABELS_FILE):
        try:
            status = (place / file).stat()
        except OSError:
            found.append((0, 0))
        else:
            found.append((status.st_mtime_ns, status.st_size))
    return tuple(found)
