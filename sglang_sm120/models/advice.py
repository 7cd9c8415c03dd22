"""The launch command for a model on SM12x cards: every flag with its reason and source, and what is left out and why.

What a kernel can run is read from the capability tables of ``backends/``; what stands here is about the model and
about SGLang's other flags. Nothing was run on an SM12x GPU: "ran" below means that somebody reported it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from packaging.version import Version

from sglang_sm120.backends.moe_record import Quantization as ExpertKind
from sglang_sm120.backends.moe_table import MOE_RUNNERS
from sglang_sm120.backends.moe_verdict import recommend_moe_runner
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.backends.verdict import automatic_choice
from sglang_sm120.cards import Card
from sglang_sm120.errors import ConfigError, UnsupportedError, bad_value
from sglang_sm120.models import budget
from sglang_sm120.models.architecture import Model
from sglang_sm120.models.budget import Setup
from sglang_sm120.models.explain import DRAFT_STEPS, VERIFIED_TOKENS
from sglang_sm120.models.quantization import FP4_FORMATS, Format, Quantization

SCHEMA = 1
#: Stands for what is not installed: the newest release that this package was tested with, and what it asks for.
ASSUMED: Mapping[str, str] = {
    "sglang": "0.5.23",
    "flashinfer": "0.7.2",
    "torch": "2.14.1",
    "cuda": "13.0",
    "cuda_toolkit": "13.0",
    "cudnn": "9.20.0",
    "cutlass_dsl": "4.8.0",
}
_RAN = "local-inference-lab/rtx6kpro models/qwen35-397b.md: ran on 8x RTX PRO 6000"
#: Weights may take this share of the memory that SGLang is given; the rest is the cache of keys and values.
_WEIGHTS_AT_MOST = 0.95
_GIB = 1 << 30


@dataclass(frozen=True)
class Flag:
    """One flag of the command (or a variable of its environment), why, and where that comes from."""

    name: str
    value: str
    reason: str
    source: str


@dataclass(frozen=True)
class LeftOut:
    """A flag that somebody may expect, and why it is not there."""

    name: str
    reason: str
    source: str


@dataclass
class Advice:
    """What to start, and what to know. ``assumed`` names packages that are not installed here."""

    model: str
    card: Card
    tp: int
    release: str
    assumed: tuple[str, ...] = ()
    flags: list[Flag] = field(default_factory=list)
    environment: list[Flag] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> list[str]:
        """The arguments after ``python -m sglang.launch_server``."""
        return [word for flag in self.flags for word in (flag.name, flag.value)]

    def as_data(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "card": self.card.key,
            "tp": self.tp,
            "sglang": self.release,
            "assumed": list(self.assumed),
            "environment": [vars(flag) for flag in self.environment],
            "command": ["python", "-m", "sglang.launch_server", *self.arguments],
            "flags": [vars(flag) for flag in self.flags],
            "left_out": [vars(entry) for entry in self.left_out],
            "needs": self.needs,
        }


def planned_facts(card: Card, installed: Mapping[str, str]) -> tuple[HostFacts, tuple[str, ...]]:
    """Facts about ``card`` with the packages of this machine; what is missing here is assumed, and named."""
    # A build of torch for the CPU has no CUDA version, and FlashInfer is not on such a machine either.
    missing = tuple(key for key in ASSUMED if key not in installed)
    versions = {**ASSUMED, **installed}
    return HostFacts(capability=card.capability, versions=versions, device_name=card.name), missing


def advise(
    path: str,
    model: Model,
    quantization: Quantization,
    card: Card,
    facts: HostFacts,
    *,
    tp: int,
    tensors: frozenset[str] | None = None,
) -> Advice:
    """Recommend a launch command.

    Args:
        path: what goes after ``--model-path``.
        facts: capability and versions to plan for, see :func:`planned_facts`.
        tp: ranks; every one gets a card.
        tensors: names of the checkpoint's tensors where it is here; some exports announce prediction weights in their
            configuration and leave them out.

    Raises:
        ConfigError: the ranks cannot share the model, or it does not fit into their memory.
        UnsupportedError: the card is no SM12x, or nothing serves the experts there.
    """
    if not card.is_sm12x:
        raise UnsupportedError(
            f"serve-args is about SM12x cards; {card.name} has capability {card.capability[0]}.{card.capability[1]}, "
            "where SGLang's own defaults apply."
        )
    advice = Advice(path, card, tp, facts.versions["sglang"])
    advice.flags += [
        Flag("--model-path", path, "the model", "you"),
        Flag("--tp-size", str(tp), f"{tp} card(s) share every layer", "you"),
    ]
    uses = budget.step(model, quantization, Setup(tp=tp))
    dense, experts = budget.fp4_parts(uses)
    _add_quantization(advice, quantization)
    weight_only = all(
        use.format == "nvfp4_w4a16" for use in uses if use.format in FP4_FORMATS and not use.gemm.is_expert
    )
    _add_dense(advice, facts, dense=dense, experts=experts, weight_only=weight_only)
    if model.experts:
        _add_runner(advice, facts, _expert_kind(uses, quantization))
    _add_draft(advice, facts, model, quantization, tensors)
    _add_attention(advice, model, quantization)
    _add_memory(advice, model, quantization)
    return advice


def largest_tp(model: Model, quantization: Quantization, gpus: int) -> int:
    """Return the most ranks, at most ``gpus``, that can share every layer of the model.

    Raises:
        ConfigError: ``gpus`` is less than 1, or a fused projection is stored in several formats.
    """
    layers = (*model.layers, *(model.draft.layers if model.draft is not None and model.draft.served else ()))
    stored = {(gemm, budget.format_of(gemm, layer, quantization)) for layer in layers for gemm in layer.gemms}
    stored.add((model.head, "bf16" if model.tied_head else budget.format_of(model.head, None, quantization)))
    for tp in range(gpus, 0, -1):
        try:
            for gemm, layout in stored:
                budget.on_rank(gemm, layout, tp)
        except ConfigError:
            continue
        return tp
    raise ConfigError(bad_value("--gpus", gpus, "it must be at least 1"))


def _add_quantization(advice: Advice, quantization: Quantization) -> None:
    if quantization.method is None:
        return
    release = Version(advice.release)
    if quantization.method == "modelopt_mixed" and release < Version("0.5.10"):
        raise UnsupportedError(
            f"SGLang {advice.release} cannot load mixed ModelOpt checkpoints; it can from 0.5.10 on."
        )
    advice.flags.append(
        Flag(
            "--quantization",
            quantization.method,
            "the checkpoint's own format; named, it is known before SGLang chooses the MoE runner",
            "sglang 0.5.23 srt/arg_groups/overrides.py (_moe_runner_backend_quant_constraints)",
        )
    )


def _add_dense(advice: Advice, facts: HostFacts, *, dense: bool, experts: bool, weight_only: bool) -> None:
    source = "quantization configuration of the checkpoint"
    if not dense:
        only = "only the routed experts are FP4" if experts else "no layer is FP4"
        reason = f"no layer to serve: {only}, so every value does the same, which is nothing"
        advice.left_out.append(LeftOut("--fp4-gemm-backend", reason, source))
        return
    if weight_only:
        reason = "its dense FP4 layers are weight-only, and SGLang's weight-only path serves them under all its values"
        advice.left_out.append(LeftOut("--fp4-gemm-backend", reason, "docs/checkpoints.md"))
        return
    choice = automatic_choice(facts)
    if choice is None:
        raise UnsupportedError("No backend for dense FP4 layers runs with these versions: see sglang-sm120 backends.")
    judged, reason = choice
    advice.flags.append(Flag("--fp4-gemm-backend", "auto", f"takes {judged.backend} here: {reason}", "this package"))
    advice.needs += [warning.rstrip(".") for warning in judged.warnings]


def _expert_kind(uses: tuple[budget.Use, ...], quantization: Quantization) -> ExpertKind:
    formats: set[Format] = {use.format for use in uses if use.gemm.is_expert}
    if "nvfp4_w4a16" in formats and quantization.method != "compressed-tensors":
        return "nvfp4_weight_only"
    if not formats & FP4_FORMATS:
        return "unquantized"
    known: dict[str | None, ExpertKind] = {
        "modelopt_fp4": "modelopt_fp4",
        "modelopt_mixed": "modelopt_mixed",
        "compressed-tensors": "compressed-tensors",
    }
    return known.get(quantization.method, "fp8")


def _add_runner(advice: Advice, facts: HostFacts, kind: ExpertKind) -> None:
    if kind == "unquantized":
        advice.left_out.append(
            LeftOut("--moe-runner-backend", "the experts are not FP4; SGLang's own choice serves them", "this package")
        )
        return
    found = recommend_moe_runner(facts, kind)
    if found is None:
        raise UnsupportedError(
            f"Nothing serves {kind} experts on {advice.card.name} with SGLang {advice.release} and FlashInfer "
            f"{facts.versions['flashinfer']}: take a newer SGLang, or an export whose experts are modelopt_fp4."
        )
    reason = found.reason if found.value == found.runner else f"{found.reason}; it runs {found.runner}"
    advice.flags.append(Flag("--moe-runner-backend", found.value, reason, found.source.ref))
    for fault in MOE_RUNNERS[found.runner].faults:
        if advice.card.capability in fault.capabilities and fault.severity == "refuse":
            bounds = ", ".join(f"{bound.package} {bound.specifier}" for bound in fault.when)
            advice.needs.append(f"{found.runner} is broken with {bounds} ({fault.source.ref}): {fault.remedy}")
    if kind != "nvfp4_weight_only":  # there the warning about weight-only kernels says nothing new
        advice.needs += [warning.rstrip(".") for warning in found.verdict.warnings]


def _add_draft(
    advice: Advice, facts: HostFacts, model: Model, quantization: Quantization, tensors: frozenset[str] | None
) -> None:
    name = "--speculative-algorithm"
    if model.draft is None:
        advice.left_out.append(LeftOut(name, "the checkpoint has no multi-token prediction weights", "config.json"))
        return
    if not model.draft.served:
        advice.left_out.append(LeftOut(name, model.draft.why_not, f"sglang {ASSUMED['sglang']} srt/models"))
        return
    prefix = f"{model.draft.layers[0].prefix}."
    if tensors is not None and not any(prefix in name for name in tensors):
        reason = f"the configuration announces prediction weights and no tensor is named {prefix}*"
        advice.left_out.append(LeftOut(name, reason, "the checkpoint's files"))
        return
    why = "the checkpoint has prediction weights, and several tokens then share one reading of the target's weights"
    advice.flags += [
        Flag(name, "NEXTN", why, _RAN),
        Flag("--speculative-num-steps", str(DRAFT_STEPS), "three drafts per step", _RAN),
        Flag("--speculative-eagle-topk", "1", "one chain: the state of linear attention has no branches", _RAN),
        Flag("--speculative-num-draft-tokens", str(VERIFIED_TOKENS), "the drafts and the token they start from", _RAN),
    ]
    drafts = budget.draft_step(model, quantization, Setup(tp=advice.tp))
    formats = {use.format for use in drafts if use.gemm.is_expert}
    if formats == {"bf16"}:
        advice.flags.append(_draft_runner())
    elif formats:
        found = recommend_moe_runner(facts, _expert_kind(drafts, quantization))
        if found is not None:
            why = "the draft's experts are stored as the target's"
            advice.flags.append(Flag("--speculative-moe-runner-backend", found.value, why, found.source.ref))
    if model.hybrid:
        _add_hybrid(advice)


def _draft_runner() -> Flag:
    """The runner of bf16 draft experts. The capability table has no row for them: it is about NVFP4 experts."""
    return Flag(
        "--speculative-moe-runner-backend",
        "triton",
        "the draft's experts are BF16; unset, it inherits the target's NVFP4 runner",
        "sglang#10183, sglang 0.5.23 srt/arg_groups/overrides.py (_speculative_moe_runner_default)",
    )


def _add_hybrid(advice: Advice) -> None:
    """Speculation over a recurrent state needs snapshots of it in the prefix cache."""
    release = Version(advice.release)
    # Renamed in 0.5.14; the old name went away with 0.5.20.
    name = "--mamba-radix-cache-strategy" if release >= Version("0.5.14") else "--mamba-scheduler-strategy"
    reason = "speculation with a prefix cache needs it: SGLang refuses no_buffer there"
    source = f"sglang 0.5.12 srt/server_args.py (_handle_mamba_radix_cache); {_RAN}"
    advice.flags.append(Flag(name, "extra_buffer", reason, source))
    advice.flags.append(Flag("--page-size", "64", "divides the interval of the snapshots (256)", _RAN))
    if release < Version("0.5.11"):
        reason = "extra_buffer works with this scheduler only; on by itself from 0.5.11"
        advice.environment.append(Flag("SGLANG_ENABLE_SPEC_V2", "1", reason, "sglang 0.5.10 srt/environ.py"))


def _add_attention(advice: Advice, model: Model, quantization: Quantization) -> None:
    if model.memory.latent:
        reason = "latent attention: SGLang's own choice for this card applies"
        advice.left_out.append(LeftOut("--attention-backend", reason, "sglang 0.5.23 get_default_attn_backend"))
        return
    fp8 = quantization.kv_cache_fp8
    if fp8:
        reason = "the checkpoint carries scales for it: half the bytes of keys and values"
        source = "quantization configuration of the checkpoint (kv_cache_quant_algo or kv_cache_scheme)"
        advice.flags.append(Flag("--kv-cache-dtype", "fp8_e4m3", reason, source))
    else:
        reason = "the checkpoint has no scales for an FP8 cache, and without them it costs accuracy"
        advice.left_out.append(LeftOut("--kv-cache-dtype", reason, "quantization configuration of the checkpoint"))
    if fp8 or model.hybrid:
        reason = (
            "FlashInfer's attention with an FP8 cache and CUDA graphs gave random text on this card; Triton's did not"
        )
        if not fp8:
            reason = "what hybrid models ran with on these cards"
        source = "vllm#41651 (one user of SGLang reports FlashInfer's as fine: sglang#35596)" if fp8 else _RAN
        advice.flags.append(Flag("--attention-backend", "triton", reason, source))


def _add_memory(advice: Advice, model: Model, quantization: Quantization) -> None:
    """Leave room for CUDA graphs and activations, on shared memory also for the system; check that the weights fit."""
    card = advice.card
    if card.unified_memory:
        fraction, reason = (
            0.75,
            "memory is shared with the processor, and the machine stops if the driver runs out of it",
        )
        source = "NVIDIA/dgx-spark-playbooks#97"
    elif card.memory_gb >= 80:
        fraction, reason, source = 0.85, "leaves about 14 GB for CUDA graphs, activations and the draft", _RAN
    else:
        fraction, reason = 0.8, "CUDA graphs take about 5 GB; larger values ran out of memory on a 32 GB card"
        source = "sglang#35777"
    advice.flags.append(Flag("--mem-fraction-static", f"{fraction:g}", reason, source))
    weights = budget.resident_bytes(model, quantization, Setup(tp=advice.tp))
    room = card.memory_gb * _GIB * fraction * _WEIGHTS_AT_MOST
    if weights > room:
        raise ConfigError(
            bad_value(
                "--tp",
                advice.tp,
                f"each rank would hold {weights / 1e9:.1f} GB of weights and has {room / 1e9:.1f} GB for them on "
                f"{card.name}; take more cards",
            )
        )
