#!/usr/bin/env python3
"""Make and find the cached Python environments of this repository.

    python3 tools/envs.py NAME [--print]     create (or refresh) one, then say where its interpreter is
    python3 tools/envs.py --list             every name

NAME is ``dev`` (SGLang 0.5.23, the test tools and this package, editable), ``sglang-VERSION`` (that release
and this package as the wheel that would be published) or ``gpu`` (the newest release with all its dependencies,
several gigabytes, for the demo on a machine with an NVIDIA GPU). Progress goes to stderr; with ``--print`` stdout holds
the interpreter's path and nothing else. Calling it again is cheap, and refreshes the package if its sources
changed. ``SM120_DEV_CACHE`` moves the cache, ``TORCH_INDEX_URL`` chooses where torch alone comes from. A cache belongs
to one clone: its environments link to that clone's package and ``cpu_host``.

Nineteen SGLang releases would be nineteen copies of torch. Instead an environment is an empty venv whose one
``.pth`` file stacks shared layers: SGLang's own files, the transformers it pins, the tools, and a base with
torch and everything else. A layer's folder is named after its contents: it is built once, never changed while
someone uses it, and what was interrupted is built again. ``rm -r .cache/envs`` frees everything.
The same file arms ``cpu_host.runtime``, so that SGLang imports in every process on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "tools" / "requirements"
NEWEST = "0.5.23"

#: Every supported SGLang release and the transformers release that it pins.
RELEASES: dict[str, str] = {
    "0.5.9": "4.57.1",
    "0.5.10": "5.3.0",
    "0.5.10.post1": "5.3.0",
    "0.5.11": "5.6.0",
    "0.5.12": "5.6.0",
    "0.5.12.post1": "5.6.0",
    "0.5.13": "5.8.1",
    "0.5.13.post1": "5.8.1",
    "0.5.14": "5.8.1",
    "0.5.15": "5.12.1",
    "0.5.15.post1": "5.12.1",
    "0.5.16": "5.12.1",
    "0.5.17": "5.12.1",
    "0.5.18": "5.12.1",
    "0.5.19": "5.12.1",
    "0.5.20": "5.12.1",
    "0.5.21": "5.12.1",
    "0.5.22": "5.19.0",
    NEWEST: "5.19.0",
}

#: What the published package is made of; a change in any of it refreshes the environments.
PACKAGE_PARTS = ("pyproject.toml", "setup.py", "setup.cfg", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md",
                 "sglang_sm120_boot.pth", "sglang_sm120", "csrc", "patches")  # fmt: skip

#: What an editable installation copies instead of linking.
EDITABLE_PARTS = ("pyproject.toml", "setup.py", "setup.cfg", "sglang_sm120_boot.pth")

#: The modules of a server's processes; the registry imports every model.
_SERVER_IMPORTS = """
import os
import cpu_host.runtime
if not cpu_host.runtime.has_nvidia_driver():
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
import sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler, sglang.srt.models.registry
"""

_PYTHON_SETTINGS = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE")

PIP_QUIET = ("--disable-pip-version-check", "--no-input", "--progress-bar", "off")


class EnvError(RuntimeError):
    """An environment could not be made; the message says which command failed and shows its last lines."""


def names() -> list[str]:
    """Every environment that can be asked for."""
    return ["dev", "gpu", *(f"sglang-{version}" for version in RELEASES)]


def cache_dir() -> Path:
    """Where environments live: one folder per Python version, since compiled packages differ."""
    base = Path(os.environ.get("SM120_DEV_CACHE") or ROOT / ".cache")
    return base.resolve() / "envs" / f"py{sys.version_info[0]}.{sys.version_info[1]}"


def ensure(name: str) -> Path:
    """Create or refresh the environment and return its interpreter. Safe to call from several processes."""
    if name not in names():
        raise EnvError(f"no environment is called {name!r}; known: {', '.join(names())}")
    if sys.version_info < (3, 11):
        raise EnvError(f"SGLang >= 0.5.22 needs Python 3.11 or newer, this is {sys.version.split()[0]}")
    if name == "gpu":
        base = env = _gpu_env()
    else:
        base = _base()
        env = _thin_env(name, _layers(name, base))
    with _locked(env):
        _install_package(env, base, editable=name == "dev")
    return _python(env)


# --- layers ------------------------------------------------------------------------------------------------


def _layers(name: str, base: Path) -> list[Path]:
    """The folders an environment stacks, first wins; the base interpreter's packages come last."""
    version = NEWEST if name == "dev" else name.removeprefix("sglang-")
    layers = [_target_layer(base, f"sglang-{version}", [f"sglang=={version}"])]
    layers.append(_target_layer(base, f"transformers-{RELEASES[version]}"))
    if name == "dev":
        layers.append(_target_layer(base, "tools"))
    return [*layers, _cpu_host_layer(), _site_packages(base)]


