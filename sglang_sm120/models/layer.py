"""What a model consists of: its layers, its prediction module, and what it keeps of the context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sglang_sm120.models.attention import ContextMemory
from sglang_sm120.models.gemms import Gemm

LayerKind = Literal["full", "latent", "linear", "none"]


@dataclass(frozen=True)
class Layer:
    """One layer as SGLang numbers them.

    Attributes:
        kind: what it remembers of the context: keys and values, a latent, a state, or nothing (a feed-forward layer of
            its own).
        launches: kernels that are no GEMM and that no flag can save: attention or state update.
        all_reduces: of one step: after attention and after the feed-forward part, where it has both.
    """

    index: int
    prefix: str
    kind: LayerKind
    gemms: tuple[Gemm, ...]
    launches: int
    all_reduces: int = 2


@dataclass(frozen=True)
class Draft:
    """The multi-token prediction module of a checkpoint.

    Attributes:
        layers: all that are stored.
        per_step: how many of them one draft takes.
        served: false where SGLang has no draft class for it; ``why_not`` says so.
    """

    layers: tuple[Layer, ...]
    served: bool = True
    why_not: str = ""
    per_step: int = 1


@dataclass(frozen=True)
class Stack:
    """The layers of a model, what they keep of the context, and its prediction module."""

    layers: tuple[Layer, ...]
    memory: ContextMemory
    draft: Draft | None
