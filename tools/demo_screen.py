"""What the demo prints: numbered steps with their times, facts below them, checks that pass or fail."""

from __future__ import annotations

import os
import sys
import time

STEPS = 6


class Screen:
    """Writes to the terminal; colours only where somebody looks."""

    _step = 0

    def __init__(self, began: float) -> None:
        self.failures = 0
        self._began = began
        self._step_began = time.time()
        self._tty = sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def title(self, text: str) -> None:
        self._print(f"\n{self._paint('1', text)}\n{'─' * len(text)}")

    def step(self, name: str, text: str, number: int | None = None) -> None:
        self._step = number or self._step + 1
        self._step_began = time.time()
        self._print(f"\n{self._paint('1;36', f'[{self._step}/{STEPS}] {name}')}  {text}")

    def fact(self, name: str, text: str) -> None:
        self._print(f"      {name:<20} {text}")

    def check(self, passed: bool, name: str, text: str) -> None:
        self.failures += not passed
        mark = self._paint("32", "  ok  ") if passed else self._paint("1;31", " FAIL ")
        self._print(f"{mark}{name:<20} {text}")

    def waiting(self, text: str) -> None:
        """A sign of life: one changing line on a terminal, a new line elsewhere."""
        line = f"      {time.time() - self._step_began:5.0f} s  {text}"
        if self._tty:
            sys.stdout.write(f"\r\x1b[2K{line}")
            sys.stdout.flush()
        else:
            self._print(line)

    def done(self) -> None:
        if self._tty:
            sys.stdout.write("\r\x1b[2K")
        self._print(self._paint("2", f"      {time.time() - self._step_began:.1f} s"))

    def failed(self, text: str) -> None:
        self.failures += 1
        self._print(f"\n{self._paint('1;31', 'FAILED')}  {text}")

    def end(self) -> None:
        total = time.time() - self._began
        if self.failures:
            self._print(self._paint("1;31", f"\n{self.failures} check(s) failed after {total:.0f} s\n"))
        else:
            self._print(self._paint("1;32", f"\nEvery check passed, {total:.0f} s in all\n"))

    def _paint(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._tty else text

    def _print(self, text: str) -> None:
        print(text, flush=True)
