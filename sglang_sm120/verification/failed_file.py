"""The file of one failed call: who was asked what, without a tensor, to be made again from random numbers.

After a CUDA error no tensor can be read from the device any more. What can be kept are facts of the host: backend,
layer, sizes, and the error. Writing them asks the device nothing; card and versions are those of the server's start.
Reading is strict, as with the files of a wrong call (``reproducer.py``). The text in them is redacted.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from sglang_sm120 import env, kept, records
from sglang_sm120.errors import RecordError
from sglang_sm120.formats import BLOCK_SIZE
from sglang_sm120.probing.children import one_line
from sglang_sm120.records import Fields, Identity
from sglang_sm120.redact import redacted
from sglang_sm120.reference import Activation
from sglang_sm120.verification.expert_call import expert_sizes
from sglang_sm120.verification.reproducer import MAX_BYTES
from sglang_sm120.verification.served import Sizes, spelled

SCHEMA = 1
KIND = "failed call"
#: In the cache folder.
FOLDER = "failed"
#: The first ones count: what fails after a CUDA error fails because of it.
MOST_FILES = 64
_DTYPES = ("bfloat16", "float16")
#: Bounds of what is read: far above any model. What a replay would allocate is bounded by :data:`MAX_BYTES`.
_MOST_ROWS, _MOST_COLUMNS, _MOST_EXPERTS, _MOST_PRODUCTS = 2**20, 2**20, 2**14, 64


@dataclass(frozen=True)
class DenseFacts:
    """The call of one dense layer.

    Attributes:
        operation: ``linear`` quantizes its input, ``gemm`` is given a quantized one; ``weight-only`` uses its input as
            it is, and no file holds it.
        m: rows of the activations.
        widths: N of each product; more than one where shards of a layer quantize the input with scales of their own.
        k: inner dimension.
        dtype: of the result, and of an input that is not quantized yet: ``bfloat16`` or ``float16``.
        one_alpha: one alpha serves all columns of a product; else each column has its own.
        bias: whether one is added.
    """

    operation: Literal["linear", "gemm", "weight-only"]
    m: int
    widths: tuple[int, ...]
    k: int
    dtype: str
    one_alpha: bool
    bias: bool

    @property
    def sizes(self) -> Sizes:
        """N and K."""
        return (("N", sum(self.widths)), ("K", self.k))

    @property
    def text(self) -> str:
        """The sizes as messages show them."""
        return f"M={self.m} {spelled(self.sizes)}"

    @property
    def nbytes(self) -> int:
        """What operands and results take."""
        n = sum(self.widths)
        return n * self.k // 2 + n * self.k // BLOCK_SIZE + 2 * self.m * (self.k + n)


@dataclass(frozen=True)
class ExpertFacts:
    """The call of the experts of one layer on one rank.

    Attributes:
        m: tokens.
        experts: of all ranks.
        local: of this rank.
        top_k: experts of a token, over all ranks.
        hidden: H.
        inner: I as it reaches the kernels.
        activation: ``silu`` or ``relu2``.
        gate_first: order of the halves of w13; nothing for ``relu2``.
        dtype: of the tokens: ``bfloat16`` or ``float16``.
    """

    m: int
    experts: int
    local: int
    top_k: int
    hidden: int
    inner: int
    activation: Activation
    gate_first: bool
    dtype: str

    @property
    def operation(self) -> Literal["moe"]:
        """The operation, as files and messages name it."""
        return "moe"

    @property
    def sizes(self) -> Sizes:
        """Geometry of the layer."""
        return expert_sizes(self.experts, self.local, self.top_k, self.hidden, self.inner)

    @property
    def text(self) -> str:
        """The sizes as messages show them."""
        return f"M={self.m} {spelled(self.sizes)} {self.activation}"

    @property
    def nbytes(self) -> int:
        """What operands and results take."""
        weights = (3 if self.activation == "silu" else 2) * self.hidden * self.inner
        routing = self.m * (8 * self.top_k + 4 * self.experts)  # ids, weights, and the numbers that ids are drawn by
        return self.local * (weights // 2 + weights // BLOCK_SIZE) + 4 * self.m * self.hidden + routing


@dataclass(frozen=True)
class FailedCall:
    """One call that ended in an error.

    Attributes:
        call: what was asked.
        backend: a value of the table, or a runner of experts.
        layer: its place in the model, or class and size; of layers that share the call, those.
        error: type of what was raised.
        said: its text, on one line.
        identity: card and versions of the server.
        seed: of the random numbers that take the place of the operands, the same in every replay.
    """

    call: DenseFacts | ExpertFacts
    backend: str
    layer: str
    error: str
    said: str
    identity: Identity
    seed: int


def write(call: DenseFacts | ExpertFacts, backend: str, layer: str, error: Exception, identity: Identity) -> Path:
    """Write a call to the cache folder, readable by the user only, and return the file.

    One file for one error, however often it comes and on however many ranks.

    Raises:
        ConfigError: the cache folder is not safe or cannot be made.
        RecordError: the file cannot be written or would not be read, or there are :data:`MOST_FILES`.
    """
    told: dict[str, Any] = redacted(
        {
            "schema": SCHEMA,
            "kind": KIND,
            "operation": call.operation,
            "call": {name: value for name, value in asdict(call).items() if name != "operation"},
            "backend": backend,
            "layer": layer,
            "error": type(error).__name__,
            "said": one_line(redacted(str(error))),  # before it is cut, which may cut a name
            "identity": identity.to_json(),
        }
    )
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    name = f"{call.operation}-{digest[:12]}.json"
    described = json.loads(json.dumps({**told, "seed": int(digest[:7], 16), "created": kept.now()}))
    parse(Fields(name, described))
    folder = env.cache_dir(FOLDER)
    path = folder / name
    if path.exists():
        return path
    if sum(1 for _ in folder.glob("*.json")) >= MOST_FILES:
        raise RecordError(f"{folder} has {MOST_FILES} files already; remove those that nobody needs.")
    records.write_json(path, described)
    return path


def parse(fields: Fields) -> FailedCall:
    """Return the call that a file describes.

    Raises:
        RecordError: it is not exactly what :func:`write` writes.
    """
    fields.schema(SCHEMA)
    fields.text("kind", (KIND,))
    fields.text("created")
    operation: Any = fields.text("operation", ("linear", "gemm", "moe"))
    told = fields.object("call")
    call = _experts(told) if operation == "moe" else _dense(told, operation)
    told.done()
    if call.nbytes > MAX_BYTES:
        fields.fail(
            f"is about {call.text}, whose operands have {call.nbytes} bytes; more than {MAX_BYTES} are not made"
        )
    found = FailedCall(
        call=call,
        backend=fields.text("backend"),
        layer=fields.text("layer"),
        error=fields.text("error"),
        said=fields.text("said"),
        identity=Identity.from_json(fields.object("identity")),
        seed=fields.integer("seed"),
    )
    fields.done()
    return found


def _dense(fields: Fields, operation: Literal["linear", "gemm"]) -> DenseFacts:
    widths = fields.integers("widths", 1, _MOST_COLUMNS)
    if not 1 <= len(widths) <= _MOST_PRODUCTS:
        fields.fail(f"has {len(widths)} widths, expected are 1 to {_MOST_PRODUCTS}")
    return DenseFacts(
        operation=operation,
        m=fields.integer("m", 1, _MOST_ROWS),
        widths=widths,
        k=_blocks(fields, "k"),
        dtype=fields.text("dtype", _DTYPES),
        one_alpha=fields.flag("one_alpha"),
        bias=fields.flag("bias"),
    )


def _experts(fields: Fields) -> ExpertFacts:
    activation: Any = fields.text("activation", ("silu", "relu2"))
    experts = fields.integer("experts", 1, _MOST_EXPERTS)
    return ExpertFacts(
        m=fields.integer("m", 1, _MOST_ROWS),
        experts=experts,
        local=fields.integer("local", 1, experts),
        top_k=fields.integer("top_k", 1, experts),
        hidden=_blocks(fields, "hidden"),
        inner=_blocks(fields, "inner"),
        activation=activation,
        gate_first=fields.flag("gate_first"),
        dtype=fields.text("dtype", _DTYPES),
    )


def _blocks(fields: Fields, key: str) -> int:
    """Read an inner dimension, which has whole blocks."""
    size = fields.integer(key, BLOCK_SIZE, _MOST_COLUMNS)
    if size % BLOCK_SIZE:
        fields.fail(f"has {key}={size}, which is no multiple of {BLOCK_SIZE}")
    return size
