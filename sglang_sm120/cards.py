"""Published figures of graphics cards: what a prediction may assume about a card that is not here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from sglang_sm120.backends.record import Capability
from sglang_sm120.errors import ConfigError, bad_value


@dataclass(frozen=True)
class Card:
    """One card.

    Attributes:
        key: what ``--card`` takes.
        bandwidth_gb_s: DRAM bandwidth of the data sheet, 1e9 bytes per second. A kernel reads less: 1628 of 1792 GB/s
            were measured on an RTX 5090 (kekzl/imp#1797).
        memory_gb: DRAM as sold.
        fp4_tflops: dense FP4 peak, 1e12 operations per second; ``None`` without FP4 instructions.
        unified_memory: the processor uses the same memory.
        sources: where the figures are from.
    """

    key: str
    name: str
    capability: Capability
    memory_gb: float
    bandwidth_gb_s: float
    fp4_tflops: float | None
    unified_memory: bool
    sources: tuple[str, ...]

    @property
    def is_sm12x(self) -> bool:
        return self.capability[0] == 12


@cache
def cards() -> Mapping[str, Card]:
    """Return every card that is known, by key."""
    text = resources.files("sglang_sm120").joinpath("cards.json").read_text(encoding="utf-8")
    return {
        key: Card(
            key,
            entry["name"],
            (entry["capability"][0], entry["capability"][1]),
            entry["memory_gb"],
            entry["bandwidth_gb_s"],
            entry["fp4_tflops"],
            entry["unified_memory"],
            tuple(entry["sources"]),
        )
        for key, entry in json.loads(text)["cards"].items()
    }


def find_card(key: str) -> Card:
    """Return the card that ``--card`` names.

    Raises:
        ConfigError: it is not known.
    """
    card = cards().get(key.lower())
    if card is None:
        raise ConfigError(bad_value("--card", key, f"known are {', '.join(cards())}"))
    return card


def card_of_device(name: str) -> Card | None:
    """Return the card that a CUDA device name belongs to, ``None`` for one that is not listed."""
    words = re.sub(r"[^a-z0-9]+", " ", name.lower())
    if "rtx pro 6000" in words:
        suffix = next((s for s in ("server", "max q") if s in words), "")
        return cards()["rtx-pro-6000" + (f"-{suffix.replace(' ', '-')}" if suffix else "")]
    for key in ("rtx-5090", "rtx-5080", "h200"):
        # "RTX 5090 D" and "RTX 5090 Laptop GPU" are other cards.
        if re.search(rf"\b{key.replace('-', ' ')}\b(?! d\b| laptop)", words):
            return cards()[key]
    return cards()["dgx-spark"] if "gb10" in words.split() else None
