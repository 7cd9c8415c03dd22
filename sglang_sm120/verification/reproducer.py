"""The files of one wrong call: what the backend was given and what it returned, to be run again alone.

Two files of one name: ``.json`` says what the call was, ``.safetensors`` holds the tensors. Reading executes nothing,
follows no name that stands in them, and refuses whatever :func:`write` does not write. The text in them is redacted;
the tensors are one layer's weight, of experts those that have a token, and the activations of one batch.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from sglang_sm120 import env, kept, records
from sglang_sm120.errors import FormatError, RecordError
from sglang_sm120.formats import BLOCK_SIZE
from sglang_sm120.layout import padded_scale_shape
from sglang_sm120.models.headers import read_header
from sglang_sm120.records import Fields, Identity
from sglang_sm120.redact import redacted
from sglang_sm120.verification import expert_file
from sglang_sm120.verification.call import OPERANDS, Call, Operation
from sglang_sm120.verification.expert_call import ExpertCall

SCHEMA = 1
KIND = "wrong call"
#: In the cache folder.
FOLDER = "verify"
#: A language-model head (N = 256,000, K = 16,384) with 4096 rows of it has 3 GB.
MAX_BYTES = 4 * 2**30
_WHICH = "name the file that the error of a server names"
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
#: Tensors beside the operands: what the backend returned.
_RESULTS: Mapping[Operation | Literal["moe"], tuple[str, ...]] = {
    "linear": ("result",),
    "gemm": ("result",),
    "quantize": ("result_codes", "result_scales"),
    "moe": ("result",),
}


@dataclass(frozen=True)
class Reproducer:
    """One wrong call.

    Attributes:
        call: what was asked, on the CPU.
        results: what came back: a product [M, N], tokens [M, H], or packed codes and block scales.
        backend: a value of the table, a runner of experts, or ``quantizer``.
        layer: place in the model, or class and size.
        wrong: the judgement in words.
        identity: card and versions of the server.
    """

    call: Call | ExpertCall
    results: tuple[torch.Tensor, ...]
    backend: str
    layer: str
    wrong: str
    identity: Identity


def write(case: Reproducer) -> Path:
    """Write a case to the cache folder, readable by the user only, and return the ``.json`` file.

    Raises:
        ConfigError: the cache folder is not safe or cannot be made.
        RecordError: the files cannot be written, or would be too large to be read.
    """
    from safetensors.torch import save

    folder = env.cache_dir(FOLDER)
    named = {**case.call.operands, **dict(zip(_RESULTS[case.call.operation], case.results, strict=True))}
    size = sum(tensor.nbytes for tensor in named.values())
    if size >= MAX_BYTES:
        raise RecordError(f"its operands have {size} bytes; files of more than {MAX_BYTES} are not read.")
    # A result may share its memory with an operand, and views may have gaps.
    data = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in named.items()})
    digest = hashlib.sha256(data).hexdigest()
    path = folder / f"{kept.now().replace(':', '')}-{case.call.operation}-{digest[:8]}.json"
    _write_bytes(path.with_suffix(".safetensors"), data)
    description: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": KIND,
        "created": kept.now(),
        "operation": case.call.operation,
        "out_dtype": _name(case.call.out_dtype),
        "backend": case.backend,
        "layer": case.layer,
        "wrong": case.wrong,
        "identity": case.identity.to_json(),
        "sha256": digest,
        **(expert_file.description(case.call) if isinstance(case.call, ExpertCall) else {}),
    }
    records.write_json(path, redacted(description))
    return path


def described(path: Path) -> Fields:
    """Open the description of a case, of whichever kind; ``path`` may name the file of its tensors.

    Raises:
        RecordError: there is none, or it is not written as the user's own.
    """
    if not path.name:
        raise RecordError(f"{path} is no file: {_WHICH}.")
    try:
        return records.read_json(path.with_suffix(".json"))
    except FileNotFoundError as error:
        raise RecordError(f"{path.with_suffix('.json')} does not exist: {_WHICH}.") from error


def read(path: Path) -> Reproducer:
    """Read a case; ``path`` names either of its two files.

    Raises:
        RecordError: a file is missing, too large, writable by others, or not exactly what :func:`write` writes.
    """
    fields = described(path)
    fields.schema(SCHEMA)
    fields.text("kind", (KIND,))
    fields.text("created")
    operation: Any = fields.text("operation", tuple(_RESULTS))
    out_dtype = _DTYPES[fields.text("out_dtype", tuple(_DTYPES))]
    backend, layer, wrong = fields.text("backend"), fields.text("layer"), fields.text("wrong")
    identity = Identity.from_json(fields.object("identity"))
    tensors = _load(path.with_suffix(".safetensors"), fields.text("sha256"))
    results = tuple(tensors.pop(name) for name in _RESULTS[operation] if name in tensors)
    call: Call | ExpertCall
    if operation == "moe":
        call = expert_file.read_call(fields, out_dtype, tensors)
    else:
        call = Call(operation, tensors, out_dtype)
        _check(fields, call)
    fields.done()
    if len(results) != len(_RESULTS[operation]):
        fields.fail(f"comes with tensors other than {', '.join((*call.operands, *_RESULTS[operation]))}")
    return Reproducer(call, results, backend, layer, wrong, identity)


def _load(path: Path, digest: str) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for
            raise RecordError(f"{path.name} is no regular file.")
        if status.st_size > MAX_BYTES:
            raise RecordError(f"{path.name} has {status.st_size} bytes; more than {MAX_BYTES} are not read.")
        read_header(path)
        data = path.read_bytes()
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror or error}.") from error
    except FormatError as error:
        raise RecordError(str(error)) from error
    if hashlib.sha256(data).hexdigest() != digest:
        raise RecordError(f"{path.name} does not belong to the .json file beside it, or was changed.")
    try:
        tensors: dict[str, torch.Tensor] = load(data)
    except (SafetensorError, KeyError) as error:  # KeyError: a type that torch does not have
        raise RecordError(f"{path.name} holds tensors that cannot be read: {type(error).__name__}: {error}.") from error
    return tensors


def _check(fields: Fields, call: Call) -> None:
    """Refuse tensors that are not those of the operation, or whose shapes do not fit each other."""
    names = OPERANDS[call.operation]
    if not {*names} - {"bias"} <= {*call.operands} <= {*names}:
        fields.fail(f"comes with tensors other than {', '.join((*names, *_RESULTS[call.operation]))}")
    for name in ("x", "a", "weight"):
        if name in call.operands and call.operands[name].dim() != 2:
            fields.fail(f"comes with {name} of shape {tuple(call.operands[name].shape)}")
    m, n, k = call.m, call.n, call.k
    if m == 0 or ("weight" in names and n == 0):
        fields.fail(f"is about M={m}, N={n}, of which a server checks nothing")
    if k == 0 or k % BLOCK_SIZE:
        fields.fail(f"is about K={k}, which is no multiple of {BLOCK_SIZE}")
    blocks = k // BLOCK_SIZE
    right: dict[str, tuple[torch.dtype, list[tuple[int, ...]]]] = {
        "x": (call.out_dtype, [(m, k)]),
        "a": (torch.uint8, [(m, k // 2)]),
        "a_scale": (torch.uint8, [padded_scale_shape(m, blocks)]),
        "activation_scale": (torch.float32, [()]),
        "weight": (torch.uint8, [(n, k // 2)]),
        "weight_scale": (torch.uint8, [padded_scale_shape(n, blocks)]),
        "alpha": (torch.float32, [(), (n,)]),
        "bias": (call.out_dtype, [(n,)]),
    }
    for name, tensor in call.operands.items():
        dtype, shapes = right[name]
        if tensor.dtype != dtype or tuple(tensor.shape) not in shapes:
            fields.fail(f"comes with {name} of type {tensor.dtype} and shape {tuple(tensor.shape)}")


def _write_bytes(path: Path, data: bytes) -> None:
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise RecordError(f"{path} cannot be written: {error.strerror or error}.") from error


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
