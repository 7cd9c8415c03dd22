"""What the boot file costs at the start of a Python interpreter.

    python benchmarks/startup.py [ROUNDS]

Starts ``python -c pass`` in two environments that differ only in the package: one is empty, one has the wheel. A
third series has the wheel under SGLANG_SM120_DISABLE=1. The series alternate in each round, so that a busy machine
slows all of them, and the cost is the median of the differences within a round. The last line is what the
interpreter itself measures for the two modules (``-X importtime``), which leaves out reading the ``.pth`` file.
On a machine with other work, believe the processor time.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


def make_env(path: Path, *packages: Path) -> str:
    """Create an environment and return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True)
    python = str(path / "bin" / "python")
    # As most environments have a .pth file of some package, reading one at all is not our cost.
    next(path.glob("lib/python3*/site-packages")).joinpath("another.pth").write_text("# nothing\n", encoding="utf-8")
    if packages:
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, *map(str, packages)], check=True)
    return python


def copy_source(path: Path) -> Path:
    """Copy the sources, so that building them leaves nothing in the repository."""

    def left_out(folder: str, names: list[str]) -> set[str]:
        # At the top only: sglang_sm120/build is a room of the package.
        built = {"build", "dist"} if Path(folder) == ROOT else set()
        return {name for name in names if name in built or name.startswith(".") or name.endswith(".egg-info")}

    shutil.copytree(ROOT, path, ignore=left_out)
    return path


class Start(NamedTuple):
    """Seconds that one interpreter took: on the clock, and of processor time."""

    wall: float
    cpu: float

    def minus(self, other: Start) -> Start:
        return Start(self.wall - other.wall, self.cpu - other.cpu)


def start(python: str, environ: dict[str, str]) -> Start:
    """Run an interpreter that does nothing."""
    began = time.perf_counter()
    process = os.posix_spawn(python, [python, "-c", "pass"], environ)
    _, status, usage = os.wait4(process, 0)
    wall = time.perf_counter() - began
    if status != 0:
        raise RuntimeError(f"{python} -c pass ended with status {status}")
    return Start(wall, usage.ru_utime + usage.ru_stime)


def import_time(python: str, environ: dict[str, str]) -> float:
    """Seconds that the package's modules take, as the interpreter counts them."""
    told = subprocess.run(
        [python, "-X", "importtime", "-c", "pass"], capture_output=True, text=True, check=True, env=environ
    ).stderr
    return sum(int(micros) for micros in re.findall(r"import time: +(\d+) \|.*\| +sglang_sm120", told)) / 1e6


def middle(seconds: Sequence[float]) -> str:
    """The median and the middle half, in milliseconds."""
    low, median, high = (1000 * quantile for quantile in statistics.quantiles(seconds, n=4))
    return f"{median:7.3f} ({low:7.3f} to {high:7.3f})"


def report(name: str, starts: Sequence[Start]) -> None:
    """Print one line of the table."""
    print(f"{name:<36} {middle([s.wall for s in starts])}   {middle([s.cpu for s in starts])}")


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 400
    # Without PYTHON*: a switch of the caller, such as not writing bytecode, would be measured too.
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SGLANG_"))}
    disabled = environ | {"SGLANG_SM120_DISABLE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        empty = make_env(Path(folder, "empty"))
        armed = make_env(Path(folder, "armed"), copy_source(Path(folder, "source")))
        for python in (empty, armed):  # the first start writes bytecode
            start(python, environ)
        series = [(start(empty, environ), start(armed, environ), start(armed, disabled)) for _ in range(rounds)]
        imports = [import_time(armed, environ) for _ in range(rounds // 4)]
    print(f"Python {sys.version.split()[0]}, {rounds} rounds, milliseconds: median (middle half)")
    print(f"{'':<36} {'on the clock':<28}   processor time")
    report("start without the package", [without for without, _, _ in series])
    report("start with the package", [with_ for _, with_, _ in series])
    report("cost of the package", [with_.minus(without) for without, with_, _ in series])
    report("cost under SGLANG_SM120_DISABLE=1", [off.minus(without) for without, _, off in series])
    print(f"{'its two modules, by -X importtime':<36} {middle(imports)}")


if __name__ == "__main__":
    main()
