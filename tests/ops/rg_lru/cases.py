"""Inputs of the real-gated linear recurrent unit: shapes of real models and odd small ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.ops.pages import offsets


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Lengths of the sequences, and the shape of one layer."""

    lengths: tuple[int, ...]
    num_heads: int = 2
    head_dim: int = 24
    num_padding_tokens: int = 0

    @property
    def channels(self) -> int:
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The tensors of a call, in the op's order."""

    x: Tensor  # [T, C]
    gates: Tensor  # [T, H, 2 C / H]
    log_a: Tensor  # [C]
    state: Tensor  # [S, C]
    cu_seqlens: Tensor  # [N + 1]
    initial_indices: Tensor  # [N]
    state_indices: Tensor  # [N]

    def args(self) -> tuple[Tensor, ...]:
        return (
            self.x,
            self.gates,
            self.log_a,
            self.state,
            self.cu_seqlens,
            self.initial_indices,
            self.state_indices,
        )

    def options(self) -> dict[str, Any]:
        """There are none."""
        return {}

    def tokens(self, index: Any) -> dict[str, Tensor]:
        """What is given for each token, of some of them."""
        return {"x": self.x[index], "gates": self.gates[index]}

    def copy(self) -> Inputs:
        """The same inputs with a state of their own."""
        return replace(self, state=self.state.clone())

    def exact(self) -> Inputs:
        """The same values in float64."""
        names = ("x", "gates", "log_a", "state")
        return replace(self, **{name: getattr(self, name).double() for name in names})


CASES = {
    "one_token": Case(lengths=(1,), num_heads=1, head_dim=16),
    "decode": Case(lengths=(1,) * 5, num_heads=3, head_dim=70),
    "mixed": Case(lengths=(5, 0, 1, 70, 3, 2, 64), num_padding_tokens=3),
    "one_channel": Case(lengths=(3, 9), num_heads=1, head_dim=1),
    "odd": Case(lengths=(33, 2, 17), num_heads=5, head_dim=19),
    "recurrentgemma_2b": Case(lengths=(1, 130, 16), num_heads=10, head_dim=256),
}


def make_inputs(case: Case, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    """Random inputs that are forgotten over 1 to 1000 tokens; x is a slice of a projection, and
    gates are as a product for each head gives them.

    Slots that no sequence starts from hold NaN: those of new sequences, and the null slot.
    """
    rng = torch.Generator().manual_seed(seed)
    num_seqs, num_slots = len(case.lengths), len(case.lengths) + 3
    num_tokens = sum(case.lengths) + case.num_padding_tokens
    projected = torch.randn(num_tokens, case.channels + 24, generator=rng).to(dtype)
    gates = torch.randn(case.num_heads, num_tokens, 2 * case.head_dim, generator=rng).to(dtype)
    state = torch.randn(num_slots, case.channels, generator=rng)
    state_indices = 1 + torch.randperm(num_slots - 2, generator=rng)[:num_seqs]
    is_new = torch.arange(num_seqs) % 3 == 1
    state[state_indices[is_new]] = torch.nan
    state[0] = torch.nan
    return Inputs(
        x=projected[:, : case.channels],
        gates=gates.transpose(0, 1),
        log_a=-(1000 ** -torch.rand(case.channels, generator=rng)),
        state=state,
        cu_seqlens=offsets(case.lengths),
        initial_indices=torch.where(is_new, 0, state_indices).int(),
        state_indices=state_indices.int(),
    )
