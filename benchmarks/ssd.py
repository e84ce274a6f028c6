"""Scalar-decay linear attention against the memory (decode) and against matrix products (prefill).

    python -m benchmarks.ssd [--threads N] [--seconds S] [--cpu-time]

Decode is that of benchmarks/recurrence.py. Prefill: the rate counts the products of the chunk form
and is compared with that of a 2048^3 product; the time is compared with that of the
projections of the same layer at model width 1024. Contestants take turns and the fastest run of
each counts. Each shape is first compared with the torch form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from benchmarks.recurrence import decode, runner
from benchmarks.timing import Clock, clock_arguments, clock_of
from tests.ops.ssd.cases import Case, Inputs, make_inputs
from torch_hybrid.ops.core.recurrence import CHUNK_SIZES
from torch_hybrid.ops.ssd import ssd

MATRIX = 2048
MODEL_DIM = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer of some 200M parameters' model: its mixer's shape and its projections' widths."""

    case: Case
    in_features: int  # of its output projection
    out_features: int  # of all its input projections together


def _mamba2(num_heads: int, v_dim: int, k_dim: int, num_groups: int) -> Layer:
    case = Case(lengths=(), num_groups=num_groups, num_heads=num_heads, k_dim=k_dim, v_dim=v_dim)
    inner = num_heads * v_dim
    widths = 2 * inner + 2 * num_groups * k_dim + num_heads  # z, x, B and C, dt
    return Layer(case=case, in_features=inner, out_features=widths)


def _lightning(num_heads: int, head_dim: int) -> Layer:
    case = Case(
        lengths=(),
        num_groups=num_heads,
        num_heads=num_heads,
        k_dim=head_dim,
        v_dim=head_dim,
        lightning=True,
    )
    inner = num_heads * head_dim
    return Layer(case=case, in_features=inner, out_features=4 * inner)  # q, k, v and the gate


LAYERS = {
    "mamba2 32x64, N 128": _mamba2(32, 64, 128, 1),
    "mamba2 32x64, N 256": _mamba2(32, 64, 256, 1),
    "mamba2 32x64, N 128, G 8": _mamba2(32, 64, 128, 8),
    "lightning 16x128": _lightning(16, 128),
    "lightning 16x96": _lightning(16, 96),
}


def layer_inputs(layer: Layer, lengths: tuple[int, ...], dtype: torch.dtype) -> Inputs:
    inputs = make_inputs(replace(layer.case, lengths=lengths), dtype)
    inputs.initial_indices.copy_(inputs.state_indices)
    inputs.state.nan_to_num_()
    return inputs


def projections(layer: Layer, num_tokens: int, dtype: torch.dtype) -> Callable[[], object]:
    x = torch.randn(num_tokens, MODEL_DIM, dtype=dtype)
    y = torch.randn(num_tokens, layer.in_features, dtype=dtype)
    w_in = torch.randn(layer.out_features, MODEL_DIM, dtype=dtype)
    w_out = torch.randn(MODEL_DIM, layer.in_features, dtype=dtype)
    linear = torch.nn.functional.linear
    return lambda: (linear(x, w_in), linear(y, w_out))


def chunk_flops(case: Case, num_tokens: int, chunk: int) -> float:
    """As counted for the chunk form, of the triangular products the half that is not zero."""
    heads = case.num_heads * (4 * case.k_dim * case.v_dim + chunk * case.v_dim)
    return num_tokens * (heads + case.num_groups * chunk * case.k_dim)


def prefill(dtype: torch.dtype, clock: Clock) -> None:
    a = torch.randn(MATRIX, MATRIX)
    for name, layer in LAYERS.items():
        for num_tokens in (512, 2048):
            inputs = layer_inputs(layer, (num_tokens,), dtype)
            contestants: dict[str, Callable[[], object]] = {
                str(size): runner(ssd, inputs, chunk_size=size) for size in CHUNK_SIZES
            }
            contestants["matrix"] = lambda: a @ a
            contestants["projections"] = projections(layer, num_tokens, dtype)
            best = clock.fastest(contestants)
            rate = 2 * MATRIX**3 / best["matrix"]
            print(
                f"prefill {num_tokens:4} {str(dtype)[6:]:8} {name:24}, {rate / 1e9:.0f} GFLOP/s, "
                f"projections {best['projections'] * 1e3:6.2f} ms"
            )
            for size in CHUNK_SIZES:
                time_, flops = best[str(size)], chunk_flops(layer.case, num_tokens, size)
                print(
                    f"    chunk {size:3}: {time_ * 1e3:6.2f} ms, {flops / time_ / rate:.2f} of a "
                    f"matrix product, {time_ / best['projections']:.2f} of the projections"
                )


def main() -> None:
    clock = clock_of(clock_arguments(__doc__.splitlines()[0]).parse_args())
    for name, layer in LAYERS.items():
        for batch in (1, 8, 32):
            inputs = layer_inputs(layer, (1,) * batch, torch.float32)
            decode(name, ssd, inputs, clock)
    for dtype in (torch.float32, torch.bfloat16):
        prefill(dtype, clock)


if __name__ == "__main__":
    main()
