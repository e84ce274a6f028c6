"""Inputs of the gated delta rule's decode step: shapes of real models, and odd small ones.

Legend: N sequences, T tokens, C channels of the convolution, W its width, HV value heads, K and V
head dims, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from torch import Tensor

from tests.ops.pages import offsets


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Lengths of the sequences, 0 or 1 each, and the facts of one layer."""

    lengths: tuple[int, ...]
    num_k_heads: int = 2
    num_v_heads: int = 4
    k_dim: int = 16
    v_dim: int = 16
    width: int = 4
    has_bias: bool = False
    activation: str = "silu"
    beta_scale: float = 1.0
    num_padding_tokens: int = 0
    wide: bool = False  # parameters of the gates and of the norm in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The tensors of a call, in the op's order, and its options."""

    qkv: Tensor  # [T, C]
    z: Tensor  # [T, HV V]
    b: Tensor  # [T, HV]
    a: Tensor  # [T, HV]
    conv_weight: Tensor  # [C, W]
    conv_bias: Tensor | None  # [C]
    A_log: Tensor  # [HV]
    dt_bias: Tensor  # [HV]
    norm_weight: Tensor  # [V]
    conv_state: Tensor  # [S, W - 1, C]
    state: Tensor  # [S, HV, V, K]
    cu_seqlens: Tensor  # [N + 1]
    initial_indices: Tensor  # [N]
    state_indices: Tensor  # [N]
    activation: str
    scale: float
    beta_scale: float
    norm_eps: float = 1e-6

    def args(self) -> tuple[Tensor | None, ...]:
        return tuple(getattr(self, name) for name in TENSORS)

    def options(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in OPTIONS}

    def copy(self) -> Inputs:
        """The same inputs with pools of their own."""
        return replace(self, conv_state=self.conv_state.clone(), state=self.state.clone())

    def exact(self) -> Inputs:
        """The same values in float64."""
        tensors = {name: getattr(self, name) for name in TENSORS}
        floats = {
            n: x.double() for n, x in tensors.items() if x is not None and x.is_floating_point()
        }
        return replace(self, **floats)

    def tokens(self, index: Tensor | slice) -> dict[str, Tensor]:
        """The per-token tensors at ``index``, by name."""
        return {name: getattr(self, name)[index] for name in ("qkv", "z", "b", "a")}


OPTIONS = ("activation", "scale", "beta_scale", "norm_eps")
TENSORS = tuple(field.name for field in fields(Inputs) if field.name not in OPTIONS)

CASES = {
    "one_token": Case(lengths=(1,), num_k_heads=1, num_v_heads=1),
    "mixed": Case(lengths=(1, 0, 1, 1, 1, 0, 1), num_padding_tokens=3),
    "three_value_heads": Case(lengths=(1, 1), num_v_heads=6, k_dim=48, width=3, has_bias=True),
    "odd_dims": Case(lengths=(1, 1, 1), num_v_heads=2, k_dim=19, v_dim=27, activation="none"),
    "wide_parameters": Case(lengths=(1, 1), k_dim=64, width=8, has_bias=True, wide=True),
    "qwen3_next": Case(lengths=(1,) * 8, k_dim=128, v_dim=128),
    "olmo_hybrid": Case(
        lengths=(1, 1), num_k_heads=1, num_v_heads=1, k_dim=96, v_dim=192, beta_scale=2.0
    ),
}


def make_inputs(case: Case, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    """Random inputs; per-token tensors are slices of one projection, as a model gives them.

    Slots that no sequence starts from hold NaN: those of new sequences, and the null slot.
    """
    rng = torch.Generator().manual_seed(seed)
    randn = partial(torch.randn, generator=rng)
    num_seqs, num_slots = len(case.lengths), len(case.lengths) + 3
    num_tokens = sum(case.lengths) + case.num_padding_tokens
    v_size = case.num_v_heads * case.v_dim
    channels = 2 * case.num_k_heads * case.k_dim + v_size
    widths = [channels, v_size, case.num_v_heads, case.num_v_heads]
    qkv, z, b, a = randn(num_tokens, sum(widths)).to(dtype).split(widths, 1)
    state = randn(num_slots, case.num_v_heads, case.v_dim, case.k_dim)
    conv_state = randn(num_slots, case.width - 1, channels).to(dtype)
    state_indices = 1 + torch.randperm(num_slots - 2, generator=rng)[:num_seqs]
    is_new = torch.arange(num_seqs) % 3 == 1
    for pool in (state, conv_state):
        pool[state_indices[is_new]] = torch.nan
        pool[0] = torch.nan
    of_gates = torch.float32 if case.wide else dtype
    return Inputs(
        qkv=qkv,
        z=z,
        b=b,
        a=a,
        conv_weight=randn(channels, case.width).to(dtype),
        conv_bias=randn(channels).to(dtype) if case.has_bias else None,
        A_log=torch.rand(case.num_v_heads, generator=rng).mul(4).log().to(of_gates),
        dt_bias=(4 * randn(case.num_v_heads)).to(of_gates),
        norm_weight=randn(case.v_dim).to(of_gates),
        conv_state=conv_state,
        state=state,
        cu_seqlens=offsets(case.lengths),
        initial_indices=torch.where(is_new, 0, state_indices).int(),
        state_indices=state_indices.int(),
        activation=case.activation,
        scale=case.k_dim**-0.5,
        beta_scale=case.beta_scale,
    )
