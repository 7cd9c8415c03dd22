"""Files that a command writes and a server reads: whose numbers they are, strict reading, atomic writing.

The probe record and the tuning table are JSON. They are data of one card under one set of versions, so each
carries an :class:`Identity`, and a file of another identity is stale. Nothing in such a file is ever executed,
imported or used as a path.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import stat
import tempfile
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from sglang_sm120 import __version__, env
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.errors import RecordError

logger = logging.getLogger(__name__)

#: A tuning table of a large model has some thousand entries of about 200 bytes.
MAX_BYTES = 16 * 2**20
NO_CAPABILITY = "none"


@dataclass(frozen=True)
class Identity:
    """The card and the versions that a measurement belongs to.

    Attributes:
        card: the name that the driver gives the card, or "no CUDA device". Cards of one name count as equal.
        capability: compute capability such as ``12.0``, or ``none``.
        versions: version by package key, ``driver``, ``cuda`` and ``sglang_sm120`` included.
    """

    card: str
    capability: str
    versions: Mapping[str, str]

    @property
    def digest(self) -> str:
        """A short name for file names; equal identities have equal digests."""
        text = json.dumps([self.card, self.capability, sorted(self.versions.items())])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def differences(self, other: Identity) -> list[str]:
        """Say what differs, from this identity to the other, empty if nothing does."""
        found = []
        if self.card != other.card:
            found.append(f"card {self.card} → {other.card}")
        if self.capability != other.capability:
            found.append(f"capability {self.capability} → {other.capability}")
        for key in sorted({*self.versions, *other.versions}):
            old, new = self.versions.get(key, "missing"), other.versions.get(key, "missing")
            if old != new:
                found.append(f"{key} {old} → {new}")
        return found

    def to_json(self) -> dict[str, Any]:
        """The identity as it stands in files."""
        return {"card": self.card, "capability": self.capability, "versions": dict(sorted(self.versions.items()))}

    @classmethod
    def from_json(cls, fields: Fields) -> Identity:
        """Read an identity; raises :class:`RecordError` on anything unexpected."""
        versions = fields.object("versions")
        found = cls(
            card=fields.text("card"),
            capability=fields.text("capability"),
            versions={key: versions.text(key) for key in versions.names()},
        )
        fields.done()
        return found


def identity_of(facts: HostFacts) -> Identity:
    """Return the identity of this machine."""
    capability = f"{facts.capability[0]}.{facts.capability[1]}" if facts.capability else NO_CAPABILITY
    return Identity(facts.device_name, capability, {**facts.versions, "sglang_sm120": __version__})


class Fields:
    """One JSON object, read strictly: every type is checked and nothing may be left over.

    ``where`` names the object in messages, for example ``table.json: entries[3]``.
    """

    def __init__(self, where: str, value: object) -> None:
        self.where = where
        if not isinstance(value, dict):
            self.fail("is no JSON object")
        self._value: dict[str, Any] = value
        self._read: set[str] = set()

    def names(self) -> list[str]:
        """The names of all fields."""
        return list(self._value)

    def fail(self, problem: str) -> NoReturn:
        """Raise :class:`RecordError` about this object."""
        raise RecordError(f"{self.where} {problem}.")

    def text(self, key: str, choices: Sequence[str] = ()) -> str:
        """Return a string without control characters, one of ``choices`` if there are any."""
        value = self._take(key)
        if isinstance(value, str) and is_unprintable(value):
            self.fail(f"has control characters in {key}={value!r}")
        if not isinstance(value, str) or (choices and value not in choices):
            expected = f"one of {', '.join(choices)}" if choices else "text"
            self.fail(f"has {key}={value!r}, expected is {expected}")
        return value

    def integer(self, key: str, low: int = 0, high: int = 2**31) -> int:
        """Return an integer of ``[low, high]``."""
        value = self._take(key)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.fail(f"has {key}={value!r}, expected is an integer from {low} to {high}")
        return value

    def number(self, key: str, low: float = 0.0, high: float = 1e12) -> float:
        """Return a number of ``[low, high]``."""
        value = self._take(key)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
            self.fail(f"has {key}={value!r}, expected is a number from {low} to {high}")
        return float(value)

    def flag(self, key: str) -> bool:
        """Return a boolean."""
        value = self._take(key)
        if not isinstance(value, bool):
            self.fail(f"has {key}={value!r}, expected is true or false")
        return value

    def object(self, key: str) -> Fields:
        """Return an object inside this one."""
        return Fields(f"{self.where}: {key}", self._take(key))

    def objects(self, key: str) -> list[Fields]:
        """Return a list of objects."""
        value = self._take(key)
        if not isinstance(value, list):
            self.fail(f"has a {key} that is no list")
        return [Fields(f"{self.where}: {key}[{index}]", item) for index, item in enumerate(value)]

    def integers(self, key: str, low: int = 0, high: int = 2**31) -> tuple[int, ...]:
        """Return a list of integers of ``[low, high]``."""
        value = self._take(key)
        if not isinstance(value, list) or not all(type(item) is int and low <= item <= high for item in value):
            self.fail(f"has {key}={value!r}, expected is a list of integers from {low} to {high}")
        return tuple(value)

    def schema(self, expected: int) -> None:
        """Check the version of the file's format."""
        found = self.integer("schema")
        if found != expected:
            self.fail(f"has format version {found} and this package reads {expected}: write the file anew")

    def done(self) -> None:
        """Refuse fields that nobody asked for."""
        unread = sorted(set(self._value) - self._read)
        if unread:
            self.fail(f"has unknown fields: {', '.join(unread)}")

    def _take(self, key: str) -> Any:
        if key not in self._value:
            self.fail(f"has no field {key}")
        self._read.add(key)
        return self._value[key]


