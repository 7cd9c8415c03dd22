"""Machines that are not here: facts as they would be collected on them."""

from __future__ import annotations

from sglang_sm120.backends.record import Capability, HostFacts

RTX, SPARK, B200, B300, HOPPER, AMPERE = (12, 0), (12, 1), (10, 0), (10, 3), (9, 0), (8, 0)
CARDS: tuple[Capability | None, ...] = (AMPERE, HOPPER, B200, B300, RTX, SPARK, None)

#: What SGLang 0.5.23 asks for, on CUDA 13.
NEWEST = {
    "sglang": "0.5.23",
    "flashinfer": "0.7.2",
    "torch": "2.14.1",
    "cuda": "13.0",
    "cudnn": "9.20.0",
    "cutlass_dsl": "4.8.0",
    "kernels_cuda": "13.0",
    "tvm_ffi": "0.1.12",
    "driver": "580.95.05",
}

#: What goes together: FlashInfer and the CuTe DSL that its metadata asks for, by SGLang release.
PINS = {
    "0.5.9": ("0.6.3", "4.3.4"),
    "0.5.10": ("0.6.7.post2", "4.4.1"),
    "0.5.11": ("0.6.8.post1", "4.4.2"),
    "0.5.12": ("0.6.11.post1", "4.5.0"),
    "0.5.14": ("0.6.12", "4.5.2"),
    "0.5.16": ("0.6.14", "4.6.0"),
    "0.5.21": ("0.6.18", "4.6.2"),
    "0.5.22": ("0.7.1", "4.8.0"),
    "0.5.23": ("0.7.2", "4.8.0"),
}


def machine(capability: Capability | None, support: dict[str, bool] | None = None, **versions: str | None) -> HostFacts:
    """Facts of a machine with the newest versions, except for those given; ``None`` removes one."""
    installed = {key: value for key, value in {**NEWEST, **versions}.items() if value is not None}
    return HostFacts(capability, installed, support or {}, "a card that is not here")


def released(capability: Capability | None, sglang: str, cuda: str = "13.0") -> HostFacts:
    """Facts of a machine on which one SGLang release was installed with its own pins."""
    flashinfer, dsl = PINS[sglang]
    return machine(capability, sglang=sglang, flashinfer=flashinfer, cutlass_dsl=dsl, cuda=cuda)
