"""A layer whose call fails names who, where and what, and leaves a file from which the call can be made again.

The layers are the real classes of SGLang 0.5.23; errors are planted in the backend below the operator.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_sm120 import env, ops
from sglang_sm120.backends import torch_reference
from sglang_sm120.errors import BackendError, UnsupportedError
from sglang_sm120.host import moe_choice
from sglang_sm120.host.moe_choice import Runners
from sglang_sm120.host.state import STATE
from sglang_sm120.probing.expert_operations import of_runner
from sglang_sm120.probing.operations import of_subject
from sglang_sm120.records import identity_of
from sglang_sm120.verification import failed_file, failed_replay, replay
from sglang_sm120.verification.failed_file import DenseFacts, ExpertFacts, FailedCall
from tests.dispatch.machines import RTX, machine
from tests.host.conftest import Serving
from tests.host.expert_layers import ExpertLayer, Shape, serve_with
from tests.host.linear_layers import Case, make_case
from tests.support.nvfp4 import fresh_generator

Tensor = torch.Tensor
CUDA_ERROR = "CUDA error: misaligned address"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(moe_choice, "RUNNERS", Runners())
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "cache"))
    return tmp_path / "cache" / failed_file.FOLDER


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], None]:
    """Lets every operation of the oracle fail; the CPU has no other backend for experts."""

    def plant(error: Exception) -> None:
        def fails(*_: object) -> Tensor:
            raise error

        for name in ("linear", "gemm", "moe"):
            monkeypatch.setattr(torch_reference, name, fails)

    return plant


def dense(serving: Serving, kind: str = "modelopt", widths: tuple[int, ...] = (32,), **more: Any) -> Case:
    serving.decide("torch_reference", facts=machine(RTX))
    return make_case(kind, 64, list(widths), fresh_generator(), **more)


def experts(shape: Shape) -> ExpertLayer:
    serve_with("torch_reference", "ModelOpt", facts=machine(RTX))
    return ExpertLayer("ModelOpt", shape)


def message(call: Callable[[], object], kind: type[Exception] = BackendError) -> str:
    with pytest.raises(kind) as seen:
        call()
    return str(seen.value)


def kept(text: str) -> FailedCall:
    """What is in the file that a message names."""
    named = re.search(r"it is made again by sglang-sm120 replay (\S+)$", text)
    assert named, text
    found = replay.read(Path(named[1]))
    assert isinstance(found, FailedCall)
    return found


@pytest.mark.parametrize(
    ("raised", "kind", "late"),
    [
        (RuntimeError(CUDA_ERROR), BackendError, True),
        (RuntimeError("launching the NVFP4 GEMM failed: cudaErrorIllegalAddress, an illegal"), BackendError, True),
        (UnsupportedError("no kernel"), UnsupportedError, False),
    ],
)
def test_the_message_names_who_where_and_what(
    raised: Exception, kind: type[Exception], late: bool, serving: Serving, failing: Callable[[Exception], None]
) -> None:
    layers = [experts(Shape()), dense(serving)]
    inputs: list[tuple[Tensor, ...]] = [layers[0].batch(4), (torch.ones(2, 64, dtype=torch.bfloat16),)]
    failing(raised)
    names = ("Module, M=4 E=6 local=6 top_k=3 H=128 I=64 silu", "Module (N=32), M=2 N=32 K=64")
    for layer, given, name in zip(layers, inputs, names, strict=True):
        text = message(lambda layer=layer, given=given: layer.run(*given), kind)  # type: ignore[misc]
        assert text.startswith(f"torch_reference failed in {name}: {type(raised).__name__}: {raised}. ")
        assert ("CUDA_LAUNCH_BLOCKING" in text) == late
        assert f"{env.VERIFY}=1 checks every call before it" in text
        found = kept(text)
        assert (found.backend, found.error, found.said) == ("torch_reference", type(raised).__name__, str(raised))
        assert found.identity == identity_of(machine(RTX))  # nobody asked for the card again


def test_no_file_is_left_for_want_of_memory(
    serving: Serving, failing: Callable[[Exception], None], folder: Path
) -> None:
    layers = [experts(Shape()), dense(serving)]
    given = [layers[0].batch(4), (torch.ones(2, 64, dtype=torch.bfloat16),)]
    failing(torch.OutOfMemoryError("CUDA out of memory"))
    for layer, batch in zip(layers, given, strict=True):
        assert (
            message(lambda layer=layer, batch=batch: layer.run(*batch), torch.OutOfMemoryError) == "CUDA out of memory"
        )  # type: ignore[misc]
    assert not folder.exists()


DENSE = {
    "one product": ({}, False, DenseFacts("linear", 3, (32,), 64, "bfloat16", one_alpha=False, bias=False)),
    "shards with input scales of their own": (
        {"kind": "compressed-tensors", "widths": (32, 48), "input_decode": [0.002, 0.004], "dtype": torch.float16},
        False,
        DenseFacts("linear", 3, (32, 48), 64, "float16", one_alpha=False, bias=True),
    ),
    "an input that was quantized before": (
        {"widths": (40,)},
        True,
        DenseFacts("gemm", 3, (40,), 64, "bfloat16", one_alpha=False, bias=True),
    ),
}


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_call_can_be_made_again(
    name: str, serving: Serving, failing: Callable[[Exception], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    options, quantized, facts = DENSE[name]
    case = dense(serving, **options)
    dtype: torch.dtype = getattr(torch, facts.dtype)
    x: Any = torch.ones(3, 64, dtype=dtype)
    if quantized:
        x = ops.nvfp4_quantize(x, case.layer.input_scale_inv, True, "torch_reference")
    bias = torch.ones(sum(facts.widths), dtype=dtype) if facts.bias else None
    with monkeypatch.context() as planted:
        for operation in ("linear", "gemm"):
            planted.setattr(torch_reference, operation, _raise)
        text = message(lambda: case.run(x, bias))
        found = kept(text)
        assert found.call == facts
        names = [step for step, _ in steps_of(text)]
        assert names[0] == f"random operands, seed {found.seed}"
        assert len(names) == 1, "operands that nobody made have no products"
        with pytest.raises(RuntimeError, match="misaligned"):
            run(text)
    assert run(text) == 3 * len(facts.widths)


EXPERTS = {
    "all of them": (Shape(), ExpertFacts(4, 6, 6, 3, 128, 64, "silu", gate_first=False, dtype="bfloat16")),
    "of the second of three ranks": (
        Shape(ranks=3, rank=1),
        ExpertFacts(4, 6, 2, 3, 128, 64, "silu", gate_first=False, dtype="bfloat16"),
    ),
    "without a gate, padded by SGLang": (
        Shape(gated=False, inner=48),
        ExpertFacts(4, 6, 6, 3, 128, 128, "relu2", gate_first=True, dtype="bfloat16"),
    ),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_a_call_of_experts_can_be_made_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, facts = EXPERTS[name]
    layer = experts(shape)
    given = layer.batch(4)
    with monkeypatch.context() as planted:
        planted.setattr(torch_reference, "moe", _raise)
        text = message(lambda: layer.run(*given))
        assert kept(text).call == facts
        with pytest.raises(RuntimeError, match="misaligned"):
            run(text)
    assert run(text) == 3


def _raise(*_: object) -> Tensor:
    raise RuntimeError(CUDA_ERROR)


def steps_of(text: str) -> list[Any]:
    """What the child of a replay would do, as far as it is known before it begins."""
    return list(_steps(text))


def run(text: str) -> int:
    """Do what the child does, and return how many calls were right."""
    return len([step() for _, step in _steps(text)]) - 1


def _steps(text: str) -> Any:
    path = text.rpartition(" ")[2]
    if isinstance(kept(text).call, ExpertFacts):
        return failed_replay.expert_steps(of_runner("torch_reference"), {"path": path}, CPU)
    return failed_replay.steps(of_subject("torch_reference"), {"path": path}, CPU)


def test_nothing_in_the_file_names_the_machine(
    serving: Serving, failing: Callable[[Exception], None], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-box-7")
    monkeypatch.setenv("USER", "ann")
    case = dense(serving)
    case.layer.prefix = "/home/ann/models/x"
    long = "x" * 285  # a name behind it is cut in two where a line ends
    failing(RuntimeError(f"no\n/home/ann/kernel.so on gpu-box-7, HF_TOKEN=hf_abcdefghij {long} gpu-box-7"))
    message(lambda: case.run(torch.ones(2, 64, dtype=torch.bfloat16)))
    (path,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)
    for secret in ("gpu-box", "ann", "/home", "hf_abc", str(folder.parent)):
        assert secret not in path.name + path.read_text()
    told = json.loads(path.read_text())
    assert told["layer"] == "<path>"
    assert told["said"].startswith("no <path> on <host>, HF_TOKEN=<secret> xxx")


def test_one_error_leaves_one_file_and_many_errors_not_too_many(
    serving: Serving, failing: Callable[[Exception], None], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(failed_file, "MOST_FILES", 2)
    case = dense(serving)
    failing(RuntimeError(CUDA_ERROR))
    texts = [message(lambda m=m: case.run(torch.ones(m, 64, dtype=torch.bfloat16))) for m in (1, 1, 2, 1, 3)]  # type: ignore[misc]
    assert len(list(folder.iterdir())) == 2
    assert texts[0] == texts[1] == texts[3]
    assert kept(texts[2]).call.m == 2
    assert texts[4].endswith(
        "The call could not be kept: " + f"{folder} has 2 files already; remove those that nobody needs."
    )


def spoil_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.parent.write_text("")


def spoil_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sglang_sm120.records.os.replace", full)


def spoil_writer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody thought of it."""
    monkeypatch.setattr(failed_file, "one_line", lambda text: text.no_such_method())