def read_json(path: Path) -> Fields:
    """Read a file that nobody but the user and root could have written.

    A link is followed, as Kubernetes mounts every file of a ConfigMap as one, if nobody else has made it; what it leads
    to is held to the same.

    Raises:
        FileNotFoundError: there is none.
        RecordError: it is no regular file, others may write to it, it is too large, or it is no strict JSON.
    """
    try:
        if path.lstat().st_uid not in _trusted():
            raise RecordError(f"{path} belongs to another user: copy it, and name the copy.")
        # O_NONBLOCK: opening a FIFO must not wait for a writer.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror or error}.") from error
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise RecordError(f"{path} is no regular file.")
        if status.st_uid not in _trusted() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise RecordError(
                f"{path.resolve()} can be written by other users: take ownership and run chmod go-w on it, or copy it."
            )
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise RecordError(f"{path} is larger than {MAX_BYTES} bytes.")
    try:
        value = json.loads(data, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path} is no strict JSON: {error}.") from error
    return Fields(path.name, value)


def _trusted() -> tuple[int, int]:
    """Owners whose files are believed: the user of this process, and root."""
    return os.geteuid(), 0


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one process at a time read a file in ``folder``, change it and write it.

    Some network file systems have no locks. Nobody waits there: files stay whole, and of two writers the later wins.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            logger.debug("%s cannot be locked: %s", folder, error)
        yield
    finally:
        os.close(descriptor)


def require_writable(path: Path) -> None:
    """Check that :func:`write_json` can write to ``path``, before the work whose result it is to keep.

    Raises:
        RecordError: it cannot.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise _unwritable(path, error) from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file that appears whole or not at all, readable by the user only.

    Raises:
        RecordError: it cannot be written.
    """
    text = json.dumps(value, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> RecordError:
    kept = path.is_relative_to(env.cache_path())
    remedy = f"name another folder in {env.CACHE_DIR}" if kept else "name another file"
    return RecordError(f"{path} cannot be written: {error.strerror or error}; {remedy}.")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a field stands there twice")
    unprintable = next(filter(is_unprintable, found), None)
    if unprintable is not None:
        raise ValueError(f"the name {unprintable!r} has control characters")
    return found


def is_unprintable(text: str) -> bool:
    """Whether a text must not reach a log or a terminal: it would steer it, forge lines, or cannot be encoded."""
    return any(unicodedata.category(character) in ("Cc", "Cs") for character in text)


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")
