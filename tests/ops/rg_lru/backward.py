"""Arguments of the backward."""

from __future__ import annotations

import torch

from tests.ops.packed_backward import moved
from torch_hybrid.ops.rg_lru.training.op import RgLruBackward

LENGTHS = (70, 0, 1, 200, 64)


def make_backward(
    lengths: tuple[int, ...] = LENGTHS,
    *,
    num_heads: int = 3,
    head_dim: int = 7,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    num_padding_tokens: int = 7,
    has_states: bool = True,
) -> RgLruBackward:
    """Make the arguments of a backward, with NaN in rows of padding, with states at both ends or at
    none."""
    T, C, N = sum(lengths) + num_padding_tokens, num_heads * head_dim, len(lengths)
    rows, dout = torch.randn(2, T, C).to(dtype)
    rows[sum(lengths) :] = dout[sum(lengths) :] = torch.nan
    states = torch.randn(2, N, C) if has_states else (None, None)
    x = RgLruBackward(
        rows,
        torch.randn(T, num_heads, 2 * head_dim).to(dtype),
        -(1000 ** -torch.rand(C)),
        torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        states[0],
        dout=dout,
        dfinal_state=states[1],
        impl="triton",
    )
    return moved(x, device)
