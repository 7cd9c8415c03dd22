"""What the command line does with an SGLang on disk: look, check, apply, revert."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from typing import Literal

from sglang_sm120.errors import PatchError
from sglang_sm120.upstream import transaction
from sglang_sm120.upstream.catalog import Catalog, combined
from sglang_sm120.upstream.patchfile import Patch
from sglang_sm120.upstream.target import Target, identify, sha256
from sglang_sm120.upstream.transaction import File, State

logger = logging.getLogger("sglang_sm120")

Condition = Literal["published", "patched", "interrupted", "changed"]


@dataclass(frozen=True)
class Status:
    """How one SGLang stands.

    Attributes:
        condition: ``published`` (as released), ``patched``, ``interrupted`` (a command was killed; the next apply or
            revert repairs it) or ``changed`` (none of these; ``detail`` says what).
        release: of SGLang, ``None`` if it cannot be told.
    """

    condition: Condition
    release: str | None
    patches: tuple[str, ...]
    detail: str = ""


@dataclass(frozen=True)
class Change:
    """A series worked out for one SGLang, before anything is written."""

    release: str
    series: tuple[Patch, ...]
    state: State
    contents: dict[str, bytes]


def inspect(target: Target, catalog: Catalog) -> Status:
    """Look at ``target`` without changing it."""
    try:
        state = transaction.read_state(target)
        if state is not None and not transaction.replaced_since(target, state):
            return _recorded(target, state)
        release = identify(target, catalog)
    except PatchError as error:
        return Status("changed", target.stated_release(), (), str(error))
    return Status("published", release, ())


def check(target: Target, catalog: Catalog) -> Change:
    """Work out what :func:`apply` would do, and change nothing.

    Raises:
        PatchError: it would not work; the message says why and names the files.
    """
    state = transaction.read_state(target)
    if state is not None and not transaction.replaced_since(target, state):
        status = _recorded(target, state)
        if status.condition == "interrupted":
            raise PatchError(f"{target.package}: {status.detail}")
        raise PatchError(f"{target.package} is patched already; `sglang-sm120 patches revert` takes that back.")
    release, stated = identify(target, catalog), target.stated_release()
    if stated not in {release, None}:
        logger.warning(
            "%s states that it is SGLang %s; the files that the patches change are those of %s, whose patches it gets.",
            target.package,
            stated,
            release,
        )
    return _plan(target, catalog.series(release), release, _left_over(target, state))


def apply(target: Target, catalog: Catalog) -> Change:
    """Apply the whole series of the release that ``target`` is.

    Raises:
        PatchError: it cannot be done; nothing was changed.
    """
    with transaction.locked(target):
        _repair(target)
        change = check(target, catalog)
        transaction.write(target, change.state, change.contents)
    return change


def revert(target: Target) -> State | None:
    """Put every file back as it was; return what was undone, ``None`` if there was nothing.

    Raises:
        PatchError: a file was changed since, or nothing can be written.
    """
    with transaction.locked(target):
        undone = _repair(target)
        state = transaction.read_state(target)
        if state is None:
            return undone
        transaction.revert(target, state)
        return state


def _recorded(target: Target, state: State) -> Status:
    names = tuple(state.patches)
    if state.phase != "applied":
        detail = "a patches command was interrupted; `sglang-sm120 patches revert` or apply repairs it first."
        return Status("interrupted", state.release, names, detail)
    changed = _unlike(target, state)
    if changed:
        return Status("changed", state.release, names, f"changed after the patches: {', '.join(changed)}")
    return Status("patched", state.release, names)


def _unlike(target: Target, state: State) -> list[str]:
    places = {f.path: target.locate(f.path) for f in state.files}
    return [f.path for f in state.files if (place := places[f.path]) is None or sha256(place) != f.after]


def _repair(target: Target) -> State | None:
    """Undo what an interrupted command or a new installation left half done; return its state if there was one."""
    state = transaction.read_state(target)
    if state is None:
        _forget(target)  # a start that was interrupted before it changed anything
        return None
    if transaction.replaced_since(target, state):
        logger.warning("%s is not patched any more; what is left of the patches is removed.", target.package)
    elif state.phase == "applied":
        return None
    else:
        logger.warning("An interrupted command had left %s half patched; restoring it.", target.package)
    transaction.restore(target, state)
    return state


def _forget(target: Target) -> None:
    try:
        transaction.forget(target)
    except OSError as error:
        raise PatchError(f"{target.package} cannot be written: {error}. Nothing was changed.") from error


def _left_over(target: Target, state: State | None) -> set[str]:
    """Files that patches had created and that stayed when SGLang was installed anew: an installer removes its own."""
    if state is None:
        return set()
    return {f.path for f in state.files if f.before is None} - set(_unlike(target, state))


def _plan(target: Target, series: tuple[Patch, ...], release: str, left_over: set[str]) -> Change:
    files: list[File] = []
    contents: dict[str, bytes] = {}
    for path, changes in combined(series).items():
        place = target.locate(path)
        if place is None:
            continue
        old = place.read_bytes() if place.is_file() and path not in left_over else None
        text = None if old is None else old.decode("utf-8")
        for change in changes:
            text = change.apply(text)
        new = (text or "").encode("utf-8")
        if path.endswith(".py"):
            _compile(new, path)
        files.append(File(path, None if old is None else _digest(old), _digest(new)))
        contents[path] = new
    names = {patch.name: _digest(patch.text.encode("utf-8")) for patch in series}
    folders = transaction.new_folders(target, [file.path for file in files])
    return Change(release, series, State("applying", release, names, tuple(files), folders), contents)


def _compile(source: bytes, path: str) -> None:
    try:
        compile(source, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise PatchError(f"{path} would not compile when patched: {error}. Nothing was changed.") from error


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
