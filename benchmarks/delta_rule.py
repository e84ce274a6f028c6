"""A delta rule against the memory (decode) and against matrix products (prefill).

Decode is that of benchmarks/recurrence.py. Prefill: the rate counts the products of the chunk form,
and is compared with that of a 2048^3 product. Contestants take turns and the fastest run of each
counts. Each shape is first compared with the torch form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.recurrence import decode, runner
from benchmarks.timing import Clock, clock_arguments, clock_of
from tests.ops.delta_rule.cases import Case, Inputs
from torch_hybrid.ops.core.recurrence import CHUNK_SIZES

MATRIX = 2048
HEAD_DIM = 128

Contestants = Mapping[str, Callable[[], object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A delta rule's op, its inputs, and the heads (of keys, of values) of its models' layers.

    ``rivals`` makes more contestants of a prefill, by the name to print, for heads and tokens.
    """

    op: Callable[..., Tensor]
    make_inputs: Callable[[Case, torch.dtype], Inputs]
    heads: tuple[tuple[int, int], ...]
    num_tokens: tuple[int, ...] = (2048,)
    rivals: Callable[[int, int, torch.dtype], Contestants] = field(default=lambda *_: {})

    def inputs(
        self, lengths: tuple[int, ...], heads: tuple[int, int], dtype: torch.dtype
    ) -> Inputs:
        """One layer's inputs, every sequence continuing a state."""
        case = Case(
            lengths=lengths,
            num_k_heads=heads[0],
            num_v_heads=heads[1],
            k_dim=HEAD_DIM,
            v_dim=HEAD_DIM,
        )
        inputs = self.make_inputs(case, dtype)
        inputs.initial_indices.copy_(inputs.state_indices)
        inputs.state.nan_to_num_()
        return inputs


def chunk_flops(num_tokens: int, num_heads: int, chunk: int) -> float:
    """As counted for the chunk form with both triangular products in full."""
    per_chunk = 6 * chunk * HEAD_DIM**2 + 2 * chunk**2 * 5 * HEAD_DIM
    return num_heads * num_tokens / chunk * (per_chunk + 2 / 3 * chunk**3)


def prefill(
    rule: Rule, heads: tuple[int, int], num_tokens: int, dtype: torch.dtype, clock: Clock
) -> None:
    a = torch.randn(MATRIX, MATRIX)
    inputs = rule.inputs((num_tokens,), heads, dtype)
    rivals = rule.rivals(heads[1], num_tokens, dtype)
    chunks = {str(size): runner(rule.op, inputs, chunk_size=size) for size in CHUNK_SIZES}
    best = clock.fastest({**chunks, **rivals, "matrix": lambda: a @ a})
    rate = 2 * MATRIX**3 / best["matrix"]
    print(
        f"prefill {num_tokens} {str(dtype)[6:]} heads {heads[0]}/{heads[1]}, matrix product "
        f"{rate / 1e9:.0f} GFLOP/s",
        *(f", {name} {best[name] * 1e3:.1f} ms" for name in rivals),
        sep="",
    )
    for size in CHUNK_SIZES:
        flops, time = chunk_flops(num_tokens, heads[1], size), best[str(size)]
        print(
            f"    chunk {size:3}: {time * 1e3:6.1f} ms, {flops / time / 1e9:4.0f} GFLOP/s, "
            f"{flops / time / rate:.2f} of a matrix product",
            *(f", {time / best[name]:.2f} of {name}" for name in rivals),
            sep="",
        )


def main(rule: Rule, description: str) -> None:
    """The command line of a rule's benchmark."""
    clock = clock_of(clock_arguments(description).parse_args())
    for batch in (1, 2, 4, 8, 16, 32):
        inputs = rule.inputs((1,) * batch, rule.heads[0], torch.float32)
        decode(f"{rule.heads[0][1]} heads", rule.op, inputs, clock)
    for dtype in (torch.float32, torch.bfloat16):
        for heads in rule.heads:
            for num_tokens in rule.num_tokens:
                prefill(rule, heads, num_tokens, dtype, clock)
