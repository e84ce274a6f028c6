"""A decode step of Mamba2's mixer between its projections: in one op, and in its parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.case import Case, Inputs, Turns, offsets, own, randn
from benchmarks.gpu.open_chunks import open_chunks
from benchmarks.gpu.state_spaces import MAMBA2
from torch_hybrid.ops.causal_conv1d import causal_conv1d
from torch_hybrid.ops.ssd import ssd, ssd_step
from torch_hybrid.ops.ssd.op_step_mamba2 import IMPLEMENTATIONS, SsdStep

WIDTH, EPS = 4, 1e-5
NORM_GROUPS = {"Bamba": 1, "Nemotron-H": 8, "Falcon-H1": 0}  # 0: no norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Inputs):
    """One token of each sequence; z, xBC and dt are slices of one projection."""

    changed: ClassVar[tuple[str, ...]] = ("conv_state", "state")

    sizes: tuple[int, int, int, int]  # groups, heads, K, V
    norm_groups: int
    projected: Tensor  # [N, 2 H V + 2 G K + H]
    conv_weight: Tensor  # [C, W]
    conv_bias: Tensor  # [C]
    A_log: Tensor  # [H]; so dt_bias and D
    dt_bias: Tensor
    D: Tensor
    norm_weight: Tensor  # [H V]
    conv_state: Tensor  # [N + 1, W - 1, C]
    state: Tensor  # [N + 1, H, V, K]
    cu_seqlens: Tensor
    indices: Tensor

    @classmethod
    def make(cls, sizes: tuple[int, int, int, int], norm_groups: int, num_seqs: int) -> Step:
        num_groups, num_heads, k_dim, v_dim = sizes
        inner = num_heads * v_dim
        channels = inner + 2 * num_groups * k_dim
        return cls(
            sizes=sizes,
            norm_groups=norm_groups,
            projected=randn(num_seqs, inner + channels + num_heads),
            conv_weight=randn(channels, WIDTH),
            conv_bias=randn(channels),
            A_log=randn(num_heads),
            dt_bias=randn(num_heads) - 4,
            D=randn(num_heads),
            norm_weight=randn(inner),
            conv_state=randn(num_seqs + 1, WIDTH - 1, channels),
            state=randn(num_seqs + 1, num_heads, v_dim, k_dim).float(),
            cu_seqlens=offsets(num_seqs, 1),
            indices=torch.arange(1, num_seqs + 1, dtype=torch.int32),
        )

    @property
    def inner(self) -> int:
        return self.sizes[1] * self.sizes[3]

    def views(self) -> tuple[Tensor, ...]:
        """z, xBC and dt."""
        channels = self.conv_weight.shape[0]
        return self.projected.split([self.inner, channels, self.sizes[1]], 1)

    def pools(self) -> tuple[Tensor, ...]:
        """Both states, and where they are."""
        return self.conv_state, self.state, self.cu_seqlens, self.indices, self.indices

    @property
    def num_bytes(self) -> float:
        out = 2 * self.projected.shape[0] * self.inner
        pools = 2 * (self.conv_state[1:].nbytes + self.state[1:].nbytes)
        return self.projected.nbytes + out + self.conv_weight.nbytes + pools


def value(inputs: Step, impl: str) -> SsdStep:
    """The arguments of a call of this package's op."""
    z, xBC, dt = inputs.views()
    return SsdStep(
        xBC,
        z,
        dt,
        inputs.conv_weight,
        inputs.conv_bias,
        inputs.A_log,
        inputs.dt_bias,
        inputs.D,
        inputs.norm_weight if inputs.norm_groups else None,
        *inputs.pools(),
        activation="silu",
        dt_min=0.0,
        dt_max=float("inf"),
        norm_before_gate=False,
        norm_groups=inputs.norm_groups or 1,
        norm_eps=EPS,
        impl=impl,
    )


def call(inputs: Step, impl: str) -> Tensor:
    """One call of this package's op."""
    return ssd_step(value(inputs, impl))


def _parts(inputs: Step, impl: str) -> Tensor:
    """What a layer runs where it takes no whole step."""
    num_groups, num_heads, k_dim, v_dim = inputs.sizes
    z, xBC, dt = inputs.views()
    conv_state, state, *index = inputs.pools()
    weights = (inputs.conv_weight, inputs.conv_bias)
    mixed = causal_conv1d(xBC, *weights, conv_state, *index, activation="silu", impl=impl)
    x, B, C = mixed.split([inputs.inner, num_groups * k_dim, num_groups * k_dim], 1)
    step = F.softplus(dt.float() + inputs.dt_bias.float()).clamp(0.0, float("inf"))
    o = ssd(
        C.unflatten(1, (num_groups, k_dim)),
        B.unflatten(1, (num_groups, k_dim)),
        x.unflatten(1, (num_heads, v_dim)),
        step * -inputs.A_log.float().exp(),
        step,
        inputs.D.float(),
        state,
        *index,
        scale=1.0,
        impl=f"recurrent_{impl}",
    )
    y = o.flatten(1).float() * F.silu(z.float())
    if inputs.norm_groups:
        parts = y.unflatten(1, (inputs.norm_groups, -1))
        normed = parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + EPS)
        y = inputs.norm_weight.float() * normed.flatten(1)
    return y.to(o.dtype)


def _compiled_parts(inputs: Sequence[Step], impl: str = "triton") -> Turns:
    torch._dynamo.reset()
    step = torch.compile(partial(_parts, impl=impl), dynamic=False)
    return Turns(calls=[partial(step, each) for each in inputs])


def cases() -> Iterator[Case]:
    """Decode of 1 to 128 sequences."""
    for model in MAMBA2:
        for num_seqs in (1, 8, 32, 64, 128):
            yield _case(model, MAMBA2[model], NORM_GROUPS[model], num_seqs)


def _case(model: str, sizes: tuple[int, int, int, int], norm_groups: int, num_seqs: int) -> Case:
    return Case(
        op="Mamba2 step",
        model=model,
        shape=f"{num_seqs}x1",
        make=partial(Step.make, sizes, norm_groups, num_seqs),
        reference=partial(call, impl="torch"),
        own=own(IMPLEMENTATIONS, call),
        others={"open chunks": open_chunks(ssd_step, value), "parts": _compiled_parts},
    )
