"""A wrong call can be kept, read and run alone; a file that was not written so is refused with one typed error."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from sglang_sm120 import env
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.cli.main import app
from sglang_sm120.errors import ConfigError, RecordError
from sglang_sm120.records import Identity
from sglang_sm120.verification import replay, reproducer
from sglang_sm120.verification.call import Call
from sglang_sm120.verification.judge import judge
from sglang_sm120.verification.reproducer import Reproducer
from tests.probing.faulty import right_quantize
from tests.support.nvfp4 import fresh_generator
from tests.verification import calls

CPU = HostFacts(capability=None)
FAULTY = "tests.verification.calls:negated"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "cache"))
    return tmp_path / "cache" / reproducer.FOLDER


def case(call: Call, **changes: Any) -> Reproducer:
    results = call.run(calls.negated("x"))[1]
    wrong = judge(call, results, right_quantize).text
    identity = Identity("a card", "12.0", {"torch": "2.13"})
    values = {"backend": "torch_reference", "layer": "model.layers.3.mlp.down_proj", "wrong": wrong, **changes}
    return Reproducer(call, results, identity=identity, **values)


@pytest.mark.parametrize("make", [calls.linear, calls.gemm, calls.quantize])
def test_what_was_written_is_read(make: Callable[[torch.Generator], Call]) -> None:
    written = case(make(fresh_generator()))
    path = reproducer.write(written)
    for name in (path, path.with_suffix(".safetensors")):
        read = reproducer.read(name)
        assert (read.backend, read.layer, read.wrong) == (written.backend, written.layer, written.wrong)
        assert read.identity == written.identity
        assert read.call.out_dtype == torch.bfloat16
        assert read.call.operands.keys() == written.call.operands.keys()
        for key, tensor in written.call.operands.items():
            assert torch.equal(read.call.operands[key], tensor)
        assert all(torch.equal(a, b) for a, b in zip(read.results, written.results, strict=True))


def test_views_of_larger_tensors_are_kept_alone() -> None:
    """A server hands over slices of fused weights and columns of a result."""
    call = calls.gemm(fresh_generator(), n=64)
    wide = torch.zeros(64, 80, dtype=torch.uint8)
    wide[:, :48] = call.operands["weight"]
    sliced = Call("gemm", {**call.operands, "weight": wide[:, :48]}, call.out_dtype)
    path = reproducer.write(replace(case(call), call=sliced))
    assert path.with_suffix(".safetensors").stat().st_size < 64 * 48 + 20_000
    assert torch.equal(reproducer.read(path).call.operands["weight"], call.operands["weight"])


def test_nobody_else_can_read_it_and_nothing_names_the_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-box-7")
    monkeypatch.setenv("USER", "ann")
    path = reproducer.write(
        case(calls.linear(fresh_generator()), layer="/home/ann/models/x on gpu-box-7", wrong="HF_TOKEN=hf_abcdefghij")
    )
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = sorted(folder.iterdir())
    assert [file.suffix for file in files] == [".json", ".safetensors"]
    for file in files:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        for secret in (b"gpu-box-7", b"ann", b"/home", b"hf_abc", str(folder.parent).encode()):
            assert secret not in file.name.encode()
            assert secret not in file.read_bytes()[:2000]
    assert reproducer.read(path).layer == "<path> on <host>"


def _described(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value))

    return spoil


def _tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Change the tensors and let the description vouch for them."""

    def spoil(path: Path) -> None:
        file = path.with_suffix(".safetensors")
        tensors = load_file(file)
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        _described(lambda value: value.update(sha256=digest))(path)

    return spoil


def _cut(path: Path) -> None:
    file = path.with_suffix(".safetensors")
    file.write_bytes(file.read_bytes()[:-1])


