"""Where a model's small files come from: a folder, the local Hugging Face cache, or a named preset.

Nothing is downloaded. A hub id is looked up in the cache that ``hf download`` fills; if it is not there, a preset
with the same id serves, and else one error says what to do.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from sglang_sm120.errors import ConfigError, bad_value

#: Far above any configuration; a file beyond it is something else.
MAX_CONFIG_BYTES = 64 << 20
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class ModelSource:
    """The configuration of one model.

    Attributes:
        label: what the user wrote, or the name of the preset.
        origin: where the files are from.
        config: ``config.json``, with ``text_config`` of a multimodal model put in its place.
        quantization: the quantization section, ``None`` for a checkpoint without one.
        folder: where weights may be, ``None`` for a preset.
        sources: where the figures of a preset were taken from.
    """

    label: str
    origin: Literal["folder", "hub cache", "preset"]
    config: Mapping[str, Any]
    quantization: Mapping[str, Any] | None
    folder: Path | None = None
    sources: tuple[str, ...] = ()


@cache
def presets() -> Mapping[str, Mapping[str, Any]]:
    """Return the named presets of the package, by name."""
    text = resources.files("sglang_sm120.models").joinpath("presets.json").read_text(encoding="utf-8")
    table: dict[str, Mapping[str, Any]] = json.loads(text)["presets"]
    return table


def load_source(model: str) -> ModelSource:
    """Find the configuration of ``model``: a folder, a ``config.json``, a hub id, or the name of a preset.

    Raises:
        ConfigError: there is none, or it cannot be read. The message names the presets.
    """
    # Functions of os.path: those of Path raise for names that are too long and for users that do not exist.
    place = os.path.expanduser(model)
    if os.path.isdir(place):
        return _read(model, "folder", Path(place))
    if os.path.lexists(place):
        if os.path.basename(place) != "config.json":
            raise ConfigError(bad_value("MODEL", model, "name the folder of the model, or its config.json"))
        return _read(model, "folder", Path(place).parent)
    cached = _in_hub_cache(model) if _HUB_ID.fullmatch(model) else None
    if cached is not None:
        return _read(model, "hub cache", cached)
    for name, preset in presets().items():
        if model.lower() in (name, *(alias.lower() for alias in preset["checkpoints"])):
            quantization = preset["quantization"]
            return ModelSource(name, "preset", preset["config"], quantization, None, tuple(preset["sources"]))
    raise ConfigError(
        bad_value(
            "MODEL",
            model,
            "it is no folder, not in the local Hugging Face cache, and no preset. Name a folder with a config.json, "
            f"fetch the small files with: hf download {model} --include '*.json', "
            f"or name a preset: {', '.join(presets())}",
        )
    )


def _read(label: str, origin: Literal["folder", "hub cache"], folder: Path) -> ModelSource:
    whole = read_json(folder / "config.json")
    inner = whole.get("text_config")
    text = {**whole, **inner} if isinstance(inner, dict) else whole
    quantization = text.get("quantization_config") or text.get("compression_config")
    if quantization is None and (folder / "hf_quant_config.json").is_file():
        quantization = read_json(folder / "hf_quant_config.json")
    return ModelSource(label, origin, text, quantization, folder)


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object.

    Raises:
        ConfigError: the file is missing, no regular file, too large, or no JSON object.
    """
    try:
        status = path.stat()
        # Opening a FIFO would wait for a writer, and a device has no end.
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path} cannot be read: it is no regular file.")
        if status.st_size > MAX_CONFIG_BYTES:
            remedy = f"a configuration has at most {MAX_CONFIG_BYTES} bytes"
            raise ConfigError(bad_value(str(path), status.st_size, remedy))
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON file: {error}.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds {type(value).__name__}, a JSON object is needed.")
    return value


def _in_hub_cache(hub_id: str) -> Path | None:
    """The folder of the snapshot that ``refs/main`` names, as the huggingface_hub library lays it out."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    root = Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")))
    repository = root / f"models--{hub_id.replace('/', '--')}"
    try:
        revision = (repository / "refs" / "main").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
    snapshot = repository / "snapshots" / revision
    return snapshot if os.path.isfile(snapshot / "config.json") else None
