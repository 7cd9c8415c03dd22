"""Replace files of an SGLang all together or not at all, also if the process is killed in the middle.

Everything lives in one folder inside the package, ``.sm120-patches``: ``state.json``, the originals, and new files
until they are moved into place. Files are only ever renamed over their names, never written: a file of
``site-packages`` can be a hard link into a package manager's cache, or a symbolic link.

``state.json`` is itself replaced by a rename, and says how far things are:

    no file      nothing was changed (what else the folder holds is rubbish of an interrupted start)
    applying     some files may be new; undone by moving the originals back
    applied      every file is new
    reverting    some files may be old again; finished by moving the originals back

So there is one way back for every interruption: :func:`restore`.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from sglang_sm120.errors import PatchError
from sglang_sm120.upstream.target import Target, sha256

FOLDER = ".sm120-patches"
_FORMAT = 1

Phase = Literal["applying", "applied", "reverting"]


@dataclass(frozen=True)
class File:
    """One file of a series: SHA-256 before (``None``: it did not exist) and after."""

    path: str
    before: str | None
    after: str


@dataclass(frozen=True)
class State:
    """What ``state.json`` holds: the manifest of a patched SGLang, and the journal while it is being changed.

    Attributes:
        release: of SGLang.
        patches: name to SHA-256 of each patch, in order.
        files: in the order of their saved originals.
        folders: created for new files, outermost first.
    """

    phase: Phase
    release: str
    patches: dict[str, str]
    files: tuple[File, ...]
    folders: tuple[str, ...]
    format: int = _FORMAT


@contextmanager
def locked(target: Target) -> Iterator[None]:
    """Hold the only right to change ``target``. The lock ends with the process, however that ends.

    Raises:
        PatchError: another process holds it.
    """
    # The folder itself is locked: a lock file could not be made where nothing may be written.
    descriptor = os.open(target.package, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(descriptor, target)
        yield
    finally:
        os.close(descriptor)


def read_state(target: Target) -> State | None:
    """The state of ``target``; ``None`` if it has none.

    Raises:
        PatchError: a newer version of this package wrote it, or it is damaged.
    """
    file = target.package / FOLDER / "state.json"
    if not file.is_file():
        return None
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        files = tuple(File(**entry) for entry in data.pop("files"))
        state = State(**{**data, "files": files, "folders": tuple(data["folders"])})
        if not all(isinstance(f.path, str) and target.locate(f.path) for f in files):
            raise ValueError("it names a file that this SGLang has no place for")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PatchError(f"{file} cannot be read ({error}); reinstall SGLang.") from error
    if state.format != _FORMAT:
        raise PatchError(f"{file} was written by a newer sglang-sm120; use that to revert.")
    return state


def changed_since(target: Target, state: State) -> list[str]:
    """Files that are neither as they were before nor as the patches left them."""
    return [f.path for f in state.files if sha256(_place(target, f)) not in (f.before, f.after)]


def replaced_since(target: Target, state: State) -> bool:
    """Whether SGLang was installed anew over its patches: none of the changed files is the patched one."""
    return all(sha256(_place(target, f)) != f.after for f in state.files if f.before is not None)


def write(target: Target, state: State, contents: Mapping[str, bytes]) -> None:
    """Put ``contents`` (path to bytes) in place. ``state`` describes the change; its phase is set here.

    Raises:
        PatchError: it could not be done; everything is as it was before.
    """
    try:
        _stage(target, state, contents)
        _write_state(target, replace(state, phase="applying"))
        for folder in state.folders:
            _inside(target, folder).mkdir()
        for number, file in enumerate(state.files):
            _move(target.package / FOLDER / f"new-{number}", _place(target, file))
            _drop_bytecode(_place(target, file))
        _write_state(target, replace(state, phase="applied"))
    except BaseException as error:
        restore(target, state)
        if isinstance(error, OSError):
            raise PatchError(f"{target.package} could not be patched: {error}. Nothing was changed.") from error
        raise


def restore(target: Target, state: State) -> None:
    """Move every original back and forget the state. Starts again where an earlier call was interrupted.

    Where SGLang was installed anew, only what the patches had created is removed.

    Raises:
        PatchError: a file is neither the original nor the patched one; nothing was moved. Or a file could not be
            moved; the next call goes on.
    """
    changed = changed_since(target, state)
    if changed and not replaced_since(target, state):
        raise PatchError(
            f"{', '.join(changed)} in {target.package} changed after the patches were applied. Nothing was touched; "
            "undo that change, or reinstall SGLang."
        )
    try:
        for number, file in enumerate(state.files):
            place = _place(target, file)
            if sha256(place) == file.after:
                if file.before is None:
                    place.unlink()
                else:
                    _move(target.package / FOLDER / f"original-{number}", place)
            # Of a file that is back already too: an earlier call may have died between the two.
            _drop_bytecode(place)
        for folder in reversed(state.folders):
            _remove_empty(_inside(target, folder))
        forget(target)
    except OSError as error:
        raise PatchError(
            f"{target.package} could not be restored: {error}. Run `sglang-sm120 patches revert` again."
        ) from error


def revert(target: Target, state: State) -> None:
    """Undo an applied series, such that an interruption is finished by the next command.

    Raises:
        PatchError: see :func:`restore`; or the target cannot be written, and nothing was changed.
    """
    if not changed_since(target, state):
        try:
            _write_state(target, replace(state, phase="reverting"))
        except OSError as error:
            raise PatchError(f"{target.package} cannot be written: {error}. Nothing was changed.") from error
    restore(target, state)


def forget(target: Target) -> None:
    """Remove the folder. Interrupted, it leaves a state by which nothing has to be moved."""
    folder = target.package / FOLDER
    if folder.is_dir():
        shutil.rmtree(folder)


def new_folders(target: Target, paths: list[str]) -> tuple[str, ...]:
    """Folders that have to be created for files at ``paths``, outermost first, relative to the target's root."""
    missing: dict[str, None] = {}
    for path in paths:
        place = target.locate(path)
        parents = [] if place is None else [p for p in place.parents if not p.exists()]
        for parent in reversed(parents):
            missing[str(parent.relative_to(_root(target)))] = None
    return tuple(missing)


