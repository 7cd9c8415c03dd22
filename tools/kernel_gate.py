"""What can be proven about the SM12x kernels without an SM12x card: compile, disassemble, check, print a table.

    python tools/kernel_gate.py [--json FILE]

Compiles every CUDA source for sm_120f and sm_121a and reads the SASS of each entry point:

  * in a GEMM the block-scaled FP4 instruction (OMMA.SF) is there and no decoded multiply (HMMA) is; the fast quantizer
    has the conversion to e2m1;
  * no spills, no local memory, shared memory and registers within the limits of the card;
  * griddepcontrol.wait (ACQBULK) is on every path: no branch jumps over it and nothing exits in front of it;
  * in front of it nothing touches memory but cp.async (LDGSTS), which only the weight stream issues;
  * griddepcontrol.launch_dependents (PREEXIT) is there.

It also compiles for plain sm_120, which cannot hold the instruction, and expects a readable refusal. Exit status 1 if
anything fails. Needs nvcc >= 12.9 and nvdisasm, from PATH or from the PyPI wheels.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("csrc/gemm_skinny/launch.cu", "csrc/quantize/launch.cu")
TARGETS = ("120f", "121a")
FLAGS = ("-std=c++20", "-O3", "--expt-relaxed-constexpr", f"-I{ROOT / 'csrc'}")
#: SM12x: shared memory a CTA may have, what an SM has for all, what each resident CTA reserves, registers, threads.
MAX_SHARED, SM_SHARED, CTA_RESERVED, SM_REGISTERS, SM_THREADS = 101376, 102400, 1024, 65536, 1536
THREADS, UNIT_BYTES, STAGES, WARPS = 256, 2304, 2, 8
#: The quantizer: threads of a CTA, bytes of the block that a thread loads per row.
QUANTIZE_THREADS, BLOCK_BYTES = 128, 32
#: Instructions that read or write memory other than through cp.async or shared memory.
MEMORY = re.compile(r"^(@!?U?P\d+\s+)?(LDG|STG|LD|ST|LDL|STL|ATOM|ATOMG|RED|REDG|UBLKCP|UTMA\w*|STAS|CCTL)(\.|\s|$)")
#: Input type, rule and rows per thread in the mangled name of a quantizer entry.
QUANTIZER = re.compile(r"quantize_kernelI.*InputTypeE(\d).*RuleE(\d)ELi(\d)E")
REFUSAL = "Plain sm_120/sm_121 has no FP4 tensor instruction"


@dataclass
class Entry:
    """Facts of one kernel entry point in one binary."""

    target: str
    name: str
    token_tiles: int
    registers: int
    shared: int
    omma: int
    hmma: int
    resident: int
    in_flight: int
    failures: list[str]


def tool(name: str) -> str:
    """Return the path of a CUDA tool.

    Raises:
        SystemExit: it is neither on PATH nor in the nvidia-cuda-* wheels.
    """
    found = shutil.which(name)
    if found is None:
        wheels = [Path(p) / "nvidia" for p in sys.path if p]
        found = next((str(c) for w in wheels for c in w.glob(f"*/bin/{name}")), None)
    if found is None:
        raise SystemExit(f"{name} not found: put it on PATH or install the wheel nvidia-cuda-{name} (13.x)")
    return found


def compile_cubin(source: str, target: str, folder: Path) -> tuple[Path, str]:
    """Compile one source for one target; returns the binary and the assembler's report."""
    out = folder / f"{Path(source).parent.name}_{target}.cubin"
    command = [
        tool("nvcc"), *FLAGS, "-cubin", f"-gencode=arch=compute_{target},code=sm_{target}", "-Xptxas=-v",
        "-o", str(out), str(ROOT / source),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{source} does not compile for sm_{target}:\n{done.stderr}")
    return out, done.stderr


def plain_target_is_refused() -> bool:
    """Whether a build for plain sm_120 ends with our message."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            tool("nvcc"), *FLAGS, "-cubin", "-arch=sm_120", "-o", f"{folder}/x.cubin", str(ROOT / SOURCES[0]),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode != 0 and REFUSAL in done.stderr


def resources(report: str) -> dict[str, dict[str, int]]:
    """Registers, stack and spills per entry from the assembler's report."""
    facts: dict[str, dict[str, int]] = {}
    current = ""
    for line in report.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            current = match[1]
        if match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            facts.setdefault(current, {})["stack"] = sum(int(g) for g in match.groups())
        if match := re.search(r"Used (\d+) registers", line):
            facts.setdefault(current, {})["registers"] = int(match[1])
    return facts


def listing(cubin: Path) -> dict[str, list[tuple[str, str]]]:
    """Per entry: (kind, text) with kind ``label`` or ``op``, in program order."""
    text = subprocess.run([tool("nvdisasm"), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    entries: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for line in text.splitlines():
        stripped = line.strip()
        if match := re.match(r"\.text\.(\w+):", stripped):
            current = entries.setdefault(match[1], [])
        elif match := re.match(r"(\.L_\w+):", stripped):
            current.append(("label", match[1]))
        elif match := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            current.append(("op", match[1]))
    return entries


def opcode(text: str) -> str:
    """The mnemonic, without a guard."""
    return re.sub(r"^@!?U?P\w+\s+", "", text).split()[0]


def dependency_failures(code: list[tuple[str, str]]) -> list[str]:
    """Check the order of memory accesses, exits and branches around the dependency wait."""
    waits = [i for i, (kind, text) in enumerate(code) if kind == "op" and opcode(text).startswith("ACQBULK")]
    if len(waits) != 1:
        return [f"{len(waits)} dependency waits instead of one"]
    wait = waits[0]
    labels = {text: i for i, (kind, text) in enumerate(code) if kind == "label"}
    failures = []
    if code[wait][1].startswith("@"):
        failures.append("the dependency wait is conditional")
    for i, (kind, text) in enumerate(code[:wait]):
        if kind != "op":
            continue
        if MEMORY.match(text):
            failures.append(f"memory access before the dependency wait: {text}")
        if opcode(text) == "EXIT":
            failures.append("exit before the dependency wait")
        for target in re.findall(r"`\((\.L_\w+)\)", text):
            if labels.get(target, len(code)) > wait and opcode(text).startswith(("BRA", "BRX", "JMP")):
                failures.append(f"a branch at {i} jumps over the dependency wait")
    if not any(kind == "op" and opcode(text).startswith("PREEXIT") for kind, text in code):
        failures.append("dependents are never launched")
    return failures


def inspect(target: str, name: str, code: list[tuple[str, str]], facts: dict[str, int]) -> Entry:
    """Collect and check the facts of one entry."""
    match = re.search(r"gemm_kernelILi(\d+)ELi(\d+)E", name)
    quantizer = QUANTIZER.search(name)
    token_tiles = int(match[1]) if match else 0
    is_gemm = match is not None
    shared = WARPS * STAGES * UNIT_BYTES + 32 * 8 * token_tiles * 4 + 8 if is_gemm else 0
    registers = facts.get("registers", 0)
    threads = QUANTIZE_THREADS if quantizer else THREADS
    per_cta = -(-registers // 8) * 8 * threads
    resident = min(SM_SHARED // (shared + CTA_RESERVED), SM_REGISTERS // per_cta, SM_THREADS // threads)
    in_flight = threads * int(quantizer[3]) * BLOCK_BYTES if quantizer else WARPS * STAGES * UNIT_BYTES
    ops = [opcode(text) for kind, text in code if kind == "op"]
    entry = Entry(
        target, name, token_tiles, registers, shared, sum(o.startswith("OMMA.SF") for o in ops),
        sum(o.startswith("HMMA") for o in ops), resident, resident * in_flight, [],
    )  # fmt: skip
    if entry.omma != 4 * token_tiles:
        entry.failures.append(f"{entry.omma} OMMA.SF instead of {4 * token_tiles}: 2 row tiles x 2 steps x token tiles")
    if entry.hmma:
        entry.failures.append(f"{entry.hmma} HMMA")
    if facts.get("stack", 1):
        entry.failures.append("stack or spills")
    if any(o.startswith(("LDL", "STL")) for o in ops):
        entry.failures.append("local memory")
    if shared > MAX_SHARED:
        entry.failures.append("too much shared memory")
    if resident < (2 if token_tiles <= 2 else 1):
        entry.failures.append(f"only {resident} CTA on an SM")
    if quantizer and quantizer[2] == "1" and not any(".E2M1." in o for o in ops):
        entry.failures.append("no e2m1 conversion")
    entry.failures += dependency_failures(code)
    return entry


def kernel_name(symbol: str) -> str:
    """The kernel's own name out of a mangled symbol."""
    if match := QUANTIZER.search(symbol):
        return f"quantize {('bf16', 'fp16')[int(match[1])]} {('exact', 'fast')[int(match[2])]}, {match[3]} rows"
    match = re.search(r"gemm_kernel", symbol)
    return match[0] if match else symbol


def cp_async_users() -> list[str]:
    """Kernel files, other than the weight stream, that issue cp.async copies."""
    files = (ROOT / "csrc").rglob("*.cu*")
    return [
        f.name for f in files
        if f.name not in {"weights.cuh", "cp_async.cuh"} and "cp_async_16(" in f.read_text()
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the facts here")
    args = parser.parse_args()
    entries = []
    with tempfile.TemporaryDirectory() as folder:
        for target in TARGETS:
            for source in SOURCES:
                cubin, report = compile_cubin(source, target, Path(folder))
                facts = resources(report)
                entries += [inspect(target, n, c, facts.get(n, {})) for n, c in sorted(listing(cubin).items())]
    print(f"target  {'kernel':<27} token tiles  regs  shared B  OMMA.SF  HMMA  CTAs/SM  KB in flight/SM  verdict")
    for e in sorted(entries, key=lambda e: (e.target, e.token_tiles)):
        verdict = "; ".join(e.failures) or "ok"
        print(
            f"{e.target:<7} {kernel_name(e.name):<27} {e.token_tiles or '-':>11} {e.registers:>5} {e.shared:>9} "
            f"{e.omma:>8} {e.hmma:>5} "
            f"{e.resident:>8} {e.in_flight / 1024:>16.1f}  {verdict}"
        )
    refused = plain_target_is_refused()
    others = cp_async_users()
    print(f"limits: shared <= {MAX_SHARED} B a CTA, {SM_SHARED} B an SM; no spills, no local memory, no HMMA")
    print(f"plain sm_120 is refused with a message: {'yes' if refused else 'NO'}")
    print(f"cp.async outside the weight stream: {', '.join(others) or 'none'}")
    if args.json:
        args.json.write_text(json.dumps([asdict(e) for e in entries], indent=1))
    return 0 if entries and refused and not others and not any(e.failures for e in entries) else 1


if __name__ == "__main__":
    sys.exit(main())
