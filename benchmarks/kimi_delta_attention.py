"""Kimi delta attention against the memory, matrix products, and the gated delta rule.

    python -m benchmarks.kimi_delta_attention [--threads N] [--seconds S] [--cpu-time]

How it is measured is said in delta_rule.py. A prefill is also compared with the gated delta rule at
its default chunk size on the same shape, and with the projections of the same layer: those of
Kimi-Linear (32 heads, model width 2304), and of a layer with 16 heads and width 1024.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import linear

from benchmarks.delta_rule import HEAD_DIM, Contestants, Rule, main
from benchmarks.gated_delta_rule import GATED_DELTA_RULE
from tests.ops.delta_rule.kimi import make_inputs
from torch_hybrid.ops.delta_rule import kimi_delta_attention

MODEL_DIMS = {16: 1024, 32: 2304}  # by number of heads


def projections(num_heads: int, num_tokens: int, dtype: torch.dtype) -> Callable[[], None]:
    """q, k, v and beta, the two factors of the decay and of the output gate, and the output."""
    model_dim, inner = MODEL_DIMS[num_heads], num_heads * HEAD_DIM
    x = torch.randn(num_tokens, model_dim, dtype=dtype)
    mixed = torch.randn(3 * inner + num_heads + 2 * HEAD_DIM, model_dim, dtype=dtype)
    low_rank = torch.randn(inner, HEAD_DIM, dtype=dtype)
    out = torch.randn(model_dim, inner, dtype=dtype)

    def run() -> None:
        y = linear(x, mixed)
        linear(y[:, :HEAD_DIM], low_rank)
        linear(linear(y[:, :HEAD_DIM], low_rank), out)

    return run


def rivals(num_heads: int, num_tokens: int, dtype: torch.dtype) -> Contestants:
    inputs = GATED_DELTA_RULE.inputs((num_tokens,), (num_heads, num_heads), dtype)
    return {
        "gated delta rule": lambda: GATED_DELTA_RULE.op(
            *inputs.args(), **inputs.options(), impl="chunk_cpp"
        ),
        "projections": projections(num_heads, num_tokens, dtype),
    }


KIMI_DELTA_ATTENTION = Rule(
    op=kimi_delta_attention,
    make_inputs=make_inputs,
    heads=((16, 16), (32, 32)),
    num_tokens=(512, 2048),
    rivals=rivals,
)

if __name__ == "__main__":
    main(KIMI_DELTA_ATTENTION, __doc__.splitlines()[0])
