"""Arguments of the backward."""

from __future__ import annotations

import torch

from tests.ops.packed_backward import moved
from torch_hybrid.ops.core.declare import DECLARED
from torch_hybrid.ops.ssd.training.op import TrainedSsd

LENGTHS = (33, 0, 1, 46)


def make_backward(
    lengths: tuple[int, ...] = LENGTHS,
    *,
    heads: tuple[int, int] = (2, 12),
    dims: tuple[int, int] = (16, 24),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    num_padding_tokens: int = 7,
    is_mamba2: bool = True,
    has_skip: bool = True,
) -> TrainedSsd:
    """Make the arguments of a backward of Mamba2, with states at both ends, or of lightning
    attention, which has no weights and no states here; mLSTM has no skip, D."""
    (G, H), (K, V), N = heads, dims, len(lengths)
    T = sum(lengths) + num_padding_tokens
    dt = torch.rand(T, H)
    states = (torch.randn(N, H, V, K) if is_mamba2 else None for _ in range(2))
    x = DECLARED["ssd_backward"].cls(
        *(torch.randn(T, G, K).div(4).to(dtype) for _ in range(2)),
        torch.randn(T, H, V).to(dtype),
        dt * -torch.logspace(-4, 0.7, H),
        dt if is_mamba2 else None,
        torch.randn(H) if is_mamba2 and has_skip else None,
        torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        next(states),
        dout=torch.randn(T, H, V).to(dtype),
        dfinal_state=next(states),
        scale=1.0 if is_mamba2 else 0.25,
        impl="triton",
    )
    return moved(x, device)
