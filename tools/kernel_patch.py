#!/usr/bin/env python3
"""Write the patch that brings our GEMM for few tokens and our quantizer into SGLang's JIT framework.

    python tools/kernel_patch.py [--check]

The kernels come from ``csrc/``: every header that they reach, without the branches for the CPU emulation
and for other cards. What only SGLang needs (launcher, Python wrapper, test, benchmark, message) lies in
``tools/upstream_kernel``. ``--check`` changes nothing and returns 1 if the patch is not what would be written.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
PARTS = ROOT / "tools" / "upstream_kernel"
PATCH = ROOT / "patches" / "sglang" / "0.5.23" / "0007-add-nvfp4-kernels-for-few-tokens.patch"
SUBJECT = "Add NVFP4 kernels for few tokens on SM12x to the JIT kernels"

JIT = "python/sglang/kernels/jit/csrc/gemm"
#: Where each hand-written part goes.
PLACES = {
    "sm120_nvfp4_skinny.cuh.in": f"{JIT}/sm120_nvfp4_skinny.cuh",
    "sm120_nvfp4_skinny.py.in": "python/sglang/kernels/ops/gemm/sm120_nvfp4_skinny.py",
    "test_sm120_nvfp4_skinny.py.in": "test/registered/unit/kernels/test_sm120_nvfp4_skinny.py",
    "bench_sm120_nvfp4_skinny.py.in": "test/registered/kernels/benchmark/gemm/bench_sm120_nvfp4_skinny.py",
}
#: What SGLang's launcher includes; it brings everything else with it.
ROOTS = ("gemm_skinny/kernel.cuh", "quantize/select.cuh")
#: Conditions whose value is known there: nvcc compiles it, for SM12x, for no measurement.
KNOWN = {
    "defined(__CUDACC__)": True,
    "defined(SM120_EMULATED)": False,
    "defined(SM120_DECODED)": False,
    "defined(SM120_LOAD_PATH_ONLY)": False,
}
#: What only other cards include.
LEFT_OUT = re.compile(r"_decoded\.cuh$")

_INCLUDE = re.compile(r'^#include "(?P<path>[^"]+)"$')
_DIRECTIVE = re.compile(r"^#\s*(?P<word>if|elif|else|endif)\b\s*(?P<condition>[^/]*)")


def kernel_files() -> dict[str, str]:
    """Path below ``csrc`` to the text that SGLang gets."""
    texts: dict[str, str] = {}
    waiting = [CSRC / root for root in ROOTS]
    while waiting:
        path = waiting.pop()
        name = path.relative_to(CSRC).as_posix()
        if name in texts:
            continue
        lines = list(_resolved(path.read_text(encoding="utf-8").splitlines()))
        for position, line in enumerate(lines):
            include = _INCLUDE.match(line)
            if include is None:
                continue
            if LEFT_OUT.search(include["path"]):
                lines[position] = ""
                continue
            waiting.append((path.parent / include["path"]).resolve())
        text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n") + "\n"
        texts[name] = re.sub(r"\bnamespace sm120\b", "namespace sglang::sm120", text)
    return dict(sorted(texts.items()))


def patch_text() -> str:
    """The whole patch, as git writes one that only creates files."""
    files = {f"{JIT}/sm120_nvfp4/{name}": text for name, text in kernel_files().items()}
    files |= {place: (PARTS / part).read_text(encoding="utf-8") for part, place in PLACES.items()}
    head = (
        f"From {'0' * 40} Mon Sep 17 00:00:00 2001\nFrom: sglang-sm120 <noreply@sglang-sm120.invalid>\n"
        f"Date: Mon, 30 Nov 2026 12:00:00 +0000\nSubject: [PATCH] {SUBJECT}\n\n"
    )
    message = (PARTS / "message.txt").read_text(encoding="utf-8")
    return f"{head}{message}---\n{''.join(_created(p, t) for p, t in sorted(files.items()))}-- \nsglang-sm120\n"


def _created(path: str, text: str) -> str:
    lines = text.splitlines()
    body = "".join(f"+{line}\n" for line in lines)
    return (
        f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
        f"@@ -0,0 +1,{len(lines)} @@\n{body}"
    )


def _resolved(lines: list[str]) -> Iterator[str]:
    """Leave out the branches whose condition is known to be false, and the directives around those that stay."""
    # Per nesting level: whether lines count, whether a branch that is known to count has been found, and whether a
    # directive was written that needs its #endif.
    levels: list[dict[str, bool]] = []
    for line in lines:
        directive = _DIRECTIVE.match(line)
        outer = all(level["counts"] for level in (levels if directive is None else levels[:-1]))
        if directive is None:
            if outer:
                yield line
            continue
        word = directive["word"]
        if word == "if":
            outer = all(level["counts"] for level in levels)
            levels.append({"counts": False, "found": not outer, "written": False})
        level = levels[-1]
        if word == "endif":
            levels.pop()
            if level["written"]:
                yield line
            continue
        value = True if word == "else" else KNOWN.get(directive["condition"].strip())
        level["counts"] = not level["found"] and value is not False
        if not level["counts"]:
            continue
        if value is True:
            level["found"] = True
            if level["written"]:
                yield "#else"
        else:
            yield line if level["written"] or word == "if" else line.replace("#elif", "#if", 1)
            level["written"] = True


def main(arguments: list[str] | None = None) -> int:
    """Write the patch, or with ``--check`` return 1 if it is stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the patch is stale")
    check = parser.parse_args(arguments).check
    text = patch_text()
    if PATCH.is_file() and PATCH.read_text(encoding="utf-8") == text:
        return 0
    if check:
        print(f"{PATCH.relative_to(ROOT)} is stale: run python tools/kernel_patch.py")
        return 1
    PATCH.write_text(text, encoding="utf-8")
    print(f"{PATCH.relative_to(ROOT)} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
