"""Inputs for the linear op: layers of real models, and sizes that leave tails everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from tests.ops.block_scales import in_blocks
from tests.ops.contract import rows_apart
from tests.ops.declared import DeclaredInputs
from tests.ops.integers import in_integers, whole_groups
from torch_hybrid.ops.linear.op import Linear, linear


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


@dataclass(slots=True, kw_only=True)
class Inputs(DeclaredInputs, Linear):
    """Arguments of one call."""

    impl: str = ""

    def run(self, impl: str) -> Tensor:
        """Call the op."""
        return linear(*self.args(), **self.options(), impl=impl)

    def args(self) -> tuple[Any, ...]:
        """Return what is given by position."""
        return self.x, self.weights, self.biases

    def options(self) -> dict[str, Any]:
        """Return what is given by name, where it is."""
        return {} if self.scales is None else {"scales": self.scales}

    def exact(self) -> Self:
        """Convert to float64 what the op computes with; weights stay as they are stored."""
        biases = [None if bias is None else bias.double() for bias in self.biases]
        scales = None
        if self.scales is not None:  # bytes of FP4 stay what they are
            floats = [scale.is_floating_point() for scale in self.scales]
            scales = [s.double() if f else s for s, f in zip(self.scales, floats, strict=True)]
        return replace(self, x=self.x.double(), biases=biases, scales=scales)

    def on_gpu(self) -> Self:
        """Copy to a GPU; rows of x lie apart."""
        moved = {
            "weights": [weight.cuda() for weight in self.weights],
            "biases": [None if bias is None else bias.cuda() for bias in self.biases],
            "scales": None if self.scales is None else [scale.cuda() for scale in self.scales],
        }
        return replace(self, x=rows_apart(self.x.cuda()), **moved)


def make_inputs(case: Case, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    """Draw x, weights and biases; x is a slice of a wider tensor whose other columns are NaN."""
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
    return Inputs(x=x, weights=[weight.to(dtype) for weight in weights], biases=biases)


def _stored(
    case: Case, store: Callable[[Tensor], tuple[Tensor, Tensor]], dtype: torch.dtype, seed: int
) -> Inputs:
    """Draw inputs whose weights are stored with scales."""
    drawn = make_inputs(case, dtype=dtype, seed=seed)
    wide = make_inputs(case, seed=seed).weights
    weights, scales = zip(*map(store, wide), strict=True)
    return replace(drawn, weights=list(weights), scales=list(scales))


def make_fp8_inputs(case: Case, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    """Draw inputs with FP8 weights."""
    return _stored(case, in_blocks, dtype, seed)


def make_stored_inputs(
    case: Case, name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Inputs:
    """Draw inputs with weights that have scales: "fp8", or a name of ``FORMATS``."""
    if name == "fp8":
        return make_fp8_inputs(case, dtype=dtype, seed=seed)
    return make_integer_inputs(case, name, dtype=dtype, seed=seed)


def make_mixed_inputs(case: Case, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    """Draw inputs of which the first half of the weights is FP8, the others have x's dtype."""
    fp8 = make_fp8_inputs(case, dtype=dtype, seed=seed)
    count = (len(fp8.weights) + 1) // 2
    others = make_inputs(case, dtype=dtype, seed=seed).weights[count:]
    assert fp8.scales is not None
    return replace(fp8, weights=[*fp8.weights[:count], *others], scales=fp8.scales[:count])


def make_integer_inputs(
    case: Case, name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Inputs:
    """Draw inputs with INT8 or INT4 weights in whole groups, ``name`` of ``FORMATS``."""
    case = replace(case, depth=whole_groups(case.depth, name))
    return _stored(case, lambda weight: in_integers(weight, name), dtype, seed)


def draws_of_integers(name: str, stored: str, *, dtype: torch.dtype) -> list[Inputs]:
    """Draws of a case that count as one.

    Of a single number the reference may be right by chance, but not in several draws; of FP4, too,
    whose few numbers are summed almost exactly, it may be nearer than it is at worst.
    """
    case = CASES[name]
    is_one_number = case.num_rows == len(case.widths) == case.widths[0] == 1
    count = 8 if is_one_number else 3 if stored.endswith("fp4") else 1
    return [make_integer_inputs(case, stored, dtype=dtype, seed=seed) for seed in range(count)]
