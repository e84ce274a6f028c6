"""Inputs of the scalar-decay recurrence: shapes of real models and odd small ones.

Legend: N sequences, T tokens, G groups of q and k, H heads, K and V head dims, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.ops.declared import RecurrentInputs
from tests.ops.pages import Lengths, in_slots
from torch_hybrid.ops.ssd.op import Ssd


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(Lengths):
    """Lengths of the sequences, and the shape of one layer; ``lightning`` has neither dt nor D,
    ``mlstm`` has no D and exponential gates for dt."""

    num_groups: int = 2
    num_heads: int = 4
    k_dim: int = 16
    v_dim: int = 16
    lightning: bool = False
    mlstm: bool = False


@dataclass(slots=True, kw_only=True)
class Inputs(RecurrentInputs, Ssd):
    """The arguments of one call."""

    impl: str = ""


CASES = {
    "one_token": Case(lengths=(1,), num_groups=1, num_heads=1),
    "decode": Case(lengths=(1,) * 5, num_groups=1, num_heads=4, k_dim=32, v_dim=32),
    "mixed": Case(lengths=(5, 0, 1, 70, 33, 2, 64), num_padding_tokens=3),
    "one_head": Case(lengths=(17, 40), num_groups=1, num_heads=1, k_dim=16, v_dim=48),
    "three_heads_a_group": Case(lengths=(1, 35), num_groups=2, num_heads=6, k_dim=48, v_dim=16),
    "odd_dims": Case(lengths=(3, 37, 16), num_groups=3, num_heads=3, k_dim=19, v_dim=27),
    "odd_lightning": Case(lengths=(3, 37), num_groups=3, num_heads=3, v_dim=80, lightning=True),
    "bamba": Case(lengths=(1, 130, 16), num_groups=1, num_heads=6, k_dim=128, v_dim=64),
    "falcon_h1": Case(lengths=(66, 2), num_groups=1, num_heads=3, k_dim=256, v_dim=64),
    "minimax": Case(lengths=(65, 9), num_groups=2, num_heads=2, k_dim=96, v_dim=96, lightning=True),
    "xlstm": Case(lengths=(70, 1), num_groups=2, num_heads=2, k_dim=64, v_dim=144, mlstm=True),
    "ring": Case(lengths=(100,), num_groups=2, num_heads=2, k_dim=128, v_dim=128, lightning=True),
}


def skip_beyond(case: Case, dtype: torch.dtype) -> None:
    """Skip a test of outputs that a dtype cannot hold: they grow with e^15."""
    if case.mlstm and dtype == torch.float16:
        pytest.skip("float16 does not hold outputs of exponential gates")


def make_inputs(case: Case, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    """Random inputs with decays of 1 to 1000 tokens; in Mamba2, some tokens forget all.

    q, k and v are slices of one tensor, as a model's projection gives them. Slots that no
    sequence starts from hold NaN: those of new sequences, and the null slot.
    """
    rng = torch.Generator().manual_seed(seed)
    k_size, v_size = case.num_groups * case.k_dim, case.num_heads * case.v_dim
    vkq = torch.randn(case.num_tokens, v_size + 2 * k_size, generator=rng).to(dtype)
    v, k, q = vkq.split([v_size, k_size, k_size], dim=1)
    state = torch.randn(case.num_slots, case.num_heads, case.v_dim, case.k_dim, generator=rng)
    slots = in_slots(case.lengths, rng, state)
    draw = _slopes if case.lightning else _exponential_gates if case.mlstm else _time_steps
    g, dt, D = draw(case.num_tokens, case.num_heads, rng)
    return Inputs(
        q=q.unflatten(1, (case.num_groups, case.k_dim)),
        k=k.unflatten(1, (case.num_groups, case.k_dim)),
        v=v.unflatten(1, (case.num_heads, case.v_dim)),
        g=g,
        dt=dt,
        D=D,
        state=state,
        **slots,
        scale=case.k_dim**-0.5,
    )


def _slopes(
    num_tokens: int, num_heads: int, rng: torch.Generator
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Lightning attention: a constant decay per head, one row that serves all tokens."""
    slopes = 2 ** (-8 * torch.arange(1, num_heads + 1) / num_heads)
    return -slopes.expand(num_tokens, num_heads), None, None


def _exponential_gates(
    num_tokens: int, num_heads: int, rng: torch.Generator
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """mLSTM: gates in all that a soft cap of 15 lets through."""
    i, f = (30 * torch.rand(num_tokens, 2 * num_heads, generator=rng) - 15).chunk(2, dim=1)
    return torch.nn.functional.logsigmoid(f), i.exp(), None


def _time_steps(
    num_tokens: int, num_heads: int, rng: torch.Generator
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Mamba2: dt from 0.001 to 1 and A from -1 to -16, and now and then a full decay."""
    dt = 10 ** (-3 * torch.rand(num_tokens, num_heads, generator=rng))
    g = dt * -(1 + 15 * torch.rand(num_heads, generator=rng))
    g[torch.rand(num_tokens, generator=rng) < 0.05] = -20.0
    return g, dt, torch.randn(num_heads, generator=rng)
