"""All or nothing: whatever fails, whenever the process dies, the SGLang on disk is the published or the patched one."""

from __future__ import annotations

import errno
import os
import py_compile
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_sm120.errors import PatchError
from sglang_sm120.upstream import operations, transaction
from sglang_sm120.upstream.catalog import Catalog
from sglang_sm120.upstream.target import Target
from tests.patches.conftest import make_package
from tests.patches.snapshot import snapshot

ROOT = Path(__file__).resolve().parents[2]

#: What the interpreter reports before it changes the disk.
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.chown", "open"}
WRITING = os.O_WRONLY | os.O_RDWR


def killed_at(number: int, command: Callable[[], object]) -> bool:
    """Run ``command`` in a child that kills itself with signal 9 right before its change of this number.

    Returns whether it died; with too large a number it ends by itself.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _die_before(number)
            command()
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def _die_before(number: int) -> None:
    seen = 0

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event not in CHANGES or (event == "open" and not int(str(arguments[2])) & WRITING):
            return
        seen += 1
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def until_it_survives(command: Callable[[], object], after_death: Callable[[], None]) -> int:
    """Kill at the 1st, the 2nd, ... change of the disk; return how many deaths it took until there was none."""
    for number in range(1, 200):
        if not killed_at(number, command):
            return number - 1
        after_death()
    raise AssertionError("it never came to an end")


def test_an_apply_killed_anywhere_is_undone_by_the_next_command(installed: Target, catalog: Catalog) -> None:
    before = snapshot(installed.package)
    conditions = set()

    def repair() -> None:
        conditions.add(operations.inspect(installed, catalog).condition)
        operations.revert(installed)
        assert snapshot(installed.package) == before

    assert until_it_survives(lambda: operations.apply(installed, catalog), repair) > 15
    assert conditions == {"published", "interrupted"}
    assert operations.inspect(installed, catalog).condition == "patched"


def test_an_apply_killed_anywhere_can_be_repeated(installed: Target, catalog: Catalog, tmp_path: Path) -> None:
    untouched = Target(make_package(tmp_path / "again"), None)
    operations.apply(untouched, catalog)
    expected = {path: (untouched.package / path).read_bytes() for path in ("srt/engine.py", "srt/values.py")}
    for number in (5, 12, 17):
        assert killed_at(number, lambda: operations.apply(installed, catalog))
        operations.apply(installed, catalog)
        assert {path: (installed.package / path).read_bytes() for path in expected} == expected
        operations.revert(installed)


def test_a_revert_killed_anywhere_is_finished_by_the_next_command(installed: Target, catalog: Catalog) -> None:
    before = snapshot(installed.package)
    operations.apply(installed, catalog)
    conditions = set()

    def repair() -> None:
        conditions.add(operations.inspect(installed, catalog).condition)
        operations.revert(installed)
        assert snapshot(installed.package) == before
        operations.apply(installed, catalog)

    assert until_it_survives(lambda: operations.revert(installed), repair) > 5
    assert conditions == {"patched", "interrupted", "published"}
    assert snapshot(installed.package) == before


def test_no_bytecode_of_the_patches_outlives_a_revert_that_was_killed(installed: Target, catalog: Catalog) -> None:
    operations.apply(installed, catalog)

    def compile_patched() -> list[Path]:
        # Python believes such bytecode without a look at the source.
        unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
        sources = [installed.package / path for path in ("srt/engine.py", "srt/values.py")]
        return [Path(py_compile.compile(str(source), invalidation_mode=unchecked) or "") for source in sources]

    compiled = compile_patched()

    def repair() -> None:
        operations.revert(installed)
        assert not any(file.exists() for file in compiled)
        operations.apply(installed, catalog)
        compile_patched()

    assert until_it_survives(lambda: operations.revert(installed), repair) > 5
    assert not any(file.exists() for file in compiled)


def test_a_revert_killed_anywhere_is_finished_by_an_apply(installed: Target, catalog: Catalog) -> None:
    operations.apply(installed, catalog)
    patched = {path: (installed.package / path).read_bytes() for path in ("srt/engine.py", "srt/values.py")}

    def repair() -> None:
        if operations.inspect(installed, catalog).condition != "patched":
            operations.apply(installed, catalog)
        assert {path: (installed.package / path).read_bytes() for path in patched} == patched

    assert until_it_survives(lambda: operations.revert(installed), repair) > 5


def test_check_reports_an_interrupted_command(installed: Target, catalog: Catalog) -> None:
    for number in range(1, 200):
        assert killed_at(number, lambda: operations.apply(installed, catalog))
        if operations.inspect(installed, catalog).condition == "interrupted":
            break
        operations.revert(installed)
    before = snapshot(installed.package)
    with pytest.raises(PatchError, match="interrupted"):
        operations.check(installed, catalog)
    assert snapshot(installed.package) == before


@pytest.mark.parametrize("failing", range(5))  # three files are moved, and the state twice
def test_an_error_of_the_disk_changes_nothing(
    failing: int, installed: Target, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(installed.package)
    moved = 0
    move = transaction._move

    def full_disk(source: Path, place: Path) -> None:
        nonlocal moved
        moved += 1
        if moved == failing + 1:
            raise OSError(errno.ENOSPC, "No space left on device", str(place))
        move(source, place)

    monkeypatch.setattr(transaction, "_move", full_disk)
    with pytest.raises(PatchError, match="No space left.*Nothing was changed"):
        operations.apply(installed, catalog)
    assert snapshot(installed.package) == before


def test_an_interrupt_from_the_keyboard_changes_nothing(
    installed: Target, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(installed.package)
    drop = transaction._drop_bytecode
    calls = iter([KeyboardInterrupt()])

    def interrupted(source: Path) -> None:
        error = next(calls, None)
        if error is not None:
            raise error
        drop(source)

    monkeypatch.setattr(transaction, "_drop_bytecode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        operations.apply(installed, catalog)
    assert snapshot(installed.package) == before


READ_ONLY = """
import os, sys
from pathlib import Path
from sglang_sm120.errors import PatchError
from sglang_sm120.upstream import operations
from sglang_sm120.upstream.catalog import load_catalog
from sglang_sm120.upstream.target import find_target

