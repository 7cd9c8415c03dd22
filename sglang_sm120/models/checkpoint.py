"""Look through a checkpoint: headers of every file, data of the scales only, in memory that its data does not grow."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from sglang_sm120.errors import ConfigError, FormatError, bad_value
from sglang_sm120.models.checkpoint_rules import Module, check_modules
from sglang_sm120.models.findings import Findings
from sglang_sm120.models.headers import INDEX_NAMES, Tensor, read_header
from sglang_sm120.models.quantization import Quantization, read_quantization
from sglang_sm120.models.scale_values import check_block_scales, check_global_scale
from sglang_sm120.models.source import load_source, read_json

#: Called with the bytes of scales read so far and in all (of the files whose headers are known).
Progress = Callable[[int, int], None]

_GLOBAL = frozenset(
    {"weight_scale_2", "input_scale", "weight_global_scale", "input_global_scale", "k_scale", "v_scale"}
)
_FLOATS = frozenset({"F32", "BF16", "F16"})
_DOWNLOAD = "download the checkpoint again"


@dataclass
class _Scan:
    findings: Findings = field(default_factory=Findings)
    modules: dict[str, Module] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)  # file of each tensor
    scale_bytes: int = 0


def check_checkpoint(path: Path, *, tp: int | None = None, progress: Progress | None = None) -> dict[str, Any]:
    """Check a folder, an index file, or one safetensors file.

    Args:
        tp: also say which layers this many ranks cannot share well.
        progress: told after every tensor that was read.

    Returns:
        A report as plain data; ``ok`` is false if there is an error.

    Raises:
        ConfigError: there is no checkpoint at ``path``, or its configuration cannot be read.
    """
    if tp is not None and tp < 1:
        raise ConfigError(bad_value("--tp", tp, "it must be at least 1"))
    files, weight_map = _files(path)
    quantization = _quantization(path)
    scan = _Scan()
    for file in files:
        _read_file(file, scan, progress)
    if weight_map is not None:
        _compare_with_index(weight_map, scan)
    check_modules(scan.modules, quantization, tp, scan.findings)
    counts: dict[str, int] = {}
    for module in scan.modules.values():
        counts[module.kind] = counts.get(module.kind, 0) + 1
    return {
        "schema": 1,
        "path": str(path),
        "files": len(files),
        "tensors": len(scan.owners),
        "modules": dict(sorted(counts.items())),
        "scale_bytes": scan.scale_bytes,
        "quantization": quantization.method if quantization is not None else None,
        "ok": scan.findings.number("error") == 0,
        **scan.findings.as_data(),
    }


def tensor_names(folder: Path) -> frozenset[str] | None:
    """Return the names of all tensors below ``folder``, ``None`` if there are no weights (yet).

    Raises:
        ConfigError: the index is damaged.
        FormatError: a header is.
    """
    if not any(folder.glob("*.safetensors")):
        return None
    files, weight_map = _files(folder)
    if weight_map is not None:
        return frozenset(weight_map)
    return frozenset(tensor.name for file in files for tensor in read_header(file))


def _files(path: Path) -> tuple[list[Path], Mapping[str, str] | None]:
    """Return the files to read, and the index if there is one."""
    # Path.is_file raises for a name that is too long and for a folder that may not be read; os.path says no.
    is_file, is_dir = os.path.isfile(path), os.path.isdir(path)
    if is_file and path.suffix == ".safetensors":
        return [path], None
    folder = path if is_dir else path.parent
    index = path if is_file else next((folder / n for n in INDEX_NAMES if os.path.isfile(folder / n)), None)
    if index is not None and index.name.endswith(".index.json"):
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(f"{index} has no weight_map.")
        for name in weight_map.values():
            # An index may not send us to other folders.
            if not isinstance(name, str) or re.fullmatch(r"[\w.+=-]+\.safetensors", name) is None:
                raise ConfigError(
                    bad_value(f"weight_map of {index}", name, "a file name that ends in .safetensors is needed")
                )
        return sorted({folder / name for name in weight_map.values()}), weight_map
    files = sorted(folder.glob("*.safetensors")) if is_dir else []
    if not files:
        raise ConfigError(bad_value("PATH", str(path), "name a folder with safetensors files, or one such file"))
    return files, None


def _quantization(path: Path) -> Quantization | None:
    folder = path if os.path.isdir(path) else path.parent
    if not os.path.isfile(folder / "config.json"):
        return None
    return read_quantization(load_source(str(folder)).quantization)


def _read_file(path: Path, scan: _Scan, progress: Progress | None) -> None:
    try:
        tensors = read_header(path)
        with path.open("rb") as file:
            scales = [tensor for tensor in tensors if _is_scale(tensor)]
            total = scan.scale_bytes + sum(tensor.stop - tensor.start for tensor in scales)
            for tensor in tensors:
                if scan.owners.setdefault(tensor.name, path.name) != path.name:
                    where = f"{scan.owners[tensor.name]} and {path.name}"
                    what = "it is in two files; which one is loaded depends on their order"
                    scan.findings.add("stored-twice", "error", tensor.name, where, what, "remove the stale file")
                _note(file, tensor, scan)
                if progress is not None and _is_scale(tensor):
                    progress(scan.scale_bytes, total)
    except (FormatError, OSError) as error:
        text = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        scan.findings.add("file-broken", "error", path.name, "unreadable", text.rstrip("."), _DOWNLOAD)


def _is_scale(tensor: Tensor) -> bool:
    leaf = tensor.name.rpartition(".")[2]
    return leaf in _GLOBAL or leaf == "weight_scale"


def _note(file: BinaryIO, tensor: Tensor, scan: _Scan) -> None:
    name, _, leaf = tensor.name.rpartition(".")
    if leaf in ("weight", "weight_packed"):
        module = scan.modules.setdefault(name, Module())
        module.weight_name, module.weight_dtype, module.weight_shape = leaf, tensor.dtype, tensor.shape
    elif _is_scale(tensor):
        scan.scale_bytes += tensor.stop - tensor.start
        module = scan.modules.setdefault(name, Module())
        if leaf == "weight_scale":
            module.scale_dtype, module.scale_shape = tensor.dtype, tensor.shape
        if tensor.dtype == "F8_E4M3":
            check_block_scales(file, tensor, scan.findings)
        elif tensor.dtype in _FLOATS:
            spread = check_global_scale(file, tensor, scan.findings)
            if leaf != "weight_scale":
                module.globals[leaf] = spread
        elif leaf in _GLOBAL:
            what = "a global scale is a float32 number"
            scan.findings.add("scale-dtype", "error", tensor.name, tensor.dtype, what, "export the checkpoint again")


def _compare_with_index(weight_map: Mapping[str, str], scan: _Scan) -> None:
    for name, file in weight_map.items():
        found = scan.owners.get(name)
        if found is None:
            scan.findings.add("tensor-missing", "error", name, file, "the index promises it, no file has it", _DOWNLOAD)
        elif found != file:
            what = f"the index says {file}, it is in {found}"
            scan.findings.add("index-wrong", "warning", name, found, what, _DOWNLOAD)
    for name in _without(scan.owners, weight_map):
        what = "no entry of the index names it, so it is not loaded"
        scan.findings.add("not-in-index", "warning", name, scan.owners[name], what, "add it to the index, or remove it")


def _without(owners: Mapping[str, str], weight_map: Mapping[str, str]) -> Iterator[str]:
    yield from (name for name in owners if name not in weight_map)