def _lock(descriptor: int, target: Target) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise PatchError(f"Another `sglang-sm120 patches` is changing {target.package}; wait for it.") from error


def _stage(target: Target, state: State, contents: Mapping[str, bytes]) -> None:
    forget(target)
    folder = target.package / FOLDER
    folder.mkdir()
    for number, file in enumerate(state.files):
        place, staged = _place(target, file), folder / f"new-{number}"
        staged.write_bytes(contents[file.path])
        if file.before is not None:
            _become_like(staged, place)
            shutil.copy2(place, folder / f"original-{number}", follow_symlinks=False)
            _sync(folder / f"original-{number}")
        _sync(staged)
    _sync(folder)


def _become_like(path: Path, model: Path) -> None:
    facts = model.stat()
    path.chmod(stat.S_IMODE(facts.st_mode))
    if os.geteuid() == 0:
        os.chown(path, facts.st_uid, facts.st_gid)


def _write_state(target: Target, state: State) -> None:
    folder = target.package / FOLDER
    draft = folder / "state.draft"
    draft.write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
    _sync(draft)
    _move(draft, folder / "state.json")


def _move(source: Path, place: Path) -> None:
    source.replace(place)
    _sync(place.parent)


def _sync(path: Path) -> None:
    """Have the system write a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _drop_bytecode(source: Path) -> None:
    # Python would notice that the source is another one, except for bytecode that is never checked.
    for compiled in (source.parent / "__pycache__").glob(f"{source.stem}.*.pyc"):
        compiled.unlink()


def _remove_empty(folder: Path) -> None:
    if folder.is_dir():
        shutil.rmtree(folder / "__pycache__", ignore_errors=True)
        if not any(folder.iterdir()):
            folder.rmdir()


def _root(target: Target) -> Path:
    return target.package if target.tree is None else target.tree


def _inside(target: Target, folder: str) -> Path:
    return _root(target) / folder


def _place(target: Target, file: File) -> Path:
    place = target.locate(file.path)
    assert place is not None, f"{file.path} has no place in this layout"
    return place
