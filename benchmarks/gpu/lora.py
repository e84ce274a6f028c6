"""Adapters (LoRA) of rows: what a step adds to the products of Qwen3-Next's linear layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.case import Case, Inputs, own, randn
from torch_hybrid.ops.lora import lora
from torch_hybrid.ops.lora.op import IMPLEMENTATIONS

COUNT, RANK = 8, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted(Inputs):
    """Rows whose adapters follow one another in turn; a prompt has one."""

    base: Tensor  # [T, N]
    x: Tensor  # [T, K]
    a: Tensor  # [S, P, R, K]
    b: Tensor  # [S, R, N]
    ranks: Tensor
    starts: Tensor
    slots: Tensor

    @classmethod
    def make(cls, depth: int, widths: tuple[int, ...], num_tokens: int) -> Adapted:
        parts, width = len(widths), sum(widths)
        turns = torch.arange(num_tokens, dtype=torch.int32)
        return cls(
            base=randn(num_tokens, width),
            x=randn(num_tokens, depth),
            a=randn(COUNT, parts, RANK, depth) * depth**-0.5,
            b=randn(COUNT, RANK, width) * RANK**-0.5,
            ranks=torch.full((COUNT, parts), RANK, dtype=torch.int32),
            starts=torch.tensor([0, *widths]).cumsum(0).int(),
            slots=1 + (turns % COUNT if num_tokens <= 128 else 0 * turns),
        )

    @property
    def num_bytes(self) -> float:
        share = min(1, len(self.slots.unique()) / COUNT)
        return 2 * self.base.nbytes + self.x.nbytes + share * (self.a.nbytes + self.b.nbytes)

    @property
    def flops(self) -> float:
        return 2 * self.x.shape[0] * (self.a[0].numel() + self.b[0].numel())


def call(inputs: Adapted, impl: str) -> Tensor:
    """One call of this package's op."""
    factors = inputs.a, inputs.b, inputs.ranks, inputs.starts
    return lora(inputs.base, inputs.x, *factors, inputs.slots, impl=impl)


def cases() -> Iterator[Case]:
    """The merged projection of a linear layer, and its output's."""
    for depth, widths in ((2048, (12288, 64)), (4096, (2048,))):
        for num_tokens in (1, 8, 32, 128, 2048):
            yield Case(
                op="lora",
                model=f"{COUNT} adapters of rank {RANK}, {depth} to {sum(widths)}",
                shape=f"{num_tokens} tokens",
                make=partial(Adapted.make, depth, widths, num_tokens),
                reference=partial(call, impl="torch"),
                own=own(IMPLEMENTATIONS, call),
            )
