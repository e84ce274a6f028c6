"""Inputs for the linear op: layers of real models, and sizes that leave tails everywhere."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.ops.block_scales import in_blocks
from tests.ops.integers import in_integers, whole_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Sibling linears of one input; ``biased`` names those with a bias."""

    num_rows: int
    depth: int
    widths: tuple[int, ...]
    biased: frozenset[int] = frozenset()


CASES = {
    "decode_qkv": Case(num_rows=1, depth=1024, widths=(2048, 512, 512)),
    "decode_in_proj": Case(num_rows=8, depth=1024, widths=(1536, 512, 16, 16)),
    "decode_down": Case(num_rows=4, depth=3072, widths=(512,)),
    "two_rows": Case(num_rows=2, depth=640, widths=(130,), biased=frozenset({0})),
    "three_rows_odd": Case(num_rows=3, depth=1027, widths=(17, 33), biased=frozenset({1})),
    "five_rows_odd": Case(num_rows=5, depth=77, widths=(1, 2, 3), biased=frozenset({0, 2})),
    "thirteen_rows": Case(num_rows=13, depth=2100, widths=(66, 7), biased=frozenset({0, 1})),
    "one_by_one": Case(num_rows=1, depth=1, widths=(1,), biased=frozenset({0})),
    "most_rows": Case(num_rows=64, depth=96, widths=(40, 9), biased=frozenset({1})),
    "most_rows_in_parts": Case(num_rows=41, depth=512, widths=(40, 9), biased=frozenset({1})),
    "prefill": Case(num_rows=130, depth=256, widths=(96, 32), biased=frozenset({0})),
    "many_deep": Case(num_rows=53, depth=1120, widths=(97, 3), biased=frozenset({0})),
    "several_stretches": Case(num_rows=530, depth=96, widths=(100,), biased=frozenset({0})),
    "no_rows": Case(num_rows=0, depth=32, widths=(8, 8)),
    "no_depth": Case(num_rows=7, depth=0, widths=(5, 4), biased=frozenset({0})),
}

Inputs = tuple[Tensor, list[Tensor], list[Tensor | None]]


def make_inputs(case: Case, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    """x, weights and biases; x is a slice of a wider tensor whose other columns are NaN."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.full((case.num_rows, case.depth + 5), torch.nan)
    wide[:, 3 : 3 + case.depth] = torch.randn(case.num_rows, case.depth, generator=generator)
    scale = max(case.depth, 1) ** -0.5
    weights = [torch.randn(n, case.depth, generator=generator) * scale for n in case.widths]
    biases = [
        torch.randn(n, generator=generator).to(dtype) if i in case.biased else None
        for i, n in enumerate(case.widths)
    ]
    x = wide.to(dtype)[:, 3 : 3 + case.depth]
    return x, [weight.to(dtype) for weight in weights], biases


def make_fp8_inputs(
    case: Case, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Inputs, list[Tensor]]:
    """The same with weights of 8 bits, and their scales."""
    x, weights, biases = make_inputs(case, dtype=torch.float32, seed=seed)
    numbers, scales = zip(*map(in_blocks, weights), strict=True)
    rounded = [None if bias is None else bias.to(dtype) for bias in biases]
    return (x.to(dtype), list(numbers), rounded), list(scales)


def make_mixed_inputs(
    case: Case, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Inputs, list[Tensor]]:
    """The same, all but the first half of the weights of x's own dtype."""
    (x, numbers, biases), scales = make_fp8_inputs(case, dtype=dtype, seed=seed)
    _, weights, _ = make_inputs(case, dtype=dtype, seed=seed)
    num_scaled = (len(weights) + 1) // 2
    return (x, numbers[:num_scaled] + weights[num_scaled:], biases), scales[:num_scaled]


def make_integer_inputs(
    case: Case, name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Inputs, list[Tensor]]:
    """The same with integers as weights, ``name`` of ``FORMATS``, whole groups of them."""
    case = replace(case, depth=whole_groups(case.depth, name))
    x, weights, biases = make_inputs(case, dtype=torch.float32, seed=seed)
    numbers, scales = zip(*(in_integers(weight, name) for weight in weights), strict=True)
    rounded = [None if bias is None else bias.to(dtype) for bias in biases]
    return (x.to(dtype), list(numbers), rounded), list(scales)
