"""Compile the kernels for the CPU and run them in the emulated thread block."""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from problem import Problem, swizzle

ROOT = Path(__file__).resolve().parents[2]
EMULATION = ("machine.cc", "memory.cc", "instructions.cc", "mma_model.cc", "formats.cc")
LANGUAGE = ("-std=c++20", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-unknown-pragmas")
#: Compiled in a fraction of the time: for mutations, most of which need no sanitizer to be noticed.
PLAIN = (*LANGUAGE, "-O0")
SANITIZED = (*LANGUAGE, "-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
STANDARD_HEADERS = (
    "algorithm", "bit", "cmath", "cstddef", "cstdint", "cstdio", "cstdlib", "cstring", "deque", "functional", "limits",
    "memory", "numeric", "random", "string", "utility", "vector",
)  # fmt: skip
#: Exit status with which the emulation reports a broken rule.
EMULATION_REFUSED = 3


def compiler() -> str | None:
    """Return the C++ compiler to use, or None."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def _compiled(arguments: Sequence[str], sources: list[Path], root: Path, folder: Path) -> Path:
    """Compile one object file unless the folder holds it for exactly these sources and arguments."""
    digest = hashlib.sha256(" ".join(arguments).encode())
    for file in sources:
        digest.update(str(file.relative_to(root)).encode())
        digest.update(file.read_bytes())
    target = folder / f"{sources[0].stem}-{digest.hexdigest()[:24]}.o"
    if not target.exists():
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".o", delete=False) as scratch:
            pass
        command = [str(compiler()), *arguments, f"-I{root / 'csrc'}", "-c", str(sources[0]), "-o", scratch.name]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        os.replace(scratch.name, target)
    return target


def _standard_headers(flags: tuple[str, ...], folder: Path) -> Path:
    """A header with what the kernels and the emulation include of the standard library, compiled once for these flags.

    Reading it takes half the time of compiling a kernel. A compiler that cannot use what was compiled reads it anew.
    """
    text = "".join(f"#include <{name}>\n" for name in STANDARD_HEADERS)
    header = folder / f"standard-{hashlib.sha256(f'{compiler()} {flags} {text}'.encode()).hexdigest()[:24]}.h"
    if not header.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            draft = Path(scratch) / header.name
            draft.write_text(text)
            compiled = draft.with_suffix(".h.gch")
            command = [str(compiler()), *flags, "-x", "c++-header", str(draft), "-o", str(compiled)]
            subprocess.run(command, check=True)
            # The header last: where it is, the compiled one is too.
            os.replace(compiled, header.with_suffix(".h.gch"))
            os.replace(draft, header)
    return header


def build(main: str, folder: Path, root: Path = ROOT, flags: tuple[str, ...] = SANITIZED) -> Path:
    """Compile ``main`` with the kernels of ``root`` and link it with the emulation."""
    csrc = root / "csrc"
    # A mutation may leave a variable unused. And only what was not mutated has to include all that it uses.
    strict = (*flags, "-Werror") if root == ROOT else (*flags, "-include", str(_standard_headers(flags, folder)))
    emulation_headers = sorted((csrc / "emulation").glob("*.h"))
    headers = sorted(p for p in [*csrc.rglob("*"), *(root / main).parent.glob("*.h")] if p.suffix in {".h", ".cuh"})
    objects = [_compiled(strict, [csrc / "emulation" / name, *emulation_headers], root, folder) for name in EMULATION]
    objects.append(_compiled(strict, [root / main, *headers], root, folder))
    linked = hashlib.sha256("".join(o.name for o in objects).encode()).hexdigest()[:24]
    target = folder / f"{Path(main).stem}-{linked}"
    if not target.exists():
        scratch = folder / f"{target.name}.{os.getpid()}"
        subprocess.run([str(compiler()), *flags, *map(str, objects), "-o", str(scratch)], check=True)
        os.replace(scratch, target)
    return target


def _buffer(tensor: torch.Tensor | None) -> bytes:
    data = b"" if tensor is None else tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return struct.pack("<q", len(data)) + data


def run_gemm(
    binary: Path, problem: Problem, folder: Path, *, cluster: int = 1, stages: int = 2, seed: int = 0
) -> subprocess.CompletedProcess[str] | torch.Tensor:
    """Run the skinny kernel: the output, or the finished process if it did not end well."""
    tiles = next(t for t in (1, 2, 4, 8) if min(problem.shape[0], 64) <= 8 * t)
    return _run(binary, problem, folder, (cluster, stages, tiles, seed))


def run_tiled(
    binary: Path, problem: Problem, folder: Path, *, tile: int, seed: int = 0
) -> subprocess.CompletedProcess[str] | torch.Tensor:
    """Run the tiled kernel with 128- or 64-wide tiles: the output, or the finished process if it did not end well."""
    return _run(binary, problem, folder, (tile, int(problem.shape[2] // 2 % 16 == 0), 0, seed))


def run_quantizing(
    binary: Path, problem: Problem, x: torch.Tensor, encode_scale: float, folder: Path, *, cluster: int, seed: int = 0
) -> subprocess.CompletedProcess[str] | torch.Tensor:
    """Run the skinny kernel on 16-bit activations ``x``, rows of which may be apart; the problem's own do not count."""
    m, k = x.shape
    numbers = x.as_strided(((m - 1) * x.stride(0) + k,), (1,))
    own = (cluster, 1 if m <= 8 else 2, int(x.dtype == torch.float16), seed)
    return _run(binary, problem, folder, own, (2 * x.stride(0), numbers, torch.tensor(encode_scale)))


def _run(
    binary: Path,
    problem: Problem,
    folder: Path,
    own: tuple[int, int, int, int],
    activations: tuple[int, torch.Tensor, torch.Tensor] | None = None,
) -> subprocess.CompletedProcess[str] | torch.Tensor:
    """Activations are their stride in bytes and both their buffers. Outputs start poisoned with NaN."""
    m, n, k = problem.shape
    poison = torch.full((m, n), float("nan"), dtype=problem.out_type)
    stride, values, scales = activations or (k // 2, problem.x_packed(), swizzle(problem.x_scales))
    numbers = (
        m, n, k, stride, problem.weight_stride, n, int(problem.alpha.numel() > 1),
        int(problem.out_type == torch.float16), *own,
    )  # fmt: skip
    tensors = (
        values, scales, problem.w_packed(), swizzle(problem.w_scales), problem.alpha.float(), problem.bias, poison,
    )  # fmt: skip
    source, sink = folder / "problem.bin", folder / "out.bin"
    source.write_bytes(struct.pack("<12q", *numbers) + b"".join(_buffer(t) for t in tensors))
    sink.unlink(missing_ok=True)
    environment = {**os.environ, "ASAN_OPTIONS": "detect_stack_use_after_return=0:detect_leaks=0"}
    done = subprocess.run([str(binary), str(source), str(sink)], capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        return done
    return torch.frombuffer(bytearray(sink.read_bytes()), dtype=problem.out_type).view(m, n)
