"""Which format each module of a checkpoint is stored in, from its quantization configuration.

Three dialects are read: ModelOpt (``hf_quant_config.json`` or the same keys in ``config.json``, ``MIXED_PRECISION``
included), compressed-tensors, and the simple ones that quantize everything but a list (fp8, awq, gptq, mxfp4).
The rules follow how SGLang 0.5.23 matches names: ``modelopt_quant.py`` (``is_layer_excluded``,
``_resolve_quant_algo``) and ``compressed_tensors/utils.py``; ``tests/models`` asks the real classes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from sglang_sm120.errors import ConfigError, bad_value

Format = Literal["nvfp4", "nvfp4_w4a16", "fp8", "mxfp8", "mxfp4", "int4", "int8", "bf16"]

#: Bytes that one stored weight takes, scales included: a block scale byte per 16 (NVFP4) or 32 (MX) weights; groups
#: of 128 with a 16-bit scale and a 4-bit zero point for int4 (AWQ, GPTQ).
BYTES_PER_WEIGHT: Mapping[Format, float] = {
    "nvfp4": 0.5 + 1 / 16,
    "nvfp4_w4a16": 0.5 + 1 / 16,
    "fp8": 1.0,
    "mxfp8": 1.0 + 1 / 32,
    "mxfp4": 0.5 + 1 / 32,
    "int4": 0.5 + 2.5 / 128,
    "int8": 1.0,
    "bf16": 2.0,
}
FP4_FORMATS: frozenset[Format] = frozenset({"nvfp4", "nvfp4_w4a16"})

_MODELOPT: Mapping[str, Format] = {
    "NVFP4": "nvfp4",
    "NVFP4_AWQ": "nvfp4",
    "W4A16_NVFP4": "nvfp4_w4a16",
    "FP8": "fp8",
    "FP8_PB_WO": "fp8",
    "FP8_PB_REAL": "fp8",
    "FP8_BLOCK_SCALES": "fp8",
    "MXFP8": "mxfp8",
    "W4A16_AWQ": "int4",
}
_SIMPLE: Mapping[str, Format] = {"fp8": "fp8", "awq": "int4", "gptq": "int4", "mxfp4": "mxfp4", "mxfp8": "mxfp8"}
_EXCLUSIONS = ("exclude_modules", "ignore", "ignored_layers", "modules_to_not_convert")


@dataclass(frozen=True)
class Rule:
    """Modules whose name matches ``pattern`` have ``format``. The first rule that matches counts."""

    pattern: re.Pattern[str]
    format: Format


@dataclass(frozen=True)
class Quantization:
    """The formats of a checkpoint.

    Attributes:
        method: what SGLang's ``--quantization`` calls it; ``None`` for a checkpoint without quantization.
        excluded: modules that stay in bf16.
        rules: formats of the others, in order.
        default: format of a module that nothing names.
        kv_cache_fp8: the checkpoint carries scales for an FP8 KV cache.
    """

    method: str | None = None
    excluded: tuple[re.Pattern[str], ...] = ()
    rules: tuple[Rule, ...] = ()
    default: Format = "bf16"
    kv_cache_fp8: bool = False

    def format_of(self, module: str) -> Format:
        """Return the format of a module, by its name in the checkpoint (``model.layers.0.mlp.up_proj``)."""
        names = _spellings(module)
        parts = module.split(".")
        if any(p.fullmatch(n) for p in self.excluded for n in (*names, *parts)):
            return "bf16"
        for rule in self.rules:
            if any(rule.pattern.fullmatch(name) for name in names):
                return rule.format
        return self.default


def read_quantization(section: Mapping[str, Any] | None) -> Quantization:
    """Read a quantization section: of ``config.json``, or the whole of ``hf_quant_config.json``.

    Raises:
        ConfigError: a method, algorithm or layout that is not known, or a part that is not what it should be.
    """
    if not section:
        return Quantization()
    _object("quantization_config", section)
    inner = _object("quantization", section.get("quantization", section))
    method = str(inner.get("quant_method", "modelopt" if "quant_algo" in inner else "")).lower()
    if method.startswith("modelopt") or (not method and "quant_algo" in inner):
        return _modelopt(inner)
    if method == "compressed-tensors" or "config_groups" in inner:
        return _compressed_tensors(inner)
    if method in _SIMPLE:
        return Quantization(method, _compiled(_exclusions(inner)), (), _SIMPLE[method])
    known = ", ".join(("modelopt", "compressed-tensors", *_SIMPLE))
    raise ConfigError(bad_value("quant_method", method, f"known are {known}"))


def _modelopt(section: Mapping[str, Any]) -> Quantization:
    algorithm = str(section.get("quant_algo") or "").upper()
    excluded = _compiled(_exclusions(section))
    kv_fp8 = str(section.get("kv_cache_quant_algo") or "").upper() == "FP8" or _is_fp8(section.get("kv_cache_scheme"))
    if algorithm == "MIXED_PRECISION":
        rules: list[Rule] = []
        for name, entry in _objects(section, "quantized_layers").items():
            layout = _modelopt_format(str(entry.get("quant_algo", "")).upper())
            # An entry for a block ("...mlp.experts") holds for everything inside it.
            rules.append(Rule(_pattern(name, inside=True), layout))
        fp4 = any(rule.format in FP4_FORMATS for rule in rules)
        return Quantization("modelopt_mixed" if fp4 else "w4afp8", excluded, tuple(rules), "bf16", kv_fp8)
    layout = _modelopt_format(algorithm)
    method = {"fp8": "modelopt_fp8", "mxfp8": "mxfp8", "int4": "modelopt"}.get(layout, "modelopt_fp4")
    return Quantization(method, excluded, (), layout, kv_fp8)


def _modelopt_format(algorithm: str) -> Format:
    if algorithm not in _MODELOPT:
        raise ConfigError(bad_value("quant_algo", algorithm, f"known are MIXED_PRECISION, {', '.join(_MODELOPT)}"))
    return _MODELOPT[algorithm]


def _compressed_tensors(section: Mapping[str, Any]) -> Quantization:
    rules: list[Rule] = []
    default: Format = "bf16"
    for group in _objects(section, "config_groups").values():
        layout = _compressed_format(group)
        for target in _names(group, "targets") or ("Linear",):
            if "." in target or target.startswith("re:"):
                rules.append(Rule(_target(target), layout))
            else:
                default = layout  # the name of a class: every linear layer
    excluded = tuple(_target(name) for name in _names(section, "ignore"))
    kv_fp8 = _is_fp8(section.get("kv_cache_scheme"))
    return Quantization("compressed-tensors", excluded, tuple(rules), default, kv_fp8)


def _compressed_format(group: Mapping[str, Any]) -> Format:
    weights = _object("weights", group.get("weights") or {})
    bits, kind = weights.get("num_bits"), weights.get("type")
    if bits == 4 and kind == "float":
        if weights.get("group_size") == 32:
            return "mxfp4"
        return "nvfp4" if group.get("input_activations") else "nvfp4_w4a16"
    known: dict[tuple[object, object], Format] = {(8, "float"): "fp8", (4, "int"): "int4", (8, "int"): "int8"}
    for pair, layout in known.items():
        if pair == (bits, kind):
            return layout
    raise ConfigError(bad_value("config_groups", dict(weights), "known are 4 and 8 bits of type float or int"))


def _is_fp8(scheme: object) -> bool:
    return isinstance(scheme, Mapping) and scheme.get("num_bits") == 8 and scheme.get("type") == "float"


def _exclusions(section: Mapping[str, Any]) -> Sequence[str]:
    return next((names for key in _EXCLUSIONS if (names := _names(section, key))), ())


def _object(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(bad_value(name, value, "the quantization configuration needs an object there"))
    return value


def _objects(section: Mapping[str, Any], key: str) -> Mapping[str, Mapping[str, Any]]:
    """An object of objects, empty if it is absent or null."""
    found = _object(key, section.get(key) or {})
    return {name: _object(f"{key}.{name}", entry) for name, entry in found.items()}


def _names(section: Mapping[str, Any], key: str) -> Sequence[str]:
    """A list of names, empty if it is absent or null. A single text is no list: its letters would be the names."""
    found = section.get(key) or ()
    if not isinstance(found, (list, tuple)) or not all(isinstance(name, str) for name in found):
        raise ConfigError(bad_value(key, found, "the quantization configuration needs a list of names there"))
    return found


def _compiled(patterns: Iterable[str]) -> tuple[re.Pattern[str], ...]:
    return tuple(_pattern(text) for text in dict.fromkeys(patterns))


@lru_cache(maxsize=8192)
def _pattern(text: str, *, inside: bool = False) -> re.Pattern[str]:
    """A name in which ``*`` stands for anything. A name without one also covers what lies below it."""
    body = ".*".join(re.escape(part) for part in text.split("*"))
    return re.compile(body + (r"(\..*)?" if inside or "*" not in text else ""))


def _target(text: str) -> re.Pattern[str]:
    """A target or an exception of compressed-tensors: ``re:`` matches from the start, all else is a name."""
    if not text.startswith("re:"):
        return _pattern(text)
    try:
        return re.compile(f"(?:{text[3:]}).*")
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(bad_value("ignore", text, f"it is no regular expression ({error})")) from error


@lru_cache(maxsize=65536)
def _spellings(module: str) -> tuple[str, ...]:
    """The names under which a module may be listed: exporters and SGLang disagree about ``language_model``."""
    names = [module]
    for before, after in (
        ("model.language_model.", "language_model.model."),
        ("model.language_model.", "model."),
        ("model.", "model.language_model."),
        ("model.", "language_model.model."),
    ):
        if module.startswith(before):
            names.append(after + module.removeprefix(before))
    return tuple(dict.fromkeys(names))