target, catalog = find_target(Path(sys.argv[1])), load_catalog(Path(sys.argv[2]))
if os.geteuid() == 0:  # the superuser may write everywhere
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    operations.apply(target, catalog)
except PatchError as error:
    print(f"refused: {error}")
"""


def test_a_read_only_installation_is_one_typed_error(catalog: Catalog) -> None:
    # Not below tmp_path: nobody but its owner may enter that, and the child is nobody.
    folder = Path(tempfile.mkdtemp(prefix="read-only-"))
    try:
        folder.chmod(0o755)
        package = make_package(folder)
        patches = shutil.copytree(catalog.root, folder / "patches")
        for path in (package, *package.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        before = snapshot(package)
        script = folder / "script.py"
        script.write_text(READ_ONLY)
        run = subprocess.run(
            [sys.executable, str(script), str(package), str(patches)],
            env={**os.environ, "SGLANG_SM120_DISABLE": "1", "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout.startswith("refused: "), run.stderr
        assert "Permission denied" in run.stdout
        assert "Nothing was changed" in run.stdout
        assert snapshot(package) == before
    finally:
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755)
        shutil.rmtree(folder)


HOLD = """
import sys
from pathlib import Path
from sglang_sm120.upstream import transaction
from sglang_sm120.upstream.target import find_target

with transaction.locked(find_target(Path(sys.argv[1]))):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_commands_exclude_each_other(installed: Target, catalog: Catalog) -> None:
    before = snapshot(installed.package)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(installed.package)],
        cwd=ROOT,
        env={**os.environ, "SGLANG_SM120_DISABLE": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    with holder:
        assert holder.stdout.readline() == "held\n"
        for command in (lambda: operations.apply(installed, catalog), lambda: operations.revert(installed)):
            with pytest.raises(PatchError, match="Another"):
                command()
        assert snapshot(installed.package) == before
        holder.stdin.close()
    operations.apply(installed, catalog)
