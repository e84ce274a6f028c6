"""A decode step of lightning's mixer between its projections: in one op, and in its parts."""

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
from torch_hybrid.layers.lightning_attention import alibi_slopes
from torch_hybrid.layers.rotary import Rotary, rotate_halves
from torch_hybrid.ops.ssd import lightning_step, ssd
from torch_hybrid.ops.ssd.op_step_lightning import IMPLEMENTATIONS, LightningStep

EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixer:
    """The facts of a layer; ``rotary_dim`` 0: q and k are neither normed nor rotated."""

    num_heads: int
    dim: int
    rotary_dim: int
    norm_groups: int
    activation: str


MIXERS = {
    "Ling": Mixer(num_heads=32, dim=128, rotary_dim=64, norm_groups=8, activation="none"),
    "MiniMax-01": Mixer(num_heads=64, dim=128, rotary_dim=0, norm_groups=1, activation="silu"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Inputs):
    """One token of each sequence; q, k, v and gate are slices of one projection."""

    changed: ClassVar[tuple[str, ...]] = ("state",)

    mixer: Mixer
    projected: Tensor  # [N, 4 H D]
    norm_weights: Tensor  # [2, D]: of q and k
    angles: Tensor  # [2, N, R / 2]: cosines and sines
    slopes: Tensor  # [H]
    norm_weight: Tensor  # [H D]
    state: Tensor  # [N + 1, H, D, D]
    cu_seqlens: Tensor
    indices: Tensor

    @classmethod
    def make(cls, mixer: Mixer, num_seqs: int) -> Step:
        num_heads, dim = mixer.num_heads, mixer.dim
        turns = torch.rand(num_seqs, mixer.rotary_dim // 2) * 6
        return cls(
            mixer=mixer,
            projected=randn(num_seqs, 4 * num_heads * dim),
            norm_weights=randn(2, dim),
            angles=torch.stack([turns.cos(), turns.sin()]),
            slopes=alibi_slopes(num_heads).to(turns.device),
            norm_weight=randn(num_heads * dim),
            state=randn(num_seqs + 1, num_heads, dim, dim).float(),
            cu_seqlens=offsets(num_seqs, 1),
            indices=torch.arange(1, num_seqs + 1, dtype=torch.int32),
        )

    @property
    def is_turned(self) -> bool:
        """Whether q and k are normed and rotated."""
        return self.mixer.rotary_dim > 0

    def views(self) -> tuple[Tensor, ...]:
        """qkv and the gate."""
        width = self.mixer.num_heads * self.mixer.dim
        return self.projected.split([3 * width, width], 1)

    def pool(self) -> tuple[Tensor, ...]:
        """The states, and where they are."""
        return self.state, self.cu_seqlens, self.indices, self.indices

    @property
    def num_bytes(self) -> float:
        out = self.projected.nbytes / 4
        return self.projected.nbytes + out + self.angles.nbytes + 2 * self.state[1:].nbytes


def value(inputs: Step, impl: str) -> LightningStep:
    """The arguments of a call of this package's op."""
    mixer, turned = inputs.mixer, inputs.is_turned
    return LightningStep(
        *inputs.views(),
        *(inputs.norm_weights if turned else (None, None)),
        *(inputs.angles if turned else (None, None)),
        inputs.slopes,
        inputs.norm_weight,
        *inputs.pool(),
        activation=mixer.activation,
        scale=mixer.dim**-0.5,
        norm_groups=mixer.norm_groups,
        norm_eps=EPS,
        impl=impl,
    )


def call(inputs: Step, impl: str) -> Tensor:
    """One call of this package's op."""
    return lightning_step(value(inputs, impl))


def _parts(inputs: Step, impl: str) -> Tensor:
    """What a layer runs where it takes no whole step."""
    mixer, (qkv, gate) = inputs.mixer, inputs.views()
    qkv = F.silu(qkv) if mixer.activation == "silu" else qkv
    q, k, v = qkv.unflatten(1, (3, mixer.num_heads, mixer.dim)).unbind(1)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        x32 = x.float()
        return weight.float() * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS))

    if inputs.is_turned:
        rotary = Rotary(*inputs.angles)
        q, k = (norm(x, w) for x, w in zip((q, k), inputs.norm_weights, strict=True))
        q, k, v = rotate_halves(q, rotary), rotate_halves(k, rotary), v.float()
    g = -inputs.slopes.expand(q.shape[0], -1)
    options = {"scale": mixer.dim**-0.5, "impl": f"recurrent_{impl}"}
    o = ssd(q, k, v, g, None, None, *inputs.pool(), **options).flatten(1)
    groups = (mixer.norm_groups, -1)
    normed = norm(o.unflatten(1, groups), inputs.norm_weight.unflatten(0, groups)).flatten(1)
    return (normed * gate.float().sigmoid()).to(gate.dtype)


def _compiled_parts(inputs: Sequence[Step], impl: str = "triton") -> Turns:
    torch._dynamo.reset()
    step = torch.compile(partial(_parts, impl=impl), dynamic=False)
    return Turns(calls=[partial(step, each) for each in inputs])


def cases() -> Iterator[Case]:
    """Decode of 1 to 128 sequences."""
    for model in MIXERS:
        for num_seqs in (1, 8, 32, 64, 128):
            yield _case(model, MIXERS[model], num_seqs)


def _case(model: str, mixer: Mixer, num_seqs: int) -> Case:
    return Case(
        op="lightning step",
        model=model,
        shape=f"{num_seqs}x1",
        make=partial(Step.make, mixer, num_seqs),
        reference=partial(call, impl="torch"),
        own=own(IMPLEMENTATIONS, call),
        others={"open chunks": open_chunks(lightning_step, value), "parts": _compiled_parts},
    )
