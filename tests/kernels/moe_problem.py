"""Mixture-of-experts problems for kernel tests, their answer stage by stage, and the program that runs the kernels.

Tables and swizzle come from problem.py, so this is apart from ``sglang_sm120.reference`` too; test_emulated_moe.py
holds the kernels against both.
"""

from __future__ import annotations

import os
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch
from problem import E2M1, pack, scale_value, swizzle
from test_emulated_quantize import EmulationError, reciprocal_model

from sglang_sm120 import reference

#: What the workspace holds before the first launch.
POISON = 0xEE
AS_LAUNCHED = (-1, -1, -1, -1)


@dataclass
class MoeProblem:
    """One layer: weights as codes and scale bytes, router outputs, hidden states."""

    hidden: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    w13_codes: torch.Tensor  # [E, R, H]
    w13_scales: torch.Tensor  # [E, R, H / 16]
    w13_alpha: torch.Tensor
    w2_codes: torch.Tensor  # [E, H, I]
    w2_scales: torch.Tensor
    w2_alpha: torch.Tensor
    input_scale: torch.Tensor
    inner_scale: torch.Tensor
    relu2: bool = False
    gate_first: bool = False
    first_expert: int = 0
    hidden_padding: int = 0
    out_padding: int = 0
    #: gate/up: log2 of the cluster, clusters, rows at once; down: log2 of the cluster. -1 as the launcher chooses.
    config: tuple[int, int, int, int] = AS_LAUNCHED

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """m, top_k, H, I, E."""
        m, top_k = self.topk_ids.shape
        experts, hidden_size, intermediate = self.w2_codes.shape
        return m, top_k, hidden_size, intermediate, experts

    def local_ids(self) -> torch.Tensor:
        """Experts of this rank counted from 0, -1 for all others."""
        local = self.topk_ids.long() - self.first_expert
        return torch.where((local >= 0) & (local < self.sizes[4]), local, -1)

    def encode_scale(self, scale: torch.Tensor, expert: int) -> float:
        """The scale of one expert."""
        return float(scale[expert] if scale.numel() > 1 else scale)

    def activations(self) -> dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]:
        """Model of the first launch: (token, first slot) -> codes and scale bytes of the activation's output."""
        ids = self.local_ids()
        out = {}
        for expert in ids.unique().tolist():
            if expert < 0:
                continue
            tokens = (ids == expert).any(1).nonzero().flatten()
            scale = self.encode_scale(self.input_scale, expert)
            packed, scales = reciprocal_model(self.hidden[tokens], scale)
            x = dequantize(packed, scales.view(torch.uint8), self.sizes[2])
            w = E2M1[self.w13_codes[expert].long()] * scale_value(self.w13_scales[expert]).repeat_interleave(16, 1)
            sums = x @ w.T * self.w13_alpha[expert].double()
            if self.relu2:
                act = torch.where(sums < 0, 0.0, sums).square()
            else:
                first, second = sums.chunk(2, 1)
                gate, up = (first, second) if self.gate_first else (second, first)
                act = gate * torch.sigmoid(gate) * up
            codes, act_scales = reciprocal_model(act.float(), self.encode_scale(self.inner_scale, expert))
            for i, token in enumerate(tokens.tolist()):
                slot = int((ids[token] == expert).nonzero()[0])
                out[token, slot] = (codes[i], act_scales[i].view(torch.uint8))
        return out

    def workspace_rows(self, workspace: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes [m * top_k, I / 2] and scale bytes [m * top_k, I / 16] of a workspace."""
        m, top_k, _, intermediate, _ = self.sizes
        rows = m * top_k
        codes = workspace[: rows * intermediate // 2].view(rows, intermediate // 2)
        scales = workspace[rows * intermediate // 2 :].view(rows, -(-(intermediate // 16) // 4) * 4)
        return codes, scales[:, : intermediate // 16]

    def output(self, workspace: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The second launch in float64 from a workspace, and the bound on its error."""
        m, top_k, hidden_size, intermediate, _ = self.sizes
        codes, scales = self.workspace_rows(workspace)
        out, magnitude = torch.zeros(2, m, hidden_size, dtype=torch.float64)
        ids = self.local_ids()
        for token in range(m):
            for slot in range(top_k):
                expert = int(ids[token, slot])
                if expert < 0:
                    continue
                first = int((ids[token] == expert).nonzero()[0])
                row = token * top_k + first
                act = dequantize(codes[row : row + 1], scales[row : row + 1], intermediate)[0]
                w = E2M1[self.w2_codes[expert].long()] * scale_value(self.w2_scales[expert]).repeat_interleave(16, 1)
                factor = float(self.topk_weights[token, slot].double() * self.w2_alpha[expert].double())
                out[token] += w @ act * factor
                magnitude[token] += w.abs() @ act.abs() * abs(factor)
        # As in problem.py: the additions of an item, of the items, of warps and cluster; two more for the factor.
        additions = top_k * (intermediate // 64 + 2) + 24
        unit = 2.0**-8 if self.hidden.dtype == torch.bfloat16 else 2.0**-11
        return out, out.abs() * unit * 1.01 + magnitude * additions * 2.0**-22 + 2.0**-25

    def oracle(self) -> torch.Tensor:
        """``reference.moe`` of the whole layer."""

        def stack(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            rows, k = codes.shape[1:]
            shape = (-(-rows // 128) * 128, -(-(k // 16) // 4) * 4)
            packed = torch.stack([pack(c, k // 2, 0) for c in codes])
            return packed, torch.stack([swizzle(s, 0).view(shape) for s in scales])

        w13 = reference.ExpertWeights(*stack(self.w13_codes, self.w13_scales), self.w13_alpha, self.input_scale)
        w2 = reference.ExpertWeights(*stack(self.w2_codes, self.w2_scales), self.w2_alpha, self.inner_scale)
        return reference.moe(
            self.hidden,
            self.local_ids(),
            self.topk_weights,
            w13,
            w2,
            "relu2" if self.relu2 else "silu",
            None if self.relu2 else self.gate_first,
        )


def dequantize(packed: torch.Tensor, scales: torch.Tensor, k: int) -> torch.Tensor:
    """Packed codes and linear scale bytes as float64."""
    codes = torch.stack((packed & 15, packed >> 4), -1).view(packed.shape[0], k)
    return E2M1[codes.long()] * scale_value(scales.contiguous()).repeat_interleave(16, 1)


def moe_problem(
    m: int,
    top_k: int,
    hidden_size: int,
    intermediate: int,
    experts: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    relu2: bool = False,
    per_expert: bool = False,
    **fields: object,
) -> MoeProblem:
    """Random weights over two decades, distinct random experts for each token."""
    gen = torch.Generator().manual_seed(seed * 1000003 + m * 10007 + hidden_size * 101 + intermediate)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=gen, dtype=torch.uint8)

    rows = intermediate if relu2 else 2 * intermediate
    ids = torch.stack(
        [torch.randperm(max(experts, top_k), generator=gen)[:top_k] for _ in range(m)] or [torch.empty(0)]
    )
    count = experts if per_expert else 1
    problem = MoeProblem(
        hidden=torch.randn(m, hidden_size, generator=gen).to(dtype),
        topk_ids=ids.to(torch.int32).view(m, top_k),
        topk_weights=torch.rand(m, top_k, generator=gen),
        w13_codes=draw(0, 16, experts, rows, hidden_size),
        w13_scales=draw(0x20, 0x48, experts, rows, hidden_size // 16),
        w13_alpha=(torch.rand(experts, generator=gen) + 0.5) * (0.02 / hidden_size**0.5),
        w2_codes=draw(0, 16, experts, hidden_size, intermediate),
        w2_scales=draw(0x20, 0x48, experts, hidden_size, intermediate // 16),
        w2_alpha=(torch.rand(experts, generator=gen) + 0.5) * 0.01,
        input_scale=torch.rand(count, generator=gen) * 50 + 20,
        inner_scale=torch.rand(count, generator=gen) * 50 + 20,
        relu2=relu2,
    )
    if not per_expert:
        problem.input_scale, problem.inner_scale = problem.input_scale[0], problem.inner_scale[0]
    for name, value in fields.items():
        setattr(problem, name, value)
    return problem


def run_moe(program: Path, problem: MoeProblem, folder: Path, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Run both launches: the output and the workspace. Output and every padding start as NaN.

    Raises:
        EmulationError: the emulated machine or a sanitizer stopped a kernel.
    """
    m, top_k, hidden_size, intermediate, experts = problem.sizes
    wide = torch.full((m, hidden_size + problem.hidden_padding), float("nan"), dtype=problem.hidden.dtype)
    wide[:, :hidden_size] = problem.hidden
    out_stride = hidden_size + problem.out_padding
    out = torch.full((m, out_stride), float("nan"), dtype=problem.hidden.dtype)
    numbers = (
        m, top_k, hidden_size, intermediate, experts, problem.first_expert, int(problem.relu2), int(problem.gate_first),
        int(problem.hidden.dtype == torch.float16), int(problem.input_scale.numel() > 1),
        int(problem.inner_scale.numel() > 1), wide.shape[1], out_stride, seed, *problem.config,
    )  # fmt: skip

    def packed(codes: torch.Tensor) -> torch.Tensor:
        return torch.cat([pack(c, c.shape[1] // 2, 0).flatten() for c in codes])

    def scales(scale_bytes: torch.Tensor) -> torch.Tensor:
        return torch.cat([swizzle(s) for s in scale_bytes])

    tensors = (
        wide, problem.topk_ids, problem.topk_weights, packed(problem.w13_codes), scales(problem.w13_scales),
        problem.w13_alpha, problem.input_scale.view(-1), packed(problem.w2_codes), scales(problem.w2_scales),
        problem.w2_alpha, problem.inner_scale.view(-1), out,
    )  # fmt: skip
    source, sink = folder / "moe.bin", folder / "moe.out"
    with source.open("wb") as file:
        file.write(struct.pack(f"<{len(numbers)}q", *numbers))
        for tensor in tensors:
            data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
            file.write(struct.pack("<q", len(data)) + data)
    environment = {**os.environ, "ASAN_OPTIONS": "detect_stack_use_after_return=0:detect_leaks=0"}
    done = subprocess.run([str(program), str(source), str(sink)], capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise EmulationError(f"exit {done.returncode}: {done.stderr[-3000:]}")
    data = bytearray(sink.read_bytes())
    size = m * out_stride * 2
    if not data:  # M = 0, and torch takes no empty buffer
        return out[:, :hidden_size], torch.empty(0, dtype=torch.uint8)
    wide_out = torch.frombuffer(data, dtype=problem.hidden.dtype, count=m * out_stride).view(m, out_stride)
    assert wide_out[:, hidden_size:].isnan().all(), "the padding of the output was written"
    return wide_out[:, :hidden_size], torch.frombuffer(data, dtype=torch.uint8, offset=size)
