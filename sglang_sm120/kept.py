"""Where records lie: one file for each identity, in a folder of the cache, changed by one process at a time."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol, TypeVar

from sglang_sm120 import env, records
from sglang_sm120.errors import ConfigError, RecordError
from sglang_sm120.records import Identity


class Record(Protocol):
    """What a file holds: measured on one card under one set of versions."""

    @property
    def identity(self) -> Identity:
        """The card and the versions that it belongs to."""

    def to_json(self) -> dict[str, Any]:
        """The record as it stands in its file."""


T = TypeVar("T", bound=Record)
#: Reads one file strictly: raises FileNotFoundError or RecordError.
Reader = Callable[[Path], T]


@dataclass(frozen=True)
class Kept:
    """The files of one kind of record.

    Attributes:
        folder: its name in the cache folder.
    """

    folder: str

    def path(self, identity: Identity) -> Path:
        """Return where the record of an identity is kept. Touches no file."""
        return env.cache_path() / self.folder / f"{identity.capability}-{identity.digest}.json"

    def require_place(self, identity: Identity) -> None:
        """Check that :meth:`update` will be able to write, before the work whose result it is to keep.

        Raises:
            ConfigError: the cache folder is not safe or cannot be made.
            RecordError: nothing can be written there.
        """
        env.cache_dir(self.folder)
        records.require_writable(self.path(identity))

    def update(self, identity: Identity, read: Reader[T], change: Callable[[T | None], T]) -> T:
        """Write what ``change`` makes of the record that is there, and return it.

        ``change`` gets ``None`` where there is no record, and where the file is spoilt or of another identity.

        Raises:
            ConfigError: the cache folder is not safe or cannot be made.
            RecordError: the file cannot be written.
        """
        path = self.path(identity)
        with records.locked(env.cache_dir(self.folder)):
            old: T | None
            try:
                old = read(path)
            except (FileNotFoundError, RecordError):
                old = None
            new = change(old if old is not None and old.identity == identity else None)
            records.write_json(path, new.to_json())
        return new

    def find(self, identity: Identity, read: Reader[T]) -> tuple[T | None, str]:
        """Return the record of an identity, else ``None`` and a sentence why one that exists is not used.

        Never raises for a bad file: it counts as no record.
        """
        try:
            path = self.path(identity)
            # A folder that cannot be looked at has no record: a server must start all the same.
            if not os.path.isdir(path.parent):
                return None, ""
            env.cache_dir(self.folder)
            try:
                record = read(path)
            except FileNotFoundError:
                return None, self._stale(identity, read)
        except (ConfigError, RecordError, OSError) as error:
            return None, str(error)
        if record.identity != identity:
            return None, f"{path.name} belongs to another machine."
        return record, ""

    def newest_other(self, identity: Identity, read: Reader[T]) -> T | None:
        """Return the newest record of this kind of card, for an identity that has none; ``None`` if there is none.

        Raises:
            RecordError: the newest file is spoilt.
            OSError: it cannot be looked at.
        """
        others = sorted(self.path(identity).parent.glob(f"{identity.capability}-*.json"), key=_modified)
        return read(others[-1]) if others else None

    def _stale(self, identity: Identity, read: Reader[T]) -> str:
        """Say how the newest record of this kind of card differs from what is here now."""
        other = self.newest_other(identity, read)
        if other is None:
            return ""
        changed = ", ".join(other.identity.differences(identity))
        return f"{self.path(other.identity).name} was made with other versions ({changed})."


def _modified(path: Path) -> float:
    return path.lstat().st_mtime


def now() -> str:
    """The time as records hold it: UTC, to the second."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
