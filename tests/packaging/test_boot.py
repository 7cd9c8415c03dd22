"""The boot file in every interpreter: silent, cheap, once, and harmless whatever state the package is in."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.packaging.environments import Env

MODULES = "import sys; print(sorted(sys.modules))"
FINDERS = "import sys; print([type(f).__name__ for f in sys.meta_path].count('_SglangFinder'))"

# --- under every Python ------------------------------------------------------------------------------------


def test_start_is_silent_and_loads_two_small_modules(installed: Env, plain: Env) -> None:
    loaded = set(ast.literal_eval(installed.output(MODULES))) - set(ast.literal_eval(plain.output(MODULES)))
    assert loaded == {"sglang_sm120", "sglang_sm120._boot"}


def test_install_runs_once_and_before_sglang(installed: Env, fake_sglang: Path) -> None:
    code = (
        "import importlib, sys, sglang\n"
        "import sglang\n"
        "print(type(sglang.__loader__).__name__, sglang.__spec__.loader is sglang.__loader__)\n"
        "importlib.reload(sglang)\n" + FINDERS
    )
    told = installed.output(code, PYTHONPATH=str(fake_sglang))
    assert told.split() == ["install", "sglang", "SourceFileLoader", "True", "sglang", "0"]


def test_module_switch_and_spawned_children_are_covered(installed: Env, fake_sglang: Path, tmp_path: Path) -> None:
    server = installed.run("-m", "sglang.launch_server", PYTHONPATH=str(fake_sglang))
    assert (server.stdout.split(), server.stderr) == (["install", "sglang", "server"], "")
    script = tmp_path / "parent.py"
    script.write_text(
        "import multiprocessing\n"
        "def child():\n    import sglang\n"
        "if __name__ == '__main__':\n"
        "    process = multiprocessing.get_context('spawn').Process(target=child)\n"
        "    process.start()\n    process.join()\n",
        encoding="utf-8",
    )
    spawned = installed.run(script, PYTHONPATH=str(fake_sglang))
    assert (spawned.stdout.split(), spawned.stderr) == (["install", "sglang"], "")


def test_interpreter_switches(installed: Env, fake_sglang: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(fake_sglang)!r}); import sitecustomize, sglang"
    assert installed.output(code, "-I") == "install\nsglang\n"
    assert installed.output(code, "-E") == "install\nsglang\n"
    # Without site there are no site-packages, so there is no package either.
    assert installed.output(code, "-S") == "sglang\n"


# --- not depending on the version --------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["1", "true"])
def test_switched_off(shared: Env, fake_sglang: Path, value: str) -> None:
    code = FINDERS + "; from sglang_sm120 import _boot; print(_boot.is_active()); import sglang"
    told = shared.output(code, PYTHONPATH=str(fake_sglang), SGLANG_SM120_DISABLE=value)
    assert told.split() == ["0", "False", "sglang"]


def test_import_of_the_package_loads_neither_torch_nor_sglang(shared: Env) -> None:
    code = "import sys, sglang_sm120; print({'torch', 'sglang', 'typing'} & set(sys.modules))"
    assert shared.output(code, "-S", PYTHONPATH=str(shared.site_packages)) == "set()\n"


def test_boot_file_read_twice_arms_once(shared: Env, fake_sglang: Path) -> None:
    again = f"import site; site.addsitedir({str(shared.site_packages)!r})"
    told = shared.output(f"{again}\n{FINDERS}\nimport sglang\n{again}\n{FINDERS}", PYTHONPATH=str(fake_sglang))
    assert told.split() == ["1", "install", "sglang", "0"]


def test_asking_whether_sglang_is_there_does_not_install(shared: Env, fake_sglang: Path) -> None:
    code = (
        "import importlib.util\n"
        "spec = importlib.util.find_spec('sglang')\n"
        "print('asked', spec.loader.is_package('sglang'), spec.origin)\n"
        "import sglang\n"
    )
    told = shared.output(code, PYTHONPATH=str(fake_sglang))
    assert told.split() == ["asked", "True", f"{fake_sglang}/sglang/__init__.py", "install", "sglang"]


def test_absent_sglang_stays_an_ordinary_import_error(shared: Env) -> None:
    result = shared.run("-c", "import sglang")
    assert result.stderr.endswith("ModuleNotFoundError: No module named 'sglang'\n")


def test_folder_called_sglang_is_not_sglang(shared: Env, fake_sglang: Path, tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    shutil.copy(fake_sglang / "sitecustomize.py", tmp_path)
    told = shared.output("import sglang; print(sglang.__file__)", PYTHONPATH=str(tmp_path))
    assert told == "None\n"


def test_finder_of_another_package_is_still_asked(shared: Env, fake_sglang: Path, tmp_path: Path) -> None:
    code = (
        "import sys, importlib.util\n"
        "class Other:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'sglang':\n"
        f"            return importlib.util.spec_from_file_location(name, {str(tmp_path / 'other.py')!r})\n"
        "sys.meta_path.insert(1, Other())\n"
        "import sglang\n"
    )
    (tmp_path / "other.py").write_text("print('other')\n", encoding="utf-8")
    assert shared.output(code, PYTHONPATH=str(fake_sglang)) == "install\nother\n"


def test_stop_by_install_stops_the_import_every_time(shared: Env, fake_sglang: Path, tmp_path: Path) -> None:
    stop = "import sitecustomize, sys\ndef install():\n    raise SystemExit('stopped')\n"
    stop += "sys.modules['sglang_sm120.host.installer'].install = install\n"
    caught = "try:\n    import sglang\nexcept SystemExit as stop:\n    print(stop)\n"
    result = shared.run("-c", f"{stop}{caught}import sglang\n", PYTHONPATH=str(fake_sglang))
    assert (result.returncode, result.stdout, result.stderr) == (1, "stopped\n", "stopped\n")


def test_second_copy_shows_in_the_origin(shared: Env, wheel: Path, tmp_path: Path, fake_sglang: Path) -> None:
    target = tmp_path / "target"
    shared.pip("install", "--no-deps", "--no-index", "--target", target, wheel)
    code = f"from sglang_sm120 import _boot; print(_boot.is_active(), _boot.origin)\n{FINDERS}\nimport sglang"
    told = shared.output(code, PYTHONPATH=f"{target}:{fake_sglang}")
    assert told.split() == ["True", f"{target}/sglang_sm120/_boot.py", "1", "install", "sglang"]


# --- damaged installations ---------------------------------------------------------------------------------


@pytest.mark.parametrize("left", ["nothing", "empty folder", "bytecode"])
def test_boot_file_without_its_package_is_silent(own: Env, fake_sglang: Path, left: str) -> None:
    package = own.site_packages / "sglang_sm120"
    if left == "nothing":
        shutil.rmtree(package)
    else:
        for file in [file for file in package.rglob("*") if file.is_file()]:
            if left == "empty folder" or file.suffix != ".pyc":
                file.unlink()
    assert own.output("import sglang", PYTHONPATH=str(fake_sglang)) == "sglang\n"


def test_half_removed_package_is_one_warning(own: Env, fake_sglang: Path) -> None:
    shutil.rmtree(own.site_packages / "sglang_sm120" / "host")
    code = f"import sys; sys.path.append({str(fake_sglang)!r}); import sglang, sglang"
    result = own.run("-c", code)
    assert (result.returncode, result.stdout) == (0, "sglang\n")
    assert result.stderr.count("\n") == 1
    assert "sglang-sm120 is installed incompletely (No module named 'sglang_sm120.host')" in result.stderr


def test_read_only_site_packages(own: Env, fake_sglang: Path) -> None:
    for cache in list(own.path.rglob("__pycache__")):
        shutil.rmtree(cache)
    if os.geteuid() == 0:
        # Permissions do not stop root; a file where the cache folder would be does.
        for folder in {file.parent for file in own.site_packages.rglob("*.py")}:
            (folder / "__pycache__").touch()
    subprocess.run(["chmod", "-R", "a-w", own.site_packages], check=True)
    before = own.files()
    assert own.output(MODULES).count("sglang_sm120") == 2
    assert own.output("import sglang", PYTHONPATH=str(fake_sglang)) == "install\nsglang\n"
    assert own.files() == before
