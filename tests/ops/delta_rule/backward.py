"""Arguments of both rules' backwards."""

from __future__ import annotations

import torch
from torch.nn.functional import normalize

from tests.ops.packed_backward import moved
from torch_hybrid.ops.core.declare import DECLARED
from torch_hybrid.ops.delta_rule.training.op import TrainedDeltaRule

LENGTHS = (33, 0, 1, 46)


def make_backward(
    lengths: tuple[int, ...] = LENGTHS,
    *,
    heads: tuple[int, int] = (1, 3),
    dims: tuple[int, int] = (16, 24),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    qk_l2norm: bool = False,
    num_padding_tokens: int = 7,
    by_channel: bool = False,
    has_states: bool = True,
    most: float = 1.0,
) -> TrainedDeltaRule:
    """Make the arguments of a backward, of unit keys and, if it ``has_states``, of states at both
    ends; log decays are from minus ``most`` to 0."""
    (H, HV), (K, V), N = heads, dims, len(lengths)
    T = sum(lengths) + num_padding_tokens
    H = HV if by_channel else H
    rows = (
        normalize(torch.randn(T, H, K), dim=-1),
        normalize(torch.randn(T, H, K), dim=-1),
        torch.randn(T, HV, V),
    )
    initial, dfinal = torch.randn(2, N, HV, V, K) if has_states else (None, None)
    rule = "kimi_delta_attention" if by_channel else "gated_delta_rule"
    x = DECLARED[f"{rule}_backward"].cls(
        *(each.to(dtype) for each in rows),
        -most * torch.rand(T, HV, *([K] if by_channel else [])),
        torch.rand(T, HV),
        torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        initial,
        dout=torch.randn(T, HV, V).to(dtype),
        dfinal_state=dfinal,
        scale=K**-0.5,
        qk_l2norm=qk_l2norm,
        impl="triton",
    )
    return moved(x, device)
