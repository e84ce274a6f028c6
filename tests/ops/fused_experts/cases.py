"""Inputs for the fused experts: real shapes made narrow, and routings that go to the extremes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tests.ops.block_scales import in_blocks
from tests.ops.contract import rows_apart
from tests.ops.integers import in_integers, whole_groups
from torch_hybrid.ops.formats.stored_weights import depth_of
from torch_hybrid.ops.fused_experts.op import HAS_GATE, FusedExperts
from torch_hybrid.ops.fused_experts.reference import sum_experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``routing``: "spread" picks k distinct experts per token, "one" sends all to one expert,
    "some_none" leaves out about half of the choices, "none" all of them. Without a gate, as with
    the activation "relu2", there is one row of ``gate_up`` for each hidden unit. ``limit`` is one
    that some of the gates and of the rows of up are beyond, ``softcaps`` bend most of them."""

    num_tokens: int
    num_experts: int = 8
    top_k: int = 2
    dim: int = 64
    width: int = 32
    routing: str = "spread"
    activation: str = "silu"
    limit: float | None = None
    softcaps: tuple[float, float] | None = None

    def options(self) -> dict[str, Any]:
        """How the op is told to activate."""
        bounds = {"limit": self.limit, "softcaps": self.softcaps}
        return {"activation": self.activation, **bounds}


CASES = {
    "decode": Case(num_tokens=1, num_experts=32, top_k=8, dim=512, width=256),
    "batch": Case(num_tokens=9, num_experts=16, top_k=4, dim=256, width=160),
    "odd_sizes": Case(num_tokens=7, num_experts=5, top_k=3, dim=77, width=45),
    "prefill": Case(num_tokens=150, num_experts=8, top_k=2),
    "one_expert_for_all": Case(num_tokens=70, routing="one"),
    "one_expert_exists": Case(num_tokens=3, num_experts=1, top_k=1),
    "some_choices_empty": Case(num_tokens=20, top_k=3, routing="some_none"),
    "all_choices_empty": Case(num_tokens=4, routing="none"),
    "few_tokens_odd_sizes": Case(
        num_tokens=3, num_experts=5, top_k=3, dim=77, width=45, routing="some_none"
    ),
    "no_tokens": Case(num_tokens=0),
    "limit_odd_sizes": Case(num_tokens=7, num_experts=5, top_k=3, dim=37, width=25, limit=0.5),
    "limit_of_few_tokens_odd_sizes": Case(num_tokens=2, dim=37, width=25, limit=0.5),
    "softcaps_odd_sizes": Case(
        num_tokens=7, num_experts=5, top_k=3, dim=37, width=25, softcaps=(0.5, 1.5)
    ),
    "softcaps_of_few_tokens_odd_sizes": Case(num_tokens=2, dim=37, width=25, softcaps=(0.5, 1.5)),
    "no_gate_decode": Case(
        num_tokens=1, num_experts=32, top_k=6, dim=512, width=232, activation="relu2"
    ),
    "no_gate_odd_sizes": Case(
        num_tokens=7, num_experts=5, top_k=3, dim=77, width=45, activation="relu2"
    ),
    "no_gate_prefill": Case(num_tokens=150, activation="relu2"),
}

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def expected_of(inputs: Sequence[Tensor], *, rounds: bool = False, **options: Any) -> Tensor:
    """Compute the op as its definition; with ``rounds``, from rows in FP8."""
    return sum_experts(FusedExperts(*inputs, **options, impl=""), rounds=rounds)


def make_ids(case: Case, generator: torch.Generator) -> Tensor:
    """[T, k] int64, as ``case.routing`` says."""
    shape = (case.num_tokens, case.top_k)
    if case.routing in ("one", "none"):
        return torch.full(shape, case.num_experts - (case.routing == "one"))
    ids = torch.rand(case.num_tokens, case.num_experts, generator=generator).argsort(1)
    ids = ids[:, : case.top_k].contiguous()
    if case.routing == "some_none":
        ids[torch.rand(shape, generator=generator) < 0.5] = case.num_experts
    return ids


def make_inputs(case: Case, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    """x, expert_ids, expert_weights, gate_up, down; rows of x lie in a wider tensor."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(case.num_tokens, case.dim + 8, generator=generator).to(dtype)
    ids = make_ids(case, generator)
    expert_weights = torch.rand(ids.shape, generator=generator).to(dtype)
    rows = (1 + HAS_GATE[case.activation]) * case.width
    gate_up = torch.randn(case.num_experts, rows, case.dim, generator=generator)
    down = torch.randn(case.num_experts, case.dim, case.width, generator=generator)
    gate_up, down = gate_up * case.dim**-0.5, down * case.width**-0.5
    return wide[:, : case.dim], ids, expert_weights, gate_up.to(dtype), down.to(dtype)


def make_fp8_inputs(
    case: Case, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Inputs, dict[str, Tensor]]:
    """The same with weights of 8 bits, and their scales by name."""
    return _with_stored(case, "fp8", dtype, seed)


def make_stored_inputs(
    case: Case, name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Inputs, dict[str, Tensor]]:
    """The same with weights that have scales: "fp8", or a name of ``FORMATS``."""
    if name == "fp8":
        return make_fp8_inputs(case, dtype=dtype, seed=seed)
    return make_integer_inputs(case, name, dtype=dtype, seed=seed)


def make_integer_inputs(
    case: Case, name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Inputs, dict[str, Tensor]]:
    """The same with integers as weights, ``name`` of ``FORMATS``, whole groups of them."""
    dim, width = whole_groups(case.dim, name), whole_groups(case.width, name)
    return _with_stored(replace(case, dim=dim, width=width), name, dtype, seed)


def make_product(
    case: Case, stored: str | None = None, *, dtype: torch.dtype = torch.float32
) -> list[Any]:
    """Rows that lie apart for the second product alone, an expert for each, its weights, and their
    scales if they are stored."""
    if stored is None:
        (_, ids, _, _, weight), scales = make_inputs(case, dtype=dtype), None
    else:
        (_, ids, _, _, weight), found = make_stored_inputs(case, stored, dtype=dtype)
        scales = found["down_scales"]
    shape = ids.numel(), depth_of(weight)
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return [rows_apart(rows.to(dtype)), ids.flatten().int(), weight, scales]


def _with_stored(
    case: Case, stored: str, dtype: torch.dtype, seed: int
) -> tuple[Inputs, dict[str, Tensor]]:
    *tensors, gate_up_scales, down_scales = (x.clone() for x in _stored(case, stored, seed))
    x, ids, expert_weights, gate_up, down = tensors
    wide = torch.nn.functional.pad(x, (0, 8)).to(dtype)
    inputs = wide[:, : case.dim], ids, expert_weights.to(dtype), gate_up, down
    return inputs, {"gate_up_scales": gate_up_scales, "down_scales": down_scales}


@lru_cache(maxsize=64)
def _stored(case: Case, stored: str, seed: int) -> tuple[Tensor, ...]:
    """Inputs whose weights are stored so, and scales: to round weights takes longer than most of
    what tests do with them."""
    x, ids, expert_weights, gate_up, down = make_inputs(case, dtype=torch.float32, seed=seed)
    if stored == "fp8":
        num_parts = 1 + HAS_GATE[case.activation]
        gate_up, gate_up_scales = in_blocks(gate_up, num_parts=num_parts)
        down, down_scales = in_blocks(down)
    else:
        gate_up, gate_up_scales = in_integers(gate_up, stored)
        down, down_scales = in_integers(down, stored)
    return x, ids, expert_weights, gate_up, down, gate_up_scales, down_scales