def _flip(path: Path) -> None:
    file = path.with_suffix(".safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def _pipe(path: Path) -> None:
    path.with_suffix(".safetensors").unlink()
    os.mkfifo(path.with_suffix(".safetensors"))


def _typed(dtype: str) -> Callable[[Path], None]:
    """One tensor of a type that the format knows."""

    def spoil(path: Path) -> None:
        header = json.dumps({"x": {"dtype": dtype, "shape": [2], "data_offsets": [0, 1]}}).encode()
        data = len(header).to_bytes(8, "little") + header + bytes(1)
        path.with_suffix(".safetensors").write_bytes(data)
        _described(lambda value: value.update(sha256=hashlib.sha256(data).hexdigest()))(path)

    return spoil


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no JSON": (lambda path: path.write_text("{"), "no strict JSON"),
    "a list": (lambda path: path.write_text("[]"), "no JSON object"),
    "another kind of file": (_described(lambda v: v.update(kind="probe record")), "kind='probe record'"),
    "a newer format": (_described(lambda v: v.update(schema=2)), "format version 2"),
    "an unknown field": (_described(lambda v: v.update(path="/etc/passwd")), "unknown fields: path"),
    "an unknown operation": (_described(lambda v: v.update(operation="exec")), "operation='exec'"),
    "a field missing": (_described(lambda v: v.pop("backend")), "no field backend"),
    "an odd type": (_described(lambda v: v.update(out_dtype="float64")), "out_dtype='float64'"),
    "cut tensors": (_cut, "is no sound safetensors file"),
    "changed tensors": (_flip, "was changed"),
    "no tensors": (lambda path: path.with_suffix(".safetensors").unlink(), "cannot be read"),
    "a tensor too many": (_tensors(lambda t: t.update(more=torch.ones(1))), "tensors other than"),
    "a tensor too few": (_tensors(lambda t: t.pop("alpha")), "tensors other than"),
    "no result": (_tensors(lambda t: t.pop("result")), "tensors other than"),
    "another K": (_tensors(lambda t: t.update(weight=t["weight"][:, :-1])), "weight of type"),
    "an odd K": (_tensors(lambda t: t.update(x=t["x"][:, :-1])), "no multiple of 16"),
    "scales too short": (_tensors(lambda t: t.update(weight_scale=t["weight_scale"][:1])), "weight_scale of type"),
    "a wrong type": (_tensors(lambda t: t.update(alpha=t["alpha"].double())), "alpha of type"),
    "a pipe": (_pipe, "is no regular file"),
    "a type that torch has not": (_typed("F4"), "cannot be read: KeyError"),
    "no rows": (_tensors(lambda t: t.update(x=t["x"][:0])), "about M=0"),
    "a flat weight": (_tensors(lambda t: t.update(weight=t["weight"].flatten())), "weight of shape"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_file_is_refused_with_one_error(what: str) -> None:
    spoil, text = BAD[what]
    path = reproducer.write(case(calls.linear(fresh_generator())))
    spoil(path)
    with pytest.raises(RecordError, match=text):
        reproducer.read(path)
    result = CliRunner().invoke(app, ["replay", str(path)])
    assert isinstance(result.exception, RecordError)


def test_a_file_that_is_too_large_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    path = reproducer.write(case(calls.linear(fresh_generator())))
    monkeypatch.setattr(reproducer, "MAX_BYTES", 1000)
    with pytest.raises(RecordError, match="more than 1000 are not read"):
        reproducer.read(path)


def test_a_file_that_others_may_write_is_not_trusted() -> None:
    path = reproducer.write(case(calls.linear(fresh_generator())))
    path.chmod(0o666)
    with pytest.raises(RecordError, match="chmod go-w"):
        reproducer.read(path)


@pytest.mark.parametrize("path", [".", "/"])
def test_a_folder_is_no_case(path: str) -> None:
    with pytest.raises(RecordError, match="is no file: name the file that the error of a server names"):
        reproducer.read(Path(path))


def test_a_file_that_is_not_there_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="does not exist: name the file that the error of a server"):
        reproducer.read(tmp_path / "none.json")


def test_a_full_disk_is_an_error_of_ours(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RecordError, match="No space left"):
        reproducer.write(case(calls.linear(fresh_generator())))
    assert list(folder.iterdir()) == []


def test_a_replay_tells_the_faulty_backend_from_a_right_one() -> None:
    """In child processes, as the command runs it: the fault is planted by the factory that the child calls."""
    written = case(calls.linear(fresh_generator()))
    path = reproducer.write(written)
    faulty = replay.run(path, None, CPU, 300, factory=FAULTY)
    assert faulty.status == "wrong"
    assert written.wrong.partition(";")[0] in faulty.reason
    assert "call 1: " in faulty.reason
    result = CliRunner().invoke(app, ["replay", str(path.with_suffix(".safetensors")), "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["outcome"]["status"] == "ok"
    assert report["outcome"]["reason"].startswith("max error")
    assert report["call"]["wrong"] == written.wrong
    assert any(text.startswith("card a card") for text in report["differences"])


def test_what_only_a_server_can_call_is_refused_by_name() -> None:
    path = reproducer.write(case(calls.gemm(fresh_generator()), backend="try_qwen3x_nvfp4_gemm"))
    with pytest.raises(ConfigError, match="--backend='try_qwen3x_nvfp4_gemm'.*torch_reference"):
        replay.run(path, None, CPU, 300)
    assert replay.run(path, "flashinfer_cutlass", CPU, 300).status == "unsupported"


@pytest.mark.parametrize("make", [calls.linear, calls.gemm])
def test_a_backend_with_one_alpha_is_called_as_a_server_would(make: Callable[..., Call]) -> None:
    """FlashInfer's: one alpha, the bias added by SGLang afterwards, the quantizer a call of its own."""
    foreign = calls.negated("x")
    one = type(foreign)(quantize=foreign.quantize, gemm=calls.OPERATIONS.gemm)
    call = make(fresh_generator(), scalar=True)
    made, results = call.run(one)
    assert "bias" not in made.operands
    assert judge(made, results).wrong == ""
    steps = [name for name, _ in replay.steps(one, {"path": str(reproducer.write(case(call)))}, torch.device("cpu"))]
    assert any(name.startswith("quantize") for name in steps) == (call.operation == "linear")
    differing = make(fresh_generator())
    with pytest.raises(Exception, match="takes one alpha"):
        differing.run(one)
