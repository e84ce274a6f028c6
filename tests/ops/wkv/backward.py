"""Arguments of the backward."""

from __future__ import annotations

import torch

from tests.ops.packed_backward import moved
from torch_hybrid.ops.wkv.training.op import WkvBackward

LENGTHS = (70, 0, 1, 200, 64)


def make_backward(
    lengths: tuple[int, ...] = LENGTHS,
    *,
    num_channels: int = 21,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    num_padding_tokens: int = 7,
    has_states: bool = True,
) -> WkvBackward:
    """Make the arguments of a backward, with NaN in rows of padding, with states at both ends or at
    none."""
    T, C, N = sum(lengths) + num_padding_tokens, num_channels, len(lengths)
    k, v, dout = torch.randn(3, T, C).to(dtype)
    for each in (k, v, dout):
        each[sum(lengths) :] = torch.nan
    initial, dfinal = torch.randn(2, N, 3, C)
    initial[:, 1].exp_()
    x = WkvBackward(
        3 * k,
        v,
        -(1000 ** -torch.rand(C)),
        torch.randn(C),
        torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        initial if has_states else None,
        dout=dout,
        dfinal_state=dfinal if has_states else None,
        impl="triton",
    )
    return moved(x, device)
