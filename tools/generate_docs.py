"""Write the generated tables in README.md and docs/, and the plots; ``--check`` only says whether they are stale."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sglang_sm120 import env  # noqa: E402 - the repository's own package, wherever this script is started from
from sglang_sm120.backends import AUTO_ORDER, BACKENDS  # noqa: E402
from sglang_sm120.backends.moe_table import MOE_AUTO, MOE_RUNNERS, ROUTES  # noqa: E402
from sglang_sm120.backends.operator_table import OPERATORS, PROVIDERS  # noqa: E402
from sglang_sm120.backends.record import Backend, Capability, CapabilityRow, Fault, Requirement  # noqa: E402
from sglang_sm120.dispatch import PRECEDENCE  # noqa: E402
from tools import prediction_tables, result_plots, result_tables  # noqa: E402

_BLOCK = re.compile(r"(<!-- generated: (?P<name>\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _capabilities(capabilities: Iterable[Capability]) -> str:
    return ", ".join(f"{major}.{minor}" for major, minor in capabilities)


def _bounds(requirements: Iterable[Requirement]) -> str:
    return ", ".join(f"{r.package} `{r.specifier}`" for r in requirements) or "–"


def _values() -> str:
    rows = []
    for record in BACKENDS.values():
        native = f"SGLang ≥ {record.native_since}" if record.native_since else ""
        ours = "this package" if record.can_be_added else ""
        earlier = (
            f"{native}; before that {ours}" if native and ours and record.native_since != "0.5.9" else native or ours
        )
        rows.append([f"`{record.value}`", record.summary, record.provider, earlier])
    return _table(["value", "what it is", "multiplies", "added by"], rows)


def _requirements() -> str:
    rows = []
    for record in BACKENDS.values():
        if record.any_device:
            rows.append([f"`{record.value}`", "any, CPU included", "–", "any", "–", record.rows[0].source.ref])
            continue
        grouped: dict[tuple[str, str, str, str], list[Capability]] = {}
        for row in record.rows:
            grouped.setdefault(_row_cells(row), []).append(row.capability)
        rows += [[f"`{record.value}`", _capabilities(found), *cells] for cells, found in grouped.items()]
    return _table(["value", "capability", "needs", "output", "N, K multiples of", "sources"], rows)


def _row_cells(row: CapabilityRow) -> tuple[str, str, str, str]:
    sources = [row.source, *(r.source for r in row.requires), *([row.shape.source] if row.shape else [])]
    return (
        _bounds(row.requires),
        ", ".join(row.out_dtypes),
        f"{row.shape.n_multiple}, {row.shape.k_multiple}" if row.shape else "–",
        "; ".join(dict.fromkeys(source.ref for source in sources)),
    )


def _absences(records: Mapping[str, Backend] = BACKENDS) -> str:
    rows = [
        [f"`{record.value}`", _capabilities(absence.capabilities), absence.reason, absence.source.ref]
        for record in records.values()
        for absence in record.absent
    ]
    return _table(["value", "capability", "why", "source"], rows)


def _faults(records: Mapping[str, Backend] = BACKENDS) -> str:
    affected: dict[Fault, list[str]] = {}
    for record in records.values():
        for fault in record.faults:
            affected.setdefault(fault, []).append(f"`{record.value}`")
    rows = [
        [
            fault.name,
            ", ".join(values),
            _capabilities(fault.capabilities),
            _bounds(fault.when),
            fault.effect,
            fault.remedy,
            fault.severity,
            fault.source.ref,
        ]
        for fault, values in affected.items()
    ]
    return _table(["fault", "values", "capability", "when", "effect", "remedy", "severity", "source"], rows)


def _auto() -> str:
    rows = [[f"`{p.value}`", _bounds(p.when), p.reason, p.source.ref] for p in AUTO_ORDER]
    return _table(["value", "if", "why", "source"], rows)


def _moe_runners() -> str:
    rows = []
    for record in MOE_RUNNERS.values():
        grouped: dict[tuple[str, str], list[Capability]] = {}
        for row in record.rows:
            needs, _, _, sources = _row_cells(row)
            grouped.setdefault((needs, sources), []).append(row.capability)
        rows += [
            [
                f"`{record.value}`",
                record.summary,
                f"≥ {record.native_since}" if record.native_since else "this package",
                "any" if record.any_device else _capabilities(found),
                needs,
                sources,
            ]
            for (needs, sources), found in grouped.items()
        ]
    return _table(["value", "what it is", "SGLang", "capability", "needs", "sources"], rows)


def _moe_routes() -> str:
    rows = []
    for route in ROUTES:
        values = ", ".join(f"`{value}`" for value in route.values) if route.values else "every other value"
        values += " with expert parallelism" if route.expert_parallel else ""
        runs = f"`{route.runner}`" if route.runner else route.effect
        rows.append([", ".join(route.quantizations), values, route.releases or "every", runs, route.source.ref])
    return _table(["experts", "value", "SGLang", "what runs", "source"], rows)


def _moe_auto() -> str:
    rows = [
        [quantization, f"`{p.value}`", _bounds(p.when), p.reason, p.source.ref]
        for quantization, preferences in MOE_AUTO.items()
        for p in preferences
    ]
    return _table(["experts", "value", "if", "why", "source"], rows)


def _operators() -> str:
    """Which of SGLang's releases has which operator, and the operator of ``torch.ops`` behind it."""
    rows = [[f"`{o.name}`", f"`{o.torch_name}`" if o.torch_name else "–", f"≥ {o.since}"] for o in OPERATORS]
    return _table(["function", "`torch.ops.sgl_kernel`", "SGLang"], rows)


