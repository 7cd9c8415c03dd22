"""Fresh virtual environments for the packaging tests."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: What could reach into the interpreters under test from the one that runs the tests.
_FOREIGN = ("PYTHON", "SGLANG_", "VIRTUAL_ENV", "COV_CORE")


def clean_environ(**extra: str) -> dict[str, str]:
    """The environment of this process without anything that changes how Python or the package starts."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)} | extra


@dataclass(frozen=True)
class Env:
    """A virtual environment without pip; pip runs from outside, so nothing but the package lies in it."""

    path: Path

    @classmethod
    def create(cls, path: Path, interpreter: str = sys.executable) -> Env:
        """Make the environment with this interpreter, or with the one that runs the tests."""
        command = [interpreter, "-m", "venv", "--without-pip", str(path)]
        subprocess.run(command, check=True, env=clean_environ())
        return cls(path)

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        return next(self.path.glob("lib/python3.*/site-packages"))

    def pip(self, *arguments: str | Path) -> None:
        """Run pip for this environment; its output appears only if it fails."""
        command = [sys.executable, "-m", "pip", "--python", self.python, "--quiet", *arguments]
        result = subprocess.run(command, capture_output=True, text=True, env=clean_environ(), check=False)
        assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"

    def run(self, *arguments: str | Path, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run the interpreter, outside the repository so that it cannot import from there by accident."""
        command = [str(self.python), *map(str, arguments)]
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=cwd or self.path,
            env=clean_environ(**environ),
            check=False,
            timeout=120,
        )

    def output(self, code: str, *options: str, **environ: str) -> str:
        """Run code that must succeed without a word on stderr, and return what it printed."""
        result = self.run(*options, "-c", code, **environ)
        assert (result.returncode, result.stderr) == (0, ""), result
        return result.stdout

    def files(self) -> set[str]:
        """Every file below the environment, caches of the interpreter included."""
        return {str(file.relative_to(self.path)) for file in self.path.rglob("*") if not file.is_dir()}
