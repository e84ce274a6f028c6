"""Arguments of the backward."""

from __future__ import annotations

import torch

from tests.ops.packed_backward import moved
from torch_hybrid.ops.core.declare import DECLARED
from torch_hybrid.ops.selective_scan.training.op import TrainedSelectiveScan

LENGTHS = (33, 0, 1, 46)


def make_backward(
    lengths: tuple[int, ...] = LENGTHS,
    *,
    sizes: tuple[int, int, int] = (2, 38, 12),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    num_padding_tokens: int = 7,
    is_whole: bool = True,
) -> TrainedSelectiveScan:
    """Make the arguments of a backward, or of one without D, gate, bias and states.

    Args:
        lengths: of the sequences.
        sizes: groups, channels and states of each.
        dtype: of rows.
        device: of all.
        num_padding_tokens: after the last sequence.
        is_whole: whether all is given.
    """
    (G, E, M), N = sizes, len(lengths)
    T = sum(lengths) + num_padding_tokens
    x, z = torch.randn(T, 2 * E).to(dtype).chunk(2, 1)
    B, C = torch.randn(T, 2 * G, M).to(dtype).chunk(2, 1)
    A = -torch.logspace(-4, 1.2, E * M).view(E, M)
    own = (torch.randn(E), z, torch.randn(E) - 1) if is_whole else (None, None, None)
    states = (torch.randn(N, E, M) if is_whole else None for _ in range(2))
    given = DECLARED["selective_scan_backward"].cls(
        *(x, torch.randn(T, E).to(dtype), A, B, C, *own),
        torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        next(states),
        dout=torch.randn(T, E).to(dtype),
        dfinal_state=next(states),
        impl="triton",
    )
    return moved(given, device)
