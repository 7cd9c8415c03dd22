"""Record types of the capability table. Pure data: importing this needs neither torch nor sglang.

One :class:`Backend` is one value of ``--fp4-gemm-backend`` or of ``--moe-runner-backend``. Everything
that the resolver, the guards, the command line, the documentation and the test skips need to know about a
value stands in its record and nowhere else; each statement carries the :class:`Source` it was taken from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Capability = tuple[int, int]
Provider = Literal["sglang", "flashinfer", "sglang_sm120"]
OutDtype = Literal["bfloat16", "float16"]

#: What a probe record calls FlashInfer's activation quantizer, beside the values of the table.
QUANTIZER = "quantizer"

#: Compute capabilities for which every record must have a row, or an :class:`Absence` that says why it has none.
CAPABILITIES: tuple[Capability, ...] = ((8, 0), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))


@dataclass(frozen=True)
class Source:
    """Where a statement comes from: an upstream thread, upstream code that was read, or a test of ours."""

    kind: Literal["issue", "code", "test"]
    ref: str  # "flashinfer#2708" | "flashinfer 0.7.2 gemm/gemm_base.py" | "tests/host/test_linear_methods.py"


@dataclass(frozen=True)
class Requirement:
    """A version bound that must hold, for example ``Requirement("cuda", ">=13.0", source)``.

    ``package`` is a key of :attr:`HostFacts.versions`: ``sglang``, ``flashinfer``, ``torch``, ``cuda`` (the
    toolkit version torch was built with), ``cuda_toolkit`` (the nvcc that FlashInfer compiles with; the same as
    ``cuda`` where that is unknown), ``kernels_cuda`` (the toolkit that our own kernels are compiled with), ``tvm_ffi``,
    ``cudnn``, ``cutlass_dsl``, ``driver``.
    """

    package: str
    specifier: str
    source: Source


@dataclass(frozen=True)
class ShapeRule:
    """Divisibility that N and K must satisfy as they reach the kernel, that is after SGLang's own padding."""

    n_multiple: int
    k_multiple: int
    source: Source


@dataclass(frozen=True)
class CapabilityRow:
    """What a backend needs on one compute capability. A capability without a row cannot run the backend."""

    capability: Capability
    source: Source
    requires: tuple[Requirement, ...] = ()
    out_dtypes: tuple[OutDtype, ...] = ("bfloat16", "float16")
    shape: ShapeRule | None = None


@dataclass(frozen=True)
class Absence:
    """Capabilities on which a backend is known not to run, and why: a deliberate hole in the table."""

    capabilities: tuple[Capability, ...]
    reason: str
    source: Source


@dataclass(frozen=True)
class Preference:
    """One step of the order in which ``auto`` looks for a backend; it counts while every bound holds."""

    value: str
    reason: str
    source: Source
    when: tuple[Requirement, ...] = ()


@dataclass(frozen=True)
class Fault:
    """A known wrong behaviour in a range of versions.

    A fault applies when the capability is listed and every bound in ``when`` holds. ``severity`` ``refuse``
    stops the start (a warning under ``SGLANG_SM120_ALLOW_UNSAFE=1``); ``warn`` is logged once.
    """

    name: str
    capabilities: tuple[Capability, ...]
    when: tuple[Requirement, ...]
    effect: str
    remedy: str
    severity: Literal["refuse", "warn"]
    source: Source


@dataclass(frozen=True)
class Backend:
    """One value of ``--fp4-gemm-backend``.

    Attributes:
        value: what the user writes.
        enum_name: member name in SGLang's ``Fp4GemmRunnerBackend``.
        provider: whose code multiplies.
        summary: one line for ``sglang-sm120 backends`` and the docs.
        flashinfer_name: the ``backend=`` string of ``flashinfer.mm_fp4``, if FlashInfer provides it.
        rows: one :class:`CapabilityRow` per compute capability that can run it.
        absent: the other capabilities of :data:`CAPABILITIES`, with the reason.
        any_device: runs on every device, CPU included (then ``rows`` documents sources only).
        faults: known wrong behaviours.
        native_since: first SGLang release whose own enum has the value; ``None`` if none has.
        exact_fused_scales: right when the shards of a fused projection have different global scales.
        quantizes_itself: one op of ours takes bf16/fp16 activations (seam A), no separate quantizer.
        serves_weight_only: it multiplies unquantized activations too (W4A16 layers).
        needs_probe: code that multiplies in a way never checked on the user's card until ``probe`` ran.
        implementation: name of the module of ours that multiplies, imported on first use; ``None`` for foreign ones.
        per_call: it chooses among the other values for each call and multiplies nothing itself, so it is neither
            probed nor timed, and never takes over a layer from another value.
    """

    value: str
    enum_name: str
    provider: Provider
    summary: str
    rows: tuple[CapabilityRow, ...]
    absent: tuple[Absence, ...] = ()
    flashinfer_name: str | None = None
    any_device: bool = False
    faults: tuple[Fault, ...] = ()
    native_since: str | None = None
    exact_fused_scales: bool = False
    quantizes_itself: bool = False
    serves_weight_only: bool = False
    needs_probe: bool = False
    implementation: str | None = None
    per_call: bool = False

    @property
    def can_be_added(self) -> bool:
        """Whether a SGLang without this value can get it from us: FlashInfer, ours, or what it chooses multiplies."""
        return self.flashinfer_name is not None or self.implementation is not None or self.per_call


@dataclass(frozen=True)
class HostFacts:
    """Everything about the machine and the installed packages that a decision may depend on.

    Passed in, never looked up by the functions that decide, so that every card can be tested without it.

    Attributes:
        capability: compute capability of the current device; ``None`` on a machine without CUDA.
        versions: installed versions by package key (see :class:`Requirement`); missing key = not installed.
        flashinfer_support: FlashInfer's own answer ``mm_fp4.is_backend_supported(name, cc)`` per backend
            name, for the names that the installed FlashInfer was asked about; empty if it was not asked.
        device_name: for messages.
        problems: why an installed package counts as missing, by package key (its import failed, say).
        probed: status that ``sglang-sm120 probe`` recorded on this card and these versions, by value, and by
            :data:`QUANTIZER`; empty if nothing valid is recorded.
        probed_experts: the same of MoE runners.
        wheel_code: whether the library of the installed sgl-kernel wheel has code for the card; ``None`` if the SGLang
            calls none of its NVFP4 operators, or the library is missing or cannot be read.
    """

    capability: Capability | None
    versions: dict[str, str] = field(default_factory=dict)
    flashinfer_support: dict[str, bool] = field(default_factory=dict)
    device_name: str = "no CUDA device"
    problems: dict[str, str] = field(default_factory=dict)
    probed: dict[str, str] = field(default_factory=dict)
    probed_experts: dict[str, str] = field(default_factory=dict)
    wheel_code: bool | None = None

    def passed_probe(self, value: str) -> bool:
        """Whether ``probe`` found the value right on this very card and these versions."""
        return self.probed.get(value) == "ok"

    @property
    def is_sm12x(self) -> bool:
        return self.capability is not None and self.capability[0] == 12


@dataclass(frozen=True)
class Verdict:
    """Can this backend run here, and if not, why and what instead."""

    backend: str
    status: Literal["ok", "refused", "unsupported"]
    reason: str
    remedy: str = ""
    source: Source | None = None
    warnings: tuple[str, ...] = ()