def _operator_providers() -> str:
    rows = []
    for releases, provider in PROVIDERS:
        grouped: dict[tuple[str, str], list[Capability]] = {}
        for row in provider.rows:
            needs, _, _, sources = _row_cells(row)
            grouped.setdefault((needs, sources), []).append(row.capability)
        rows += [
            [releases.specifier, f"`{provider.value}`", _capabilities(found), needs, sources]
            for (needs, sources), found in grouped.items()
        ]
        rows += [
            [
                releases.specifier,
                f"`{provider.value}`",
                _capabilities(a.capabilities),
                f"none: {a.reason}",
                a.source.ref,
            ]
            for a in provider.absent
        ]
    return _table(["SGLang", "whose code", "capability", "needs", "source"], rows)


def _precedence() -> str:
    written = {"default": "`auto`: see [what auto takes](backends.md#what-auto-takes-on-sm12x)"}
    rows = [
        [str(rank), origin, written.get(origin, f"`{argument}`")]
        for rank, (origin, argument) in enumerate(PRECEDENCE.items(), start=1)
    ]
    return _table(["", "source", "what you write"], rows)


def _variables() -> str:
    rows = [[f"`{v.name}`", v.kind, v.default, v.meaning] for v in env.VARIABLES]
    return _table(["variable", "type", "default", "meaning"], rows)


BLOCKS: dict[str, Callable[[], str]] = {
    "values": _values,
    "requirements": _requirements,
    "absences": _absences,
    "faults": _faults,
    "auto": _auto,
    "moe_runners": _moe_runners,
    "moe_absences": partial(_absences, MOE_RUNNERS),
    "moe_faults": partial(_faults, MOE_RUNNERS),
    "moe_routes": _moe_routes,
    "moe_auto": _moe_auto,
    "operators": _operators,
    "operator_providers": _operator_providers,
    "precedence": _precedence,
    "variables": _variables,
    "gpu_runs": result_tables.gpu_runs,
    "gpu_tests": result_tables.gpu_tests,
    "serving": result_tables.serving,
    "goals": result_tables.goals,
    "profiles": result_tables.profiles,
    "kernels": result_tables.kernels,
    "experts": result_tables.experts,
    "prediction_rates": prediction_tables.rates,
    "prediction_terms": prediction_tables.term_table,
    "prediction_arithmetic": prediction_tables.arithmetic,
    "prediction_levers": prediction_tables.levers,
    "prediction_check_model": prediction_tables.check_model,
    "prediction_check_h200": prediction_tables.check_h200,
    "prediction_check_5090": prediction_tables.check_5090,
}
PAGES = ("README.md", "docs/backends.md", "docs/settings.md", "docs/results.md", "docs/predictions.md")
PLOTS = "docs/plots"


def refreshed(text: str) -> str:
    """Return a page with every generated block as it should be."""
    return _BLOCK.sub(lambda block: f"{block[1]}{BLOCKS[block['name']]()}{block[3]}", text)


def contents() -> dict[Path, str]:
    """Every generated file as it should be."""
    pages = {ROOT / page: refreshed((ROOT / page).read_text(encoding="utf-8")) for page in PAGES}
    return pages | {ROOT / PLOTS / name: text for name, text in result_plots.plots().items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write pages and plots, or with ``--check`` return 1 if one is stale, or a plot is left over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a file is stale")
    check = parser.parse_args(arguments).check
    wanted = contents()
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    left_over = [path for path in sorted((ROOT / PLOTS).glob("*")) if path not in wanted]
    if not check:
        (ROOT / PLOTS).mkdir(exist_ok=True)
        for path in stale:
            path.write_text(wanted[path], encoding="utf-8")
        for path in left_over:
            path.unlink()
    for path in (*stale, *left_over):
        name = path.relative_to(ROOT)
        done = "removed" if path in left_over else "written"
        print(f"{name} is stale: run python tools/generate_docs.py" if check else f"{name} {done}")
    return 1 if check and (stale or left_over) else 0


if __name__ == "__main__":
    sys.exit(main())
