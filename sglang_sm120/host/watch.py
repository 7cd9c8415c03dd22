"""Check what the layers of a running server compute, and count which backend computed it.

Nothing here is reached unless ``SGLANG_SM120_VERIFY`` or ``SGLANG_SM120_REPORT`` is set: the seams that lead here
(``watch_seams.py``) are part of the table only then.

*When a call is checked.* Inside a step (``ModelRunner.forward``) every call of every N-th step of its kind, and such a
step runs without a CUDA graph. Outside of steps (the runs in front of a capture, autotuning) the first call of each
layer and M.
A call that is being captured cannot be checked, because the host may not wait for the GPU then; one that torch.compile
traces is not seen.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from sglang_sm120 import env, records
from sglang_sm120.device import collect_facts
from sglang_sm120.errors import ConfigError, RecordError, VerificationError
from sglang_sm120.host import ranks
from sglang_sm120.host.reload import layer_name
from sglang_sm120.host.state import STATE
from sglang_sm120.host.watch_source import Source, served_by, value_of_layer
from sglang_sm120.redact import redacted
from sglang_sm120.verification.call import Call
from sglang_sm120.verification.coverage import Coverage
from sglang_sm120.verification.expert_call import ExpertCall
from sglang_sm120.verification.expert_judge import judge_experts
from sglang_sm120.verification.judge import judge
from sglang_sm120.verification.reproducer import Reproducer, write
from sglang_sm120.verification.served import Served, Sizes, spelled

logger = logging.getLogger("sglang_sm120")

#: SGLang's own warm-up request is one prefill and seven steps of decode.
WARM_UP_STEPS = 8

T = TypeVar("T")


@dataclass
class LayerCall:
    """One call of one layer while it runs.

    ``backend`` is what multiplied, as far as the seams see it; ``why_not`` why a check that was due did not happen.
    """

    name: str
    kind: str
    sizes: Sizes
    m: int
    due: bool
    experts: bool = False
    backend: str = "SGLang's own path"
    judged: bool = False
    why_not: str = "no product was seen"


class Watcher:
    """The state of this process.

    Args:
        every: one of so many steps is checked; 0 checks none.
        report: whether calls are counted and profiler ranges set.
    """

    def __init__(self, every: int, *, report: bool) -> None:
        self.every = every
        self.report = report
        self.coverage = Coverage()
        self.served = Served()
        self.steps = 0
        self.current: LayerCall | None = None
        self._step_due: bool | None = None  # None outside of steps
        self._checked_steps = 0
        self._proven = False  # some rank has checked something, and every other one can see it
        self._names: set[str] = set()
        self._generator = torch.Generator().manual_seed(20)

    # --- steps -----------------------------------------------------------------------------------------------

    def due(self, runner: Any, batch: Any) -> bool:
        """Whether the step that runs ``batch`` is checked, and so must run without a CUDA graph.

        Decided once for each batch: SGLang asks whether it can use a graph when it plans the attention, and again when
        it runs, and a draft model takes all its steps with one batch. Counted for each runner and mode (prefill,
        decode, verification of a draft, ...): they alternate, and an even N would always meet the same one. All ranks
        count the same steps.
        """
        known: bool | None = getattr(batch, "sm120_due", None)
        if known is None:
            counts: Counter[str] = vars(runner).setdefault("sm120_steps", Counter())
            mode: str = batch.forward_mode.name
            known = batch.sm120_due = self.every > 0 and counts[mode] % self.every == 0
            counts[mode] += 1
        return known

    def step(self, runner: Any, batch: Any, forward: Callable[[], Any]) -> Any:
        """Run one step of the model.

        Raises:
            VerificationError: it was to be checked, and no rank of the server could check anything so far.
        """
        outer, self._step_due = self._step_due, self.due(runner, batch)
        due = self._step_due
        try:
            result = forward()
        finally:
            self._step_due = outer
        self.steps += 1
        if due:
            self._end_checked_step(idle=batch.forward_mode.is_idle())
        if self.report and self.steps >= WARM_UP_STEPS and self.steps & (self.steps - 1) == 0:
            self._write_report()
        return result

    def _end_checked_step(self, *, idle: bool) -> None:
        self._checked_steps += 1
        if not self._proven:
            self._require_coverage(idle=idle)
        if self._checked_steps & (self._checked_steps - 1) == 0:
            stage, speaks = ranks.stage()
            none = "" if self.coverage.checked else "; a stage may have no layer to check if another one has"
            level = logging.INFO if speaks else logging.DEBUG
            logger.log(level, "%s%s: %s%s.", env.VERIFY, stage, self.coverage.text, none)

    def _require_coverage(self, *, idle: bool) -> None:
        """End the server if no rank has checked anything: a check of nothing would look like a success.

        One rank may well have nothing to check, as a pipeline stage without a dense NVFP4 layer. Nobody waits here,
        because a later stage gets its input only after this step: the last rank that comes by sees all others.
        """
        told = ranks.tell("coverage", [self.coverage.checked, idle, self.coverage.text])
        self._proven = any(checked for checked, _, _ in told.values())
        if self._proven or len(told) < ranks.world_size() or all(idle for _, idle, _ in told.values()):
            return
        by_text: dict[str, list[int]] = {}
        for rank, (_, _, text) in sorted(told.items()):
            by_text.setdefault(text, []).append(rank)
        listing = "; ".join(f"{ranks.spell(where)}: {text}" for text, where in by_text.items())
        raise VerificationError(
            f"{env.VERIFY}={self.every} checked nothing on any rank of the server ({listing}). No rank has an NVFP4 "
            f"layer that can be checked here; unset {env.VERIFY}."
        )

    def _write_report(self) -> None:
        path = env.report_path()
        if path is None or not ranks.is_first():
            return
        if self.steps == WARM_UP_STEPS:
            logger.info(
                "Calls of FP4 layers in the first %d steps and before them (what a CUDA graph replays is not "
                "counted):\n  %s",
                self.steps,
                "\n  ".join(self.served.lines()),
            )
        try:
            records.write_json(path, redacted(self.served.to_json(_identity(), self.steps)))
        except RecordError as error:
            STATE.warn_once("report", f"{env.REPORT}: {error}")

    # --- layers ----------------------------------------------------------------------------------------------

    def layer(
        self, inner: Callable[..., torch.Tensor], method: Any, layer: Any, x: Any, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Run one layer, and check or count it.

        Raises:
            VerificationError: the result is wrong.
        """
        first = x[0] if isinstance(x, tuple) else x
        sizes = (("N", sum(layer.logical_widths)), ("K", layer.input_size_per_partition))

        def look(call: LayerCall, out: torch.Tensor) -> None:
            if hasattr(layer, "sm120_prepared"):
                call.backend = value_of_layer(layer, call.m)
                if call.due:
                    self._check_prepared(layer, x, bias, out)

        return self.watched(layer, sizes, first, lambda: inner(method, layer, x, bias), look)

    def watched(
        self,
        layer: Any,
        sizes: Sizes,
        rows: torch.Tensor,
        forward: Callable[[], T],
        look: Callable[[LayerCall, T], None],
        *,
        experts: bool = False,
    ) -> T:
        """Run one layer and account for the call.

        Args:
            layer: the module.
            sizes: its geometry.
            rows: its input, [..., K].
            forward: runs it.
            look: is given the call and the result of ``forward``; says who served it and, if it is due, checks it.
            experts: whether it is a layer of experts.

        Raises:
            VerificationError: the result is wrong.
        """
        m = rows.numel() // rows.shape[-1]
        if m == 0:
            return forward()
        captured = rows.is_cuda and torch.cuda.is_current_stream_capturing()
        call = self._begin(layer, sizes, m, captured=captured, experts=experts)
        outer, self.current = self.current, call
        try:
            with self._range(call):
                out = forward()
            look(call, out)
        finally:
            self.current = outer
        self._end(call, captured=captured)
        return out

    def name(self, layer: Any, place: str) -> None:
        """Give a layer the name of its place in the model, once; a draft model may have the same places."""
        if not hasattr(layer, "sm120_name"):  # else its weights were loaded again
            self._name_once(layer, place, "of model")

    def _name_once(self, layer: Any, place: str, another: str) -> None:
        number = 1
        layer.sm120_name = place
        while layer.sm120_name in self._names:
            number += 1
            layer.sm120_name = f"{place} {another} {number}"
        self._names.add(layer.sm120_name)

    def _begin(self, layer: Any, sizes: Sizes, m: int, *, captured: bool, experts: bool) -> LayerCall:
        if not hasattr(layer, "sm120_name"):
            # Not loaded by SGLang's default loader. A name that layers of one size share would count as one layer.
            self._name_once(layer, layer_name(layer), "number")
        name: str = layer.sm120_name
        due = self.every > 0 and not captured
        if due:
            due = not self.coverage.was_checked(name, m) if self._step_due is None else self._step_due
        return LayerCall(name, type(layer).__name__, sizes, m, due, experts)

    def _end(self, call: LayerCall, *, captured: bool) -> None:
        if self.every:
            in_step = self._step_due is not None
            self.coverage.see(call.name, call.m, in_step=in_step, experts=call.experts)
            if call.judged:
                self.coverage.check(call.name, call.m, in_step=in_step)
            elif call.due:
                self.coverage.skip(f"{call.backend}: {call.why_not}")
        if self.report:
            self.served.count(call.kind, call.name, call.sizes, call.m, call.backend, captured=captured)

    def _range(self, call: LayerCall) -> AbstractContextManager[object]:
        if not self.report:
            return nullcontext()
        return torch.profiler.record_function(f"sm120 {call.kind} {spelled(call.sizes)} M={call.m}")

    # --- checks ----------------------------------------------------------------------------------------------

    def _check_prepared(self, layer: Any, x: Any, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Check a layer of ours: the calls that ``layers.forward`` makes, one for each group of shards."""
        prepared = layer.sm120_prepared
        weight = getattr(layer, prepared.weight_name)
        results = out.reshape(-1, out.shape[-1])
        if isinstance(x, tuple):
            group = prepared.groups[0]
            scale, alpha = getattr(layer, group.scale_name), layer.sm120_alpha[group.alpha]
            call = Call.gemm(x[0], weight, x[1], scale, alpha, bias, layer.sm120_dtype)
            self.check(call, (results,), served_by(prepared.backend, call))
            return
        if prepared.weight_only:
            assert self.current is not None
            self.current.why_not = "its input is not quantized"
            return
        rows = (x * layer.pre_quant_scale if prepared.pre_scaled else x).reshape(-1, x.shape[-1])
        for index, group in enumerate(prepared.groups):
            part = slice(group.start, group.stop)
            call = Call.linear(
                rows,
                weight[part],
                getattr(layer, group.scale_name),
                layer.sm120_activation_scale[index],
                layer.sm120_alpha[group.alpha],
                None if bias is None else bias[part],
            )
            self.check(call, (results[:, part],), served_by(prepared.backend, call))

    def check(self, call: Call, results: tuple[torch.Tensor, ...], source: Source) -> None:
        """Check one operation of the layer that runs.

        Raises:
            VerificationError: its result is wrong.
        """
        current = self.current
        assert current is not None
        judgement = judge(call, results, source.quantize, self._generator, bias_afterwards=source.bias_afterwards)
        if judgement.wrong:
            raise self._failure(current, call, results, source.value, judgement.text)
        if call.operation != "quantize":
            current.judged |= judgement.rows > 0
            current.why_not = "no row of its input was finite"

    def check_experts(self, call: ExpertCall, out: torch.Tensor, runner: str, *, rounds_between: bool) -> None:
        """Check the experts of the layer that runs.

        Args:
            call: what was asked.
            out: [M, H], what came back.
            runner: who served it.
            rounds_between: it hands 16-bit numbers from kernel to kernel.

        Raises:
            VerificationError: the result is wrong.
        """
        current = self.current
        assert current is not None
        judgement = judge_experts(call, out, self._generator, rounds_between=rounds_between)
        if judgement.wrong:
            raise self._failure(current, call, (out,), runner, judgement.text)
        current.judged |= judgement.rows > 0
        current.why_not = "no row of its input was finite"

    def _failure(
        self,
        current: LayerCall,
        call: Call | ExpertCall,
        results: tuple[torch.Tensor, ...],
        backend: str,
        wrong: str,
    ) -> VerificationError:
        host = call.kept() if isinstance(call, ExpertCall) else call.to(torch.device("cpu"))
        case = Reproducer(host, tuple(tensor.cpu() for tensor in results), backend, current.name, wrong, _identity())
        try:
            path = write(case)
            kept = f"It is kept: sglang-sm120 replay {path}"
        except (ConfigError, RecordError) as error:
            kept = f"It could not be kept: {error}"
        shape = f"M={call.m} {spelled(call.sizes)}"
        return VerificationError(
            f"{current.name} ({current.kind}, {call.operation} {shape}), served by {backend}, is wrong: {wrong}. {kept}"
        )


def _identity() -> records.Identity:
    return records.identity_of(STATE.facts if STATE.facts is not None else collect_facts())
