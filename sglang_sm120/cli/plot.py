"""``bench --plot``: one panel for each shape, time over M, a line for each backend."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from typing import Any

from sglang_sm120.errors import ConfigError, UnsupportedError, bad_value

SUFFIXES = (".png", ".svg")
#: Colours that people with colour-blindness can tell apart (Okabe and Ito), with a marker of their own each.
_STYLES = (
    ("#0072B2", "o"),
    ("#D55E00", "s"),
    ("#009E73", "^"),
    ("#CC79A7", "D"),
    ("#E69F00", "v"),
    ("#56B4E9", "P"),
    ("#000000", "X"),
)


def check_path(path: Path) -> None:
    """Refuse a plot that could not be written, before anything is measured.

    Raises:
        ConfigError: neither PNG nor SVG, or no such folder.
        UnsupportedError: matplotlib is not installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(bad_value("--plot", str(path), f"end the name with {' or '.join(SUFFIXES)}"))
    if not path.absolute().parent.is_dir():
        raise ConfigError(bad_value("--plot", str(path), "name a folder that exists"))
    _matplotlib()


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw a report of ``bench`` into ``path``, PNG or SVG by its name.

    Raises:
        ConfigError: nothing was measured, or the file cannot be written.
        UnsupportedError: matplotlib is not installed.
    """
    figure_module = _matplotlib()
    measured = [case for case in report["cases"] if case["timings"]]
    shapes = list(dict.fromkeys(case["label"] for case in measured))
    if not shapes:
        raise ConfigError(bad_value("--plot", str(path), "nothing was measured that could be drawn"))
    columns = 1 if len(shapes) == 1 else 2 if len(shapes) in (2, 4) else 3
    rows = math.ceil(len(shapes) / columns)
    figure = figure_module.Figure(figsize=(max(6.0, 4.6 * columns), 3.7 * rows + 1.3), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    values = list(dict.fromkeys(value for case in measured for value in case["timings"]))
    styles = {value: _STYLES[index % len(_STYLES)] for index, value in enumerate(values)}
    for index, (panel, label) in enumerate(zip(panels, shapes, strict=False)):
        if index % columns == 0:
            panel.set_ylabel("µs per layer (median, quartiles)")
        _panel(panel, [case for case in measured if case["label"] == label], styles)
    for panel in panels[len(shapes) :]:
        panel.set_axis_off()
    handles = {text: h for p in panels for h, text in zip(*p.get_legend_handles_labels(), strict=True)}
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, len(handles)), frameon=False
    )
    figure.suptitle("\n".join(filter(None, (_title(report), report["note"]))), fontsize=11)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(bad_value("--plot", str(path), f"{error.strerror or error}; name another file")) from error


def _panel(panel: Any, cases: list[dict[str, Any]], styles: dict[str, tuple[str, str]]) -> None:
    for value, (colour, marker) in styles.items():
        points = [(case["m"], case["timings"][value]) for case in cases if value in case["timings"]]
        if not points:
            continue
        rows, timings = [m for m, _ in points], [timing for _, timing in points]
        panel.plot(rows, [t["median"] for t in timings], color=colour, marker=marker, markersize=4.5, label=value)
        # Quartiles.
        panel.fill_between(rows, [t["low"] for t in timings], [t["high"] for t in timings], color=colour, alpha=0.2)
    floors = [(case["m"], case["floor_us"]) for case in cases if case["floor_us"] is not None]
    if floors:
        panel.plot(*zip(*floors, strict=True), color="0.4", linestyle="--", label="limit of DRAM or FP4 (data sheet)")
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    marks = [case["m"] for case in cases]
    panel.set_xticks(marks, [str(m) if m & (m - 1) == 0 else "" for m in marks], fontsize=8)
    panel.minorticks_off()
    panel.yaxis.set_major_formatter(lambda number, _: f"{number:g}")
    panel.grid(visible=True, color="0.9")
    panel.set_title(_label(cases[0]), fontsize=10)
    panel.set_xlabel("M (rows)")


def _label(case: dict[str, Any]) -> str:
    layers = ", ".join(case["layers"])
    return str(case["label"]) + (f"\n{layers}" if layers else "")


def _title(report: dict[str, Any]) -> str:
    versions = report["versions"]
    shown = [f"{name} {versions[name]}" for name in ("flashinfer", "torch", "driver") if name in versions]
    return ", ".join([f"NVFP4 layers on {report['device']['name']}", *shown])


def _matplotlib() -> Any:
    try:
        return import_module("matplotlib.figure")
    except ImportError as error:
        raise UnsupportedError(f"--plot needs matplotlib ({error}): pip install matplotlib.") from error