@pytest.mark.parametrize(
    ("spoil", "why"),
    [(spoil_folder, "File exists"), (spoil_disk, "No space left on device"), (spoil_writer, "no_such_method")],
)
def test_what_keeps_the_file_from_being_written_takes_the_place_of_no_error(
    spoil: Callable[..., None], why: str, serving: Serving, failing: Callable[[Exception], None], folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    case = dense(serving)
    failing(RuntimeError(CUDA_ERROR))
    spoil(folder, monkeypatch)
    text = message(lambda: case.run(torch.ones(2, 64, dtype=torch.bfloat16)))
    assert text.startswith(f"torch_reference failed in Module (N=32), M=2 N=32 K=64: RuntimeError: {CUDA_ERROR}. ")
    assert re.search(rf"The call could not be kept: .*{why}.*\.$", text)


def test_what_cannot_be_made_again_is_not_kept(
    serving: Serving, failing: Callable[[Exception], None], folder: Path
) -> None:
    case = dense(serving, "modelopt, weight-only")
    failing(RuntimeError(CUDA_ERROR))
    text = message(lambda: case.run(torch.ones(2, 64, dtype=torch.bfloat16)))
    assert "could not be kept" in text
    assert "operation='weight-only', expected is one of linear, gemm, moe" in text
    STATE.facts = None
    assert "The call is not kept: nothing was decided" in message(
        lambda: case.run(torch.ones(2, 64, dtype=torch.bfloat16))
    )
    assert not folder.exists()