def _base() -> Path:
    """A real venv with pip, the common packages and torch."""
    index = os.environ.get("TORCH_INDEX_URL")
    files = [REQUIREMENTS / f"{part}.txt" for part in ("pip", "common", "torch")]

    def build(path: Path) -> None:
        _run("base: creating", [sys.executable, "-m", "venv", str(path)])
        _run("base: installing pip", _pip(path, "-r", str(files[0])))
        _run("base: installing the common packages", _pip(path, "--no-deps", "-r", str(files[1])))
        # With dependencies: a CUDA build of torch brings NVIDIA's libraries, each pinned exactly by torch itself.
        choice = ["--index-url", index] if index else []
        _run("base: installing torch", _pip(path, "-r", str(files[2]), *choice))

    return _once("base", [*(f.read_bytes() for f in files), (index or "").encode()], build)


def _target_layer(base: Path, name: str, packages: list[str] | None = None) -> Path:
    """A folder of packages: those given, or those of the requirements file of this name."""
    wanted = packages
    if wanted is None:
        lines = (REQUIREMENTS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        wanted = [line for line in lines if line and not line.startswith("#")]

    def build(path: Path) -> None:
        _run(f"{name}: installing", _pip(base, "--no-deps", "--target", str(path), *wanted))

    return _once(f"layers/{name}", [w.encode() for w in wanted], build)


def _cpu_host_layer() -> Path:
    """A folder with nothing but a link to ``cpu_host``: the repository itself must not be importable, or its
    ``sglang_sm120`` could stand in for the wheel that an environment is about."""
    layer = cache_dir() / "layers" / "cpu_host"
    layer.mkdir(parents=True, exist_ok=True)
    link = layer / "cpu_host"
    with _locked(layer):
        if not link.is_symlink() or link.readlink() != ROOT / "cpu_host":
            link.unlink(missing_ok=True)
            link.symlink_to(ROOT / "cpu_host")
    return layer


def _once(name: str, inputs: Iterable[bytes], build: Callable[[Path], None]) -> Path:
    """The folder ``name-DIGEST`` made from these inputs, built if it is not complete."""
    digest = _digest(inputs)
    path = cache_dir() / f"{name}-{digest[:8]}"
    _complete(path, digest, build)
    return path


def _complete(path: Path, digest: str, build: Callable[[Path], None]) -> None:
    """Build a folder anew unless it is complete and made from the same. Other folders can be built meanwhile."""
    stamp = path / ".complete"
    with _locked(path):
        if stamp.is_file() and stamp.read_text(encoding="ascii") == digest:
            return
        shutil.rmtree(path, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        build(path)
        stamp.write_text(digest, encoding="ascii")


def _thin_env(name: str, layers: list[Path]) -> Path:
    """An empty venv that sees the layers through one ``.pth`` file, with their console scripts."""

    def build(path: Path) -> None:
        _run(f"{name}: creating", [sys.executable, "-m", "venv", "--without-pip", str(path)])
        _stack(path, layers)
        for script in (s for layer in layers for s in (layer / "bin").glob("*")):
            _adopt_script(script, path)
        _write_bytecode(path)

    path = cache_dir() / name
    _complete(path, _digest([_SERVER_IMPORTS.encode(), *(os.fsencode(layer) for layer in layers)]), build)
    return path


def _stack(env: Path, layers: list[Path]) -> None:
    """Put the layers on the environment's path and arm ``cpu_host.runtime`` in its interpreters."""
    text = "".join(f"{layer}\n" for layer in layers) + "import cpu_host.runtime; cpu_host.runtime.arm()\n"
    (_site_packages(env) / "sm120_layers.pth").write_text(text, encoding="utf-8")


def _gpu_env() -> Path:
    """A real venv with SGLang as its authors want it installed; nothing is shared with the CPU environments."""
    requirements = REQUIREMENTS / "gpu.txt"

    def build(path: Path) -> None:
        _run("gpu: creating", [sys.executable, "-m", "venv", str(path)])
        _run("gpu: installing pip", _pip(path, "-r", str(REQUIREMENTS / "pip.txt")))
        _run("gpu: installing SGLang and CUDA packages", _pip(path, "-r", str(requirements)))
        _stack(path, [_cpu_host_layer()])

    return _once("gpu", [requirements.read_bytes()], build)


def _write_bytecode(env: Path) -> None:
    """Import what a server imports, once, with bytecode: later starts take a third of the time.

    It also shows here and not in some test that an environment is complete. ``-B`` in the environment of a
    continuous-integration machine would otherwise make every process compile everything again.
    """
    _run(f"{env.name}: first import", [str(_python(env)), "-W", "ignore", "-c", _SERVER_IMPORTS])


def _adopt_script(script: Path, env: Path) -> None:
    """Offer a layer's command: a program by a link, a Python script as a copy that starts this environment."""
    first, _, rest = script.read_bytes().partition(b"\n")
    target = env / "bin" / script.name
    if first.startswith(b"#!") and b"python" in first:
        target.write_bytes(b"#!" + os.fsencode(_python(env)) + b"\n" + rest)
        target.chmod(0o755)
    elif not target.exists():
        target.symlink_to(script)


# --- this package --------------------------------------------------------------------------------------------


def _install_package(env: Path, base: Path, *, editable: bool) -> None:
    """Install this repository's package, again whenever what was installed differs from the sources."""
    digest = _digest(_source_bytes(EDITABLE_PARTS if editable else PACKAGE_PARTS))
    stamp = env / ".package"
    if stamp.is_file() and stamp.read_text(encoding="ascii") == digest:
        return
    source = ["--editable", str(ROOT)] if editable else [str(_wheel(base, digest))]
    command = _pip(base, "--no-deps", "--no-index", "--no-build-isolation", *source, target=env)
    if not editable:
        # The version number does not change while the sources do. The first import of an environment is over by now,
        # so that nothing else would write this package's bytecode where Python is told not to.
        command += ["--force-reinstall", "--compile"]
    _run(f"{env.name}: installing sglang-sm120{' (editable)' if editable else ''}", command)
    stamp.write_text(digest, encoding="ascii")


def _wheel(base: Path, digest: str) -> Path:
    """Build the package's wheel from a copy of the sources, so that the repository stays clean."""

    def build(path: Path) -> None:
        source = path / "source"
        source.mkdir(parents=True)
        for part in filter(Path.exists, (ROOT / name for name in PACKAGE_PARTS)):
            if part.is_dir():
                shutil.copytree(part, source / part.name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            else:
                shutil.copy(part, source)
        pip = [str(_python(base)), "-m", "pip", "wheel", *PIP_QUIET, "--no-deps", "--no-index"]
        _run("building the wheel of sglang-sm120", [*pip, "--no-build-isolation", "-w", str(path), str(source)])
        shutil.rmtree(source)

    folder = _once("wheels/wheel", [digest.encode()], build)
    return next(folder.glob("*.whl"))


def _source_bytes(parts: Iterable[str]) -> Iterator[bytes]:
    for part in (ROOT / name for name in parts):
        files = sorted(part.rglob("*")) if part.is_dir() else [part]
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts:
                yield os.fsencode(file.relative_to(ROOT))
                yield file.read_bytes()


# --- small tools -----------------------------------------------------------------------------------------------


def _python(venv: Path) -> Path:
    return venv / "bin" / "python"


def _site_packages(venv: Path) -> Path:
    return venv / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def _pip(venv: Path, *arguments: str, target: Path | None = None) -> list[str]:
    """``pip install`` of the base venv; bytecode is left to the first import, most modules never see one."""
    where = ["--python", str(_python(target))] if target else []
    return [str(_python(venv)), "-m", "pip", *where, "install", *PIP_QUIET, "--no-compile", *arguments]


def _digest(parts: Iterable[bytes]) -> str:
    total = hashlib.sha256(sys.version.encode())
    for part in parts:
        total.update(len(part).to_bytes(8, "big"))
        total.update(part)
    return total.hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a folder of the cache, saying so if another process has it."""
    lock = cache_dir() / "locks" / path.name
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"another process is preparing {path.name}, waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _run(title: str, command: list[str]) -> None:
    """Run a command quietly, with a sign of life every ten seconds; its whole output is kept in a log file."""
    began = time.monotonic()
    log = cache_dir() / "logs" / f"{title.partition(':')[0]}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    _say(f"{title} ...")
    # The caller's Python settings must not leak into builds and installations.
    env = {k: v for k, v in os.environ.items() if k not in _PYTHON_SETTINGS}
    with log.open("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env)
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=10)
                    break
                _say(f"  {time.monotonic() - began:4.0f} s  {_last_line(log)}")
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if process.returncode:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-25:])
        raise EnvError(f"{title} failed (exit {process.returncode}):\n  {' '.join(command)}\n{tail}")
    _say(f"  done in {time.monotonic() - began:.1f} s")


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return lines[-1].strip()[:90] if lines else ""


def _say(text: str) -> None:
    print(f"[envs] {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Create and find the cached environments of this repository.")
    parser.add_argument("name", nargs="?", help="dev, gpu, or sglang-VERSION")
    parser.add_argument("--print", action="store_true", dest="bare", help="print nothing but the interpreter's path")
    parser.add_argument("--list", action="store_true", help="print every name and stop")
    options = parser.parse_args()
    if options.list or not options.name:
        print("\n".join(names()))
        return 0 if options.list else 2
    try:
        python = ensure(options.name)
    except EnvError as error:
        print(f"[envs] {error}", file=sys.stderr)
        return 1
    print(python if options.bare else f"{options.name} is ready: {python}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
