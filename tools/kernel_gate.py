"""What can be proven about the SM12x kernels without an SM12x card: compile, disassemble, check, print a table.

    python tools/kernel_gate.py [--json FILE]

Compiles every CUDA source for sm_120f and sm_121a and reads the SASS of each entry point:

  * in a GEMM the block-scaled FP4 instruction (OMMA.SF) is there and no decoded multiply (HMMA) is; what quantizes
    by the fast rule has the conversion to e2m1;
  * no spills, no local memory, shared memory and registers within the limits of the card;
  * griddepcontrol.wait (ACQBULK) is on every path: no branch jumps over it and nothing exits in front of it;
  * in front of it nothing touches memory but cp.async (LDGSTS), as often as the first weights need it, and in one
    kernel two loads past L1 (csrc/moe/down.cuh says why they may);
  * griddepcontrol.launch_dependents (PREEXIT) is there, in the kernel in front of that one behind the wait.

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

from sglang_sm120.build import spec

ROOT = Path(__file__).resolve().parents[1]
#: Every CUDA file of the library: an entry point in one that this gate does not know is an error.
SOURCES = tuple(str(p.relative_to(ROOT)) for p in spec.units(ROOT / "csrc") if p.suffix == ".cu")
TARGETS = ("120f", "121a")
FLAGS = ("-std=c++20", "-O3", "--expt-relaxed-constexpr", f"-I{ROOT / 'csrc'}")
#: SM12x: shared memory a CTA may have, what an SM has for all, what each resident CTA reserves, registers, threads.
MAX_SHARED, SM_SHARED, CTA_RESERVED, SM_REGISTERS, SM_THREADS = 101376, 102400, 1024, 65536, 1536
#: Instructions that read or write memory other than through cp.async or shared memory.
MEMORY = re.compile(r"^(@!?U?P\d+\s+)?(LDG|STG|LD|ST|LDL|STL|ATOM|ATOMG|RED|REDG|UBLKCP|UTMA\w*|STAS|CCTL)(\.|\s|$)")
#: Files that may issue cp.async: the wrapper and the operand streams.
CP_ASYNC_FILES = {"cp_async.cuh", "weights.cuh", "operand.cuh"}
#: Clocks that one OMMA occupies its quarter of an SM, from the data sheet's rate. More instructions than that for each
#: would bound the tiled kernel by issue slots.
OMMA_CLOCKS = 16
#: quantize::InputType.
INPUT_TYPES = ("bf16", "fp16")
#: Multiples that rows of codes start at, unaligned and aligned.
ROW_STARTS = ("8-byte rows", "16-byte rows")
REFUSAL = "Plain sm_120/sm_121 has no FP4 tensor instruction"


@dataclass(frozen=True)
class Kernel:
    """What an entry point is and what it has to be like; csrc/*/config.h says the same."""

    label: str
    threads: int
    shared: int
    in_flight: int  # bytes a CTA fetches ahead
    omma: int = 0
    resident: int = 1  # CTAs that must fit on an SM
    early_copies: int = 0  # cp.async of the first weights
    converts: bool = False  # to e2m1
    early_loads: int = 0  # of what a kernel before the one in front wrote
    late_launch: bool = False  # of the dependents: only behind the wait


@dataclass
class Entry:
    """Facts of one kernel entry point in one binary."""

    target: str
    kernel: str
    registers: int
    shared: int
    omma: int
    per_omma: float  # instructions for each OMMA, from the first to the last
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
    out = folder / f"{Path(source).parent.name}_{Path(source).stem}_{target}.cubin"
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


def dependency_failures(code: list[tuple[str, str]], early_loads: int = 0, late_launch: bool = False) -> list[str]:
    """Check the order of memory accesses, exits and branches around the dependency wait.

    Args:
        code: as :func:`listing` gives it.
        early_loads: how many loads past L1 must stand in front of the wait.
        late_launch: whether the dependents may be launched only behind it.
    """
    waits = [i for i, (kind, text) in enumerate(code) if kind == "op" and opcode(text).startswith("ACQBULK")]
    if len(waits) != 1:
        return [f"{len(waits)} dependency waits instead of one"]
    wait = waits[0]
    labels = {text: i for i, (kind, text) in enumerate(code) if kind == "label"}
    failures = []
    past_l1 = sum(kind == "op" and opcode(text) == "LDG.E.STRONG.GPU" for kind, text in code[:wait])
    if past_l1 != early_loads:
        failures.append(f"{past_l1} loads past L1 before the dependency wait, not {early_loads}")
    if code[wait][1].startswith("@"):
        failures.append("the dependency wait is conditional")
    for i, (kind, text) in enumerate(code[:wait]):
        if kind != "op":
            continue
        if MEMORY.match(text) and not (early_loads and opcode(text) == "LDG.E.STRONG.GPU"):
            failures.append(f"memory access before the dependency wait: {text}")
        if opcode(text) == "EXIT":
            failures.append("exit before the dependency wait")
        for target in re.findall(r"`\((\.L_\w+)\)", text):
            if labels.get(target, len(code)) > wait and opcode(text).startswith(("BRA", "BRX", "JMP")):
                failures.append(f"a branch at {i} jumps over the dependency wait")
    if not any(kind == "op" and opcode(text).startswith("PREEXIT") for kind, text in code):
        failures.append("dependents are never launched")
    if late_launch and any(kind == "op" and opcode(text).startswith("PREEXIT") for kind, text in code[:wait]):
        failures.append("dependents are launched before the dependency wait")
    return failures


def identify(symbol: str) -> Kernel:
    """Tell from a mangled name which kernel it is.

    Raises:
        SystemExit: an entry point this gate knows nothing about.
    """
    if match := re.search(r"tiled_gemm_kernelI.*ShapeE(64|128)ELb([01])E", symbol):
        tile, rows = int(match[1]), ROW_STARTS[int(match[2])]
        strips, slices = tile // 64, 4 // (tile // 64) ** 2
        ring = 2 * 2 * strips * 4608 * slices  # stages, operands, bytes of a strip
        return Kernel(
            f"tiled {tile}, {rows}", 128, ring, ring // 2, 64, 2 if tile == 128 else 1, 5 if tile == 128 else 9
        )
    if match := re.search(r"gemm_kernelI(?:LN.*InputTypeE(\d)E)?Li(\d)ELi2E", symbol):
        tiles, ring = int(match[2]), 8 * 2 * 2304  # warps, stages, bytes of a unit
        shared = ring + 32 * 8 * tiles * 4 + 8
        label = f"skinny, token tiles {tiles}"
        if match[1] is not None:
            label = f"skinny from {INPUT_TYPES[int(match[1])]}, tiles {tiles}"
        # 2 row tiles x 2 k64 steps x token tiles; 4 copies of codes and 1 of scales for each stage
        resident = 2 if tiles <= 2 else 1
        return Kernel(label, 256, shared, ring, 4 * tiles, resident, 10, converts=match[1] is not None)
    if match := re.search(r"3moe14gate_up_kernelI.*InputTypeE(\d)ELb([01])E", symbol):
        at_once = 5  # rows, as many as csrc/moe/config.h takes of 8 tokens for the figures below
        # rings and inbox; top-8 of 256 experts, 8 tokens; partial sums and quantized rows for hidden size 2048
        shared = 8 * 2 * 2304 + 1040 + (8 * 8 * 4 + 256 // 8 + 32 + 8 * 4) + at_once * (8 * 144 + 16 * 72 + 16)
        label = f"moe gate/up, {INPUT_TYPES[int(match[1])]}, {ROW_STARTS[int(match[2])]}"
        return Kernel(label, 256, shared, 8 * 2 * 2304, 4, 2, converts=True, late_launch=True)
    if match := re.search(r"3moe11down_kernelILb([01])E", symbol):
        # rings and inbox; experts and weights of pairs, list of experts, pairs by expert and column
        shared = 8 * 2 * 2304 + 1040 + 3 * 1024 + 8 * 1024
        copies = 2 * (4 * (2 - int(match[1])) + 1)  # stages; codes 8 or 16 bytes at a time, scales
        label = f"moe down, {ROW_STARTS[int(match[1])]}"
        return Kernel(label, 256, shared, 8 * 2 * 2304, 4, 2, copies, early_loads=2)
    if match := re.search(r"quantize_kernelI.*InputTypeE(\d).*RuleE(\d)ELi(\d)E", symbol):
        kind, rule, block_rows = INPUT_TYPES[int(match[1])], ("exact", "fast")[int(match[2])], int(match[3])
        in_flight = 128 * block_rows * 32  # threads, rows and bytes of a block
        return Kernel(f"quantize {kind} {rule}, {block_rows} rows", 128, 0, in_flight, converts=rule == "fast")
    raise SystemExit(f"unknown kernel {symbol}: tools/kernel_gate.py must learn what to expect of it")


def early_copies(ops: list[str]) -> int:
    """How many cp.async stand in front of the dependency wait."""
    wait = next((i for i, o in enumerate(ops) if o.startswith("ACQBULK")), len(ops))
    return sum(o.startswith("LDGSTS") for o in ops[:wait])


def inspect(target: str, symbol: str, code: list[tuple[str, str]], facts: dict[str, int]) -> Entry:
    """Collect and check the facts of one entry."""
    kernel = identify(symbol)
    registers = facts.get("registers", 0)
    per_cta = -(-registers // 8) * 8 * kernel.threads
    resident = min(SM_SHARED // (kernel.shared + CTA_RESERVED), SM_REGISTERS // per_cta, SM_THREADS // kernel.threads)
    ops = [opcode(text) for kind, text in code if kind == "op"]
    multiplies = [i for i, o in enumerate(ops) if o.startswith("OMMA.SF")]
    span = multiplies[-1] - multiplies[0] + 1 if multiplies else 0
    entry = Entry(
        target, kernel.label, registers, kernel.shared, len(multiplies), span / max(1, len(multiplies)),
        sum(o.startswith("HMMA") for o in ops), resident, resident * kernel.in_flight, [],
    )  # fmt: skip
    checks = {
        f"{entry.omma} OMMA.SF instead of {kernel.omma}": entry.omma == kernel.omma,
        f"{entry.hmma} HMMA": entry.hmma == 0,
        f"{entry.per_omma:.1f} instructions for an OMMA": entry.per_omma < OMMA_CLOCKS,
        "stack or spills": facts.get("stack", 1) == 0,
        "local memory": not any(o.startswith(("LDL", "STL")) for o in ops),
        "too much shared memory": kernel.shared <= MAX_SHARED,
        f"only {resident} CTA on an SM": resident >= kernel.resident,
        "no e2m1 conversion": not kernel.converts or any(o.startswith("F2FP") and ".E2M1." in o for o in ops),
        f"{early_copies(ops)} copies before the dependency wait, not {kernel.early_copies}": (
            early_copies(ops) == kernel.early_copies
        ),
    }
    entry.failures = [failure for failure, passed in checks.items() if not passed]
    entry.failures += dependency_failures(code, kernel.early_loads, kernel.late_launch)
    return entry


def cp_async_users() -> list[str]:
    """Kernel files, other than the operand streams, that issue cp.async copies."""
    files = (ROOT / "csrc").rglob("*.cu*")
    return [f.name for f in files if f.name not in CP_ASYNC_FILES and re.search(r"cp_async_\d+\(", f.read_text())]


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
    print(f"target  {'kernel':<33}  regs  shared B  OMMA.SF  instr/OMMA  HMMA  CTAs/SM  KB in flight/SM  verdict")
    for e in sorted(entries, key=lambda e: (e.target, e.kernel)):
        verdict = "; ".join(e.failures) or "ok"
        ratio = f"{e.per_omma:.1f}" if e.omma else "-"
        print(
            f"{e.target:<7} {e.kernel:<33} {e.registers:>5} {e.shared:>9} {e.omma:>8} {ratio:>11} {e.hmma:>5} "
            f"{e.resident:>8} {e.in_flight / 1024:>16.1f}  {verdict}"
        )
    refused = plain_target_is_refused()
    others = cp_async_users()
    print(f"limits: shared <= {MAX_SHARED} B a CTA, {SM_SHARED} B an SM; no spills, no local memory, no HMMA")
    print(f"plain sm_120 is refused with a message: {'yes' if refused else 'NO'}")
    print(f"cp.async outside the operand streams: {', '.join(others) or 'none'}")
    if args.json:
        args.json.write_text(json.dumps([asdict(e) for e in entries], indent=1))
    return 0 if entries and refused and not others and not any(e.failures for e in entries) else 1


if __name__ == "__main__":
    sys.exit(main())
