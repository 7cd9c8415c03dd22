"""What a scheduler process writes down: for each value, what SGLang's own start made of it, and every seam's state.

The value on the command line goes the whole way by itself. For each further value the process forks, and the
fork changes SGLang's arguments and resolves again, so that a value costs milliseconds and not a server's start.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ["SM120_MATRIX_EVIDENCE"])
CARD = (12, 0)
RUNNERS = ("auto", "flashinfer_cutlass", "flashinfer_trtllm", "flashinfer_trtllm_routed", "flashinfer_cutedsl")
VERSIONS = {
    "flashinfer": "0.7.2",
    "cuda": "13.0",
    "cuda_toolkit": "13.0",
    "cudnn": "9.15.0",
    "cutlass_dsl": "4.8.0",
    "kernels_cuda": "13.0",
    "tvm_ffi": "0.1.12",
}


def arm() -> None:
    # The module that is importing us is complete when this thread's import stack has unwound.
    from sglang_sm120.host import installer

    original = installer.require_live

    def require_live() -> None:
        original()
        installer.require_live = original
        _testify()

    installer.require_live = require_live


def _testify() -> None:
    """Called in the scheduler, after its seams were found live and before weights load."""
    from sglang_sm120.backends import BACKENDS

    own = _read_value()
    _write(own, _facts_of_this_process())
    for value in ["auto", *BACKENDS]:
        if value != own and os.fork() == 0:
            _write(value, _resolve_again(value))
            os._exit(0)
    for name, look in (("moe", _make_expert_layers), ("experts", _serve_experts)):
        if os.fork() == 0:
            _write(name, look())
            os._exit(0)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
    (FOLDER / "complete").write_text("")
    os._exit(0)


def _facts_of_this_process() -> dict[str, Any]:
    from sglang_sm120.host import installer
    from sglang_sm120.host.state import STATE

    fp4_utils = sys.modules["sglang.srt.layers.quantization.fp4_utils"]
    chosen = fp4_utils.get_fp4_gemm_runner_backend()
    return {
        "pid": os.getpid(),
        "process": multiprocessing.current_process().name,
        "parent": os.getppid(),
        "threads": threading.active_count(),
        "resolved": chosen.value,
        "is_member": type(chosen) is fp4_utils.Fp4GemmRunnerBackend and chosen in list(type(chosen)),
        "flashinfer_name": chosen.get_flashinfer_backend(),
        "refusal": str(STATE.refusal) if STATE.refusal is not None else None,
        "states": {s.name: s.state for s in installer.verify()},
        **({"patched": _patched()} if "SM120_PATCHED_HUNKS" in os.environ else {}),
    }


def _patched() -> list[dict[str, Any]]:
    from tests.patches import evidence

    return evidence.found()


def _resolve_again(value: str) -> dict[str, Any]:
    """Resolve ``value`` as SGLang would on an RTX card, through SGLang's own function."""
    from sglang_sm120.host import resolution

    card = _card()
    resolution.collect_facts = lambda gpu=None: card  # type: ignore[assignment]
    # The card is not here, so its kernels cannot be loaded. What they compute is tested elsewhere.
    resolution._start = lambda decision, device: None
    resolution.self_test.run = lambda backend, device: None
    scheduler = sys.modules["sglang.srt.managers.scheduler"]
    _set_value(value)
    arguments = [_ARGUMENTS] if _takes_arguments(scheduler) else []
    try:
        scheduler.initialize_fp4_gemm_config(*arguments)
    except ValueError as error:  # a value of the table that this release's enum does not have: cutlass from 0.5.16 on
        return {"unknown to SGLang": str(error), "refusal": None, "states": {}}
    return _facts_of_this_process()


def _card() -> Any:
    from sglang_sm120.backends.record import HostFacts
    from sglang_sm120.host import resolution

    versions = {**resolution.collect_facts().versions, **VERSIONS}
    return HostFacts(CARD, versions, device_name="an RTX card (passed in)")


