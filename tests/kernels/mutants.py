"""Mutations of the kernels: a text change to one file of csrc, applied to a copy, compiled and run.

A mutation must compile, and one of the problems of its list must then give a wrong number or be refused: by the
emulation, or by the address and undefined-behaviour sanitizers.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import emulated
import pytest
import torch
from problem import Problem

#: The file, a text that occurs in it exactly once, and its replacement.
Mutation = tuple[str, str, str]
#: A problem, and a function that solves it with this program in this folder, as ``emulated.run_gemm`` does.
Case = tuple[Problem, Callable[[Path, Problem, Path], object]]


def case(solve: Callable[..., object], problem: Problem, **options: int) -> Case:
    """One problem with the options of its run."""
    return problem, partial(solve, **options)


def solves(cases: Iterable[Case], binary: Path, folder: Path) -> bool:
    """Return whether every problem comes out right."""
    for problem, solve in cases:
        out = solve(binary, problem, folder)
        if not isinstance(out, torch.Tensor):
            return False
        if not ((out.double() - problem.expected()).abs() <= problem.tolerance()).all():
            return False
    return True


def mutated(main: str, mutation: Mutation, scratch: Path) -> Path:
    """Copy csrc and the program ``main`` to ``scratch`` with one text replaced; return the root of the copy."""
    file, old, new = mutation
    shutil.copytree(emulated.ROOT / "csrc", scratch / "csrc")
    (scratch / main).parent.mkdir(parents=True)
    for source in (emulated.ROOT / main, *(emulated.ROOT / main).parent.glob("*.h")):
        shutil.copy(source, (scratch / main).parent)
    text = (scratch / file).read_text()
    assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {file}"
    (scratch / file).write_text(text.replace(old, new))
    return scratch


def is_noticed(
    main: str, mutation: Mutation, scratch: Path, folder: Path, survives: Callable[[Path, Path], bool]
) -> bool:
    """Return whether ``survives(binary, folder)`` fails for a mutation of ``main``.

    The plain program is asked first and the sanitized one only if that survives: most mutations give wrong numbers.
    """
    if emulated.compiler() is None:
        pytest.skip("no C++ compiler")
    root = mutated(main, mutation, scratch)
    builds = (emulated.build(main, folder, root, flags) for flags in (emulated.PLAIN, emulated.SANITIZED))
    return any(not survives(binary, scratch) for binary in builds)
