"""Arguments of both rules' backwards, and comparisons with the oracle in float64."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import normalize

from torch_hybrid.ops.delta_rule.training import (
    gated_delta_rule_backward,
    kimi_delta_attention_backward,
)
from torch_hybrid.ops.delta_rule.training.op import (
    GatedDeltaRuleBackward,
    KimiDeltaAttentionBackward,
)

LENGTHS = (33, 0, 1, 46)
DeltaRuleBackward = GatedDeltaRuleBackward | KimiDeltaAttentionBackward


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
) -> DeltaRuleBackward:
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
    rule = KimiDeltaAttentionBackward if by_channel else GatedDeltaRuleBackward
    x = rule(
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


def tensors(x: DeltaRuleBackward) -> dict[str, Tensor]:
    """List the tensors among the arguments."""
    given = {f.name: getattr(x, f.name) for f in fields(x)}
    return {name: each for name, each in given.items() if isinstance(each, Tensor)}


def moved(x: DeltaRuleBackward, device: str) -> DeltaRuleBackward:
    """Move all tensors of the arguments to a device."""
    return replace(x, **{name: each.to(device) for name, each in tensors(x).items()})


def gradients(x: DeltaRuleBackward, impl: str = "triton") -> tuple[Tensor, ...]:
    """Call the op."""
    by_channel = isinstance(x, KimiDeltaAttentionBackward)
    op = kimi_delta_attention_backward if by_channel else gated_delta_rule_backward
    given = {f.name: getattr(x, f.name) for f in fields(x)}
    grads: tuple[Tensor, ...] = op(**{**given, "impl": impl})
    return grads


def check(x: DeltaRuleBackward, tolerance: float) -> None:
    """Compare with the oracle in float64, by the norms of all gradients."""
    given = tensors(moved(x, "cpu")).items()
    wide = replace(x, **{n: t.double() if t.is_floating_point() else t for n, t in given})
    grads = gradients(x)
    for got, exact in zip(grads, gradients(wide, "torch"), strict=True):
        off = (got.cpu().double() - exact).norm()
        assert off <= tolerance * exact.norm(), off / exact.norm()
    for got in grads[:5]:
        assert not got[int(x.cu_seqlens[-1]) :].any()


def check_single(x: DeltaRuleBackward) -> None:
    """Check that each sequence has the bits that it has alone."""
    packed = gradients(x)
    for n, (begin, end) in enumerate(pairwise(x.cu_seqlens.tolist())):
        given = tensors(x)
        own = {name: given[name][begin:end] for name in ("q", "k", "v", "g", "beta", "dout")}
        for name in given.keys() & {"initial_state", "dfinal_state"}:
            own[name] = given[name][n : n + 1]
        own["cu_seqlens"] = x.cu_seqlens.new_tensor([0, end - begin])
        alone = gradients(replace(x, **own))
        assert all(torch.equal(a, b[begin:end]) for a, b in zip(alone[:5], packed, strict=False))
        if x.initial_state is not None:
            assert torch.equal(alone[5], packed[5][n : n + 1])