def _make_expert_layers() -> dict[str, Any]:
    """For each MoE runner and each expert class of SGLang: our refusal, or what SGLang itself made of it."""
    from sglang_sm120.errors import UnsupportedError
    from sglang_sm120.host.state import STATE

    STATE.facts = _card()
    scheduler = sys.modules["sglang.srt.managers.scheduler"]
    makers = _expert_classes()
    found: dict[str, Any] = {}
    for value in RUNNERS:
        _set_value(value, "moe_runner_backend")
        try:
            scheduler.initialize_moe_config(*([_ARGUMENTS] if _takes_arguments(scheduler) else []))
        except ValueError as error:  # this release has no such runner
            found[value] = {"unknown to SGLang": str(error)}
            continue
        found[value] = {}
        for name, make in makers.items():
            try:
                make()
                found[value][name] = "made"
            except UnsupportedError as refused:
                found[value][name] = f"refused: {refused}"
            except Exception as error:  # noqa: BLE001 - a GPU is missing: SGLang's own constructor was reached
                found[value][name] = f"SGLang: {error}"
    return {"runners": found}


def _serve_experts() -> dict[str, Any]:
    """Whether layers of this release, served by a runner of ours, give the oracle's bits; by kind of experts."""
    sys.path.insert(0, str(Path(__file__).parents[3]))
    import torch

    from tests.host.expert_layers import KINDS, ExpertLayer, Shape, serve_with

    torch.set_num_threads(1)  # a fork has no other threads
    found: dict[str, Any] = {}
    for kind in KINDS:
        serve_with("torch_reference", kind)
        found[kind] = []
        for shape in (Shape(), Shape(ranks=3, rank=1), Shape(gated=False, inner=48)):
            if shape.gated or kind == "ModelOpt":
                layer = ExpertLayer(kind, shape)
                batch = layer.batch(5)
                found[kind].append(torch.equal(layer.run(*batch), layer.expected(*batch)))
    return {"equal": found, "a part of them": _refusal_of_a_part()}


def _refusal_of_a_part() -> str:
    """What we say on an RTX card where a rank holds a part of compressed-tensors experts, under SGLang's ``auto``."""
    from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_w4a4_nvfp4_moe as ct

    from sglang_sm120.errors import UnsupportedError
    from sglang_sm120.host.moe_layers import as_on_blackwell
    from tests.host.expert_layers import ExpertLayer, Shape, serve_with

    serve_with(None, "compressed-tensors", facts=_card())
    try:
        with as_on_blackwell(ct):
            ExpertLayer("compressed-tensors", Shape(ranks=3, rank=1))
    except UnsupportedError as refusal:
        return str(refusal)
    return ""


def _expert_classes() -> dict[str, Any]:
    from sglang.srt.layers.quantization import modelopt_quant, unquant
    from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_w4a4_nvfp4_moe as ct

    return {
        "ModelOpt": lambda: modelopt_quant.ModelOptNvFp4FusedMoEMethod(None),
        "compressed-tensors": ct.CompressedTensorsW4A4Nvfp4MoE,
        "unquantized": unquant.UnquantizedFusedMoEMethod,
    }


def _takes_arguments(scheduler: Any) -> bool:
    import inspect

    return bool(inspect.signature(inspect.unwrap(scheduler.initialize_fp4_gemm_config)).parameters)


_ARGUMENTS: Any = None


def _read_value() -> str:
    """The value as SGLang itself holds it; also finds the object that holds it."""
    global _ARGUMENTS
    frame = sys._getframe()
    while frame is not None:
        candidate = frame.f_locals.get("server_args")
        if candidate is not None and hasattr(candidate, "fp4_gemm_runner_backend"):
            _ARGUMENTS = candidate
            break
        frame = frame.f_back  # type: ignore[assignment]
    value: str = _ARGUMENTS.fp4_gemm_runner_backend
    return value


def _set_value(value: str, field: str = "fp4_gemm_runner_backend") -> None:
    _force(_ARGUMENTS, field, value)
    try:
        from sglang.srt.runtime_context import get_exec
    except ImportError:
        return  # 0.5.18 and older read the arguments themselves
    _force(get_exec().kernel if field.startswith("fp4") else get_exec().moe, field, value)


def _force(holder: Any, field: str, value: str) -> None:
    """Set the field whether ``holder`` is a dataclass, frozen or not, or (0.5.20 and later) a msgspec struct."""
    try:
        object.__setattr__(holder, field, value)
    except TypeError:
        import msgspec

        msgspec.structs.force_setattr(holder, field, value)


def _write(value: str, facts: dict[str, Any]) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    scratch = FOLDER / f".{value}.{os.getpid()}"
    scratch.write_text(json.dumps({"value": value, **facts}, indent=1))
    scratch.replace(FOLDER / f"{value}.json")
