"""Decode steps of the delta rules' mixers as one op, and as the parts that it stands in for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.gpu.case import Case, Inputs, Turns, offsets, own, randn
from benchmarks.gpu.delta_rules import KIMI_LINEAR, QWEN3_NEXT
from benchmarks.gpu.open_chunks import open_chunks
from tests.ops.delta_rule.step_cases import GatedInputs, KimiInputs
from tests.ops.delta_rule.step_family import Family
from tests.ops.delta_rule.step_gated_cases import FAMILY as GATED
from tests.ops.delta_rule.step_kimi_cases import FAMILY as KIMI
from torch_hybrid.ops.open_chunk import OpenStep

WIDTH = 4  # of the convolution


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaStep(Inputs):
    """The tensors of a step; what is of tokens is cut from one projection."""

    changed: ClassVar[tuple[str, ...]] = ("conv_state", "state")

    by_channel: bool  # as Kimi's rule decays
    projected: Tensor  # [N, C + HV V + HV + HV], of Kimi HV K in the end
    conv_weight: Tensor  # [C, W]
    A_log: Tensor  # [HV]
    dt_bias: Tensor  # [HV], of Kimi [HV, K]
    norm_weight: Tensor  # [V]
    conv_state: Tensor  # [N + 1, W - 1, C]
    state: Tensor  # [N + 1, HV, V, K]
    cu_seqlens: Tensor
    indices: Tensor  # [N]: slots from 1 on, in order

    @classmethod
    def make(cls, name: str, heads: tuple[int, int, int, int], num_seqs: int) -> DeltaStep:
        num_k_heads, num_v_heads, k_dim, v_dim = heads
        channels, v_size = 2 * num_k_heads * k_dim + num_v_heads * v_dim, num_v_heads * v_dim
        decays = torch.Size([num_v_heads, k_dim] if name == "kimi_delta_step" else [num_v_heads])
        return cls(
            by_channel=name == "kimi_delta_step",
            projected=randn(num_seqs, channels + v_size + num_v_heads + decays.numel()),
            conv_weight=randn(channels, WIDTH),
            A_log=randn(num_v_heads),
            dt_bias=randn(*decays) - 2,
            norm_weight=randn(v_dim),
            conv_state=randn(num_seqs + 1, WIDTH - 1, channels),
            state=randn(num_seqs + 1, num_v_heads, v_dim, k_dim).float(),
            cu_seqlens=offsets(num_seqs, 1),
            indices=torch.arange(1, num_seqs + 1, dtype=torch.int32),
        )

    @property
    def of_op(self) -> GatedInputs | KimiInputs:
        """As the op's tests call it."""
        _, num_heads, v_dim, k_dim = self.state.shape
        widths = [len(self.conv_weight), num_heads * v_dim, num_heads, self.dt_bias.numel()]
        qkv, z, b, a = self.projected.split(widths, 1)
        own = {"gate_lower_bound": None} if self.by_channel else {"beta_scale": 1.0}
        return (KimiInputs if self.by_channel else GatedInputs)(
            qkv=qkv,
            z=z,
            b=b,
            a=a,
            conv_weight=self.conv_weight,
            conv_bias=None,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            norm_weight=self.norm_weight,
            conv_state=self.conv_state,
            state=self.state,
            cu_seqlens=self.cu_seqlens,
            initial_indices=self.indices,
            state_indices=self.indices,
            activation="silu",
            scale=k_dim**-0.5,
            **own,
        )

    @property
    def num_bytes(self) -> float:
        num_seqs, num_heads, v_dim = len(self.indices), *self.state.shape[1:3]
        outside = self.projected.nbytes + 2 * num_seqs * num_heads * v_dim
        weights = self.conv_weight.nbytes + self.dt_bias.nbytes
        return outside + weights + 2 * (self.state[1:].nbytes + self.conv_state[1:].nbytes)


def cases() -> Iterator[Case]:
    """1 to 128 sequences."""
    for num_seqs in (1, 8, 32, 64, 128):
        yield _case(GATED, "Qwen3-Next", QWEN3_NEXT, num_seqs)
        yield _case(KIMI, "Kimi-Linear", KIMI_LINEAR, num_seqs)


def _case(family: Family, model: str, heads: tuple[int, int, int, int], num_seqs: int) -> Case:
    def call(inputs: DeltaStep, impl: str) -> Tensor:
        return family.run(inputs.of_op, impl)

    def value(inputs: DeltaStep, impl: str) -> OpenStep:
        return replace(inputs.of_op, impl=impl)

    return Case(
        op=f"{'KDA' if family is KIMI else 'GDN'} step",
        model=model,
        shape=f"{num_seqs}x1",
        make=partial(DeltaStep.make, family.op.__name__, heads, num_seqs),
        reference=partial(call, impl="torch"),
        own=own(family.implementations, call),
        others={
            "open chunks": open_chunks(family.op, value),
            "parts": partial(_parts, family),
        },
    )


def _parts(family: Family, inputs: Sequence[DeltaStep]) -> Turns:
    """The Triton ops that a step stands in for, and what Inductor makes of the gates and norm.

    The projection is cut in the graph, as in a model.
    """
    torch._dynamo.reset()  # it counts what all cases compile as recompilations of one function

    @partial(torch.compile, fullgraph=True, dynamic=False)
    def run(one: DeltaStep) -> Tensor:
        return family.by_parts(one.of_op, "triton")

    calls: list[Any] = [partial(run, each) for each in inputs]
    return Turns(calls=calls)
