"""What one decode step of a model reads and launches on each rank, and the time below which it cannot fall.

The model of a step: every weight that is needed is read from DRAM once, with the bandwidth of the data sheet, and
everything else is free. A real step takes longer; nothing here is a measurement.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sglang_sm120.errors import ConfigError, bad_value
from sglang_sm120.models.architecture import Model
from sglang_sm120.models.gemms import Gemm, padded_vocabulary, shard
from sglang_sm120.models.layer import Layer
from sglang_sm120.models.quantization import BYTES_PER_WEIGHT, FP4_FORMATS, Format, Quantization

#: Layouts whose activations are quantized by a kernel of their own before the GEMM.
_QUANTIZES_INPUT: frozenset[Format] = frozenset({"nvfp4", "fp8", "mxfp8", "int8"})
#: Weights along K that share a block scale.
_FP4_BLOCK = 16


@dataclass(frozen=True)
class Setup:
    """How the model is served.

    Attributes:
        tp, ep: ranks, and groups of them that share out whole experts.
        batch: tokens of a step: sequences, or rows of a verification.
        context: tokens that every sequence has behind it.
        kv_bytes: per element of keys and values.
    """

    tp: int = 1
    ep: int = 1
    batch: int = 1
    context: int = 4096
    kv_bytes: int = 2

    def __post_init__(self) -> None:
        for name, smallest in (("tp", 1), ("ep", 1), ("batch", 1), ("context", 0)):
            value = getattr(self, name)
            if value < smallest:
                raise ConfigError(bad_value(f"--{name}", value, f"it must be at least {smallest}"))
        if self.tp % self.ep:
            raise ConfigError(bad_value("--ep", self.ep, f"it must divide --tp {self.tp}"))


@dataclass(frozen=True)
class Use:
    """All GEMMs of one shape and format in a step, on one rank.

    Attributes:
        n, k: on the rank; of one expert for routed experts.
        count: layers that have it.
        per_layer: weight matrices that one layer reads: 1, or the experts that the step's tokens take (expected value).
        launches: kernels of all layers together, quantizers of the input included.
    """

    gemm: Gemm
    format: Format
    n: int
    k: int
    count: int
    per_layer: float

    @property
    def bytes(self) -> float:
        return self.n * self.k * BYTES_PER_WEIGHT[self.format] * self.count * self.per_layer

    @property
    def launches(self) -> int:
        # One grouped GEMM serves all experts of a layer.
        return self.count * (2 if self.format in _QUANTIZES_INPUT else 1)


def expected_experts(experts: int, top_k: int, tokens: int) -> float:
    """Distinct experts that ``tokens`` tokens take, if each takes ``top_k`` at random: E (1 - (1 - k/E)^M)."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


def format_of(gemm: Gemm, layer: Layer | None, quantization: Quantization) -> Format:
    """Return the format of a GEMM of a layer (``None`` for the head).

    Raises:
        ConfigError: its fused projections have different formats, which SGLang refuses as well.
    """
    if gemm.always_bf16:
        return "bf16"
    prefix = f"{layer.prefix}." if layer is not None else ""
    found = {quantization.format_of(prefix + module.replace("*", "0")) for module in gemm.modules}
    if len(found) > 1:
        raise ConfigError(
            f"{prefix}{gemm.name} is one projection in SGLang, and the checkpoint stores its parts as "
            f"{' and '.join(sorted(found))}. Export it with one format."
        )
    return found.pop()


def on_rank(gemm: Gemm, layout: Format, tp: int, ep: int = 1) -> tuple[int, int]:
    """Return (N, K) on a rank, see :func:`~sglang_sm120.models.gemms.shard`.

    Raises:
        ConfigError: the ranks cannot share it, or one would hold a part of a block of 16 FP4 weights and their scale.
    """
    n, k = shard(gemm, tp, ep)
    if layout in FP4_FORMATS and k % _FP4_BLOCK:
        what = f"{gemm.name} would have K = {k} on a rank, no whole blocks of {_FP4_BLOCK} FP4 weights"
        instead = "take fewer ranks, or let ranks share out whole experts" if gemm.is_expert else "take fewer ranks"
        raise ConfigError(bad_value("--tp", tp, f"{what}; {instead}"))
    return n, k


