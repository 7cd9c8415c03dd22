"""What is measured of experts: their geometry on one rank, as a layer of SGLang has it. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from sglang_sm120.errors import ConfigError, bad_value
from sglang_sm120.models.architecture import Model, read_model
from sglang_sm120.models.budget import Setup, Use, draft_step, expected_experts, step
from sglang_sm120.models.quantization import read_quantization
from sglang_sm120.models.source import load_source

Activation = Literal["silu", "relu2"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
#: SGLang pads I to it where there is no gate, before any kernel sees the weights (ModelOpt).
_PADDING = 128
#: Experts of all ranks, of one rank, of a token; H, I; activation.
ExpertKey = tuple[int, int, int, int, int, Activation]


@dataclass(frozen=True)
class ExpertShape:
    """The routed experts of one layer on one rank, and the layers that have them.

    Attributes:
        experts: of all ranks; ids of tokens go up to it.
        local: held by one rank.
        top_k: experts of a token, over all ranks.
        hidden: H.
        inner: I after tensor parallelism, as it reaches the kernels.
        activation: ``silu`` (gate and up, w13 has 2 * I rows) or ``relu2`` (I rows).
        layers: names, for messages.
    """

    experts: int
    local: int
    top_k: int
    hidden: int
    inner: int
    activation: Activation = "silu"
    layers: tuple[str, ...] = ()

    @property
    def key(self) -> ExpertKey:
        return self.experts, self.local, self.top_k, self.hidden, self.inner, self.activation

    @property
    def label(self) -> str:
        """For messages and tables."""
        held = "" if self.local == self.experts else f", {self.local} on a rank"
        return f"{self.experts} experts{held}, top {self.top_k}, H={self.hidden} I={self.inner} {self.activation}"

    @property
    def weights_per_expert(self) -> int:
        """Elements of both weights of one expert."""
        return (3 if self.activation == "silu" else 2) * self.hidden * self.inner

    def active(self, tokens: int) -> float:
        """Local experts that ``tokens`` tokens are expected to take, if each takes ``top_k`` at random."""
        return expected_experts(self.experts, self.top_k, tokens) * self.local / self.experts


def experts_of_model(model: str, tp: int, ep: int) -> list[ExpertShape]:
    """Return the distinct geometries of the NVFP4 experts of a model on one rank; empty if it has none.

    Args:
        model: a folder, a ``config.json``, a hub id in the local cache, or a preset.
        tp: tensor-parallel ranks.
        ep: groups of them that share out whole experts.

    Raises:
        ConfigError: the model is not known or cannot be divided.
    """
    source = load_source(model)
    read, quantization, setup = read_model(source), read_quantization(source.quantization), Setup(tp=tp, ep=ep)
    uses = (*step(read, quantization, setup), *draft_step(read, quantization, setup))
    return _distinct(use for use in _shapes(read, uses, ep))


def _shapes(model: Model, uses: Iterable[Use], ep: int) -> Iterable[ExpertShape]:
    uses = tuple(uses)
    gated = {use.gemm.name.removesuffix(".w13") for use in uses if len(use.gemm.shards) == 2}  # gate and up
    for use in uses:
        if use.format == "nvfp4" and use.gemm.rule == "expert_row":  # down: [H, I]; gate and up go with it
            block = use.gemm.name.removesuffix(".w2")
            local = _local(model.experts, ep)
            if block in gated:
                yield ExpertShape(model.experts, local, model.top_k, use.n, use.k, layers=(block,))
            else:
                yield ExpertShape(model.experts, local, model.top_k, use.n, padded(use.k), "relu2", (block,))


def padded(inner: int) -> int:
    """I of experts without a gate as it reaches the kernels; SGLang has them with ModelOpt alone."""
    return -(-inner // _PADDING) * _PADDING


def _local(experts: int, ep: int) -> int:
    if experts % ep:
        raise ConfigError(bad_value("--ep", ep, f"it must divide the {experts} experts of a layer"))
    return experts // ep


def _distinct(shapes: Iterable[ExpertShape]) -> list[ExpertShape]:
    return list({shape.key: shape for shape in shapes}.values())


def read_experts(texts: Iterable[str], ep: int) -> list[ExpertShape]:
    """Read geometries such as ``256x8x2048x512`` (experts x top_k x H x I), ``…:relu2`` for experts without a gate.

    I is what tensor parallelism leaves; without a gate it is measured as SGLang pads it, to a multiple of 128.

    Raises:
        ConfigError: not of this form, or no geometry that kernels take.
    """
    found = []
    for text in texts:
        match = re.fullmatch(rf"(\d{{1,5}})x(\d{{1,3}})x(\d{{1,6}})x(\d{{1,6}})(?::({'|'.join(ACTIVATIONS)}))?", text)
        experts, top_k, hidden, inner = (int(match[i]) for i in range(1, 5)) if match else (0, 0, 0, 0)
        if match is None or not 0 < top_k <= experts or not hidden or not inner or hidden % 16 or inner % 16:
            remedy = "write experts x top_k x H x I, for example 256x8x2048x512, with H and I multiples of 16"
            raise ConfigError(bad_value("--experts", text, remedy))
        activation: Activation = "relu2" if match[5] == "relu2" else "silu"
        if activation == "relu2":
            inner = padded(inner)
        found.append(ExpertShape(experts, _local(experts, ep), top_k, hidden, inner, activation))
    return _distinct(found)