def step(model: Model, quantization: Quantization, setup: Setup) -> tuple[Use, ...]:
    """List the weights that one step of the target model reads on a rank."""
    uses = _grouped(model.layers, model, quantization, setup)
    return (*uses, _head(model, quantization, setup))


def draft_step(model: Model, quantization: Quantization, setup: Setup) -> tuple[Use, ...]:
    """List the weights that one step of the prediction module reads on a rank; it shares the head."""
    if model.draft is None or not model.draft.layers:
        return ()
    uses = _grouped(model.draft.layers[: model.draft.per_step], model, quantization, setup)
    return (*uses, _head(model, quantization, setup))


def _head(model: Model, quantization: Quantization, setup: Setup) -> Use:
    head_format: Format = "bf16" if model.tied_head else format_of(model.head, None, quantization)
    return Use(model.head, head_format, *on_rank(model.head, head_format, setup.tp), 1, 1)


def _grouped(layers: Iterable[Layer], model: Model, quantization: Quantization, setup: Setup) -> tuple[Use, ...]:
    counts: dict[tuple[Gemm, Format], int] = {}
    for layer in layers:
        for gemm in layer.gemms:
            key = (gemm, format_of(gemm, layer, quantization))
            counts[key] = counts.get(key, 0) + 1
    uses = []
    for (gemm, layout), count in counts.items():
        per_layer = 1.0
        if gemm.is_expert:
            per_layer = expected_experts(model.experts, model.top_k, setup.batch) / setup.ep
        uses.append(Use(gemm, layout, *on_rank(gemm, layout, setup.tp, setup.ep), count, per_layer))
    return tuple(uses)


def kv_traffic(model: Model, setup: Setup) -> float:
    """Bytes of keys and values (or latents) that a step reads on a rank."""
    layers = sum(layer.kind in ("full", "latent") for layer in model.layers)
    return layers * model.memory.kv_traffic(setup.tp, setup.context, setup.kv_bytes) * setup.batch


def state_traffic(model: Model, setup: Setup) -> float:
    """Bytes of recurrent state that a step reads and writes on a rank."""
    return sum(layer.kind == "linear" for layer in model.layers) * model.memory.state_traffic(setup.tp) * setup.batch


def launches(model: Model, uses: Iterable[Use]) -> int:
    """Kernels of a step, at least: GEMMs, quantizers of their inputs, attention or state update, routing.

    Norms, activations, rotary embeddings and copies come on top; hosts fuse them differently.
    """
    routing = sum(any(gemm.is_expert for gemm in layer.gemms) for layer in model.layers)
    return sum(use.launches for use in uses) + sum(layer.launches for layer in model.layers) + routing


def all_reduces(model: Model, tp: int) -> int:
    """All-reduces of a step: after the embedding, and those of every layer."""
    return 0 if tp == 1 else 1 + sum(layer.all_reduces for layer in model.layers)


def resident_bytes(model: Model, quantization: Quantization, setup: Setup) -> float:
    """Bytes of weights that a rank holds: all its experts, head, embedding, and the prediction module."""
    layers = [*model.layers, *(model.draft.layers if model.draft is not None and model.draft.served else ())]
    total = sum(_held(layers, model, quantization, setup))
    embedding = padded_vocabulary(model.vocabulary, setup.tp) // setup.tp * model.hidden * BYTES_PER_WEIGHT["bf16"]
    return total + embedding + (0 if model.tied_head else _head(model, quantization, setup).bytes)


def _held(layers: Iterable[Layer], model: Model, quantization: Quantization, setup: Setup) -> Iterator[float]:
    for use in _grouped(layers, model, quantization, setup):
        copies = model.experts / setup.ep if use.gemm.is_expert else 1
        yield use.n * use.k * BYTES_PER_WEIGHT[use.format] * use.count * copies


def fp4_parts(uses: Iterable[Use]) -> tuple[bool, bool]:
    """Whether a step multiplies FP4 weights in dense layers, and in routed experts."""
    fp4 = [use for use in uses if use.format in FP4_FORMATS]
    return any(not use.gemm.is_expert for use in fp4), any(use.gemm.is_expert for use in fp4)
