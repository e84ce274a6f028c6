"""Arguments of the backward, and comparisons with the oracle in float64."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise

import torch
from torch import Tensor

from torch_hybrid.ops.ssd.training.op import SsdBackward, ssd_backward

LENGTHS = (33, 0, 1, 46)
NAMES = ["dq", "dk", "dv", "dg", "ddt", "dD", "dinitial_state"]


def make_backward(
    lengths: tuple[int, ...] = LENGTHS,
    *,
    heads: tuple[int, int] = (2, 12),
    dims: tuple[int, int] = (16, 24),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    num_padding_tokens: int = 7,
    is_mamba2: bool = True,
) -> SsdBackward:
    """Make the arguments of a backward of Mamba2, with states at both ends, or of lightning
    attention, which has no weights and no states here."""
    (G, H), (K, V), N = heads, dims, len(lengths)
    T = sum(lengths) + num_padding_tokens
    dt = torch.rand(T, H)
    states = (torch.randn(N, H, V, K) if is_mamba2 else None for _ in range(2))
    x = SsdBackward(
        *(torch.randn(T, G, K).div(4).to(dtype) for _ in range(2)),
        torch.randn(T, H, V).to(dtype),
        dt * -torch.logspace(-4, 0.7, H),
        dt if is_mamba2 else None,
        torch.randn(H) if is_mamba2 else None,
        torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        next(states),
        dout=torch.randn(T, H, V).to(dtype),
        dfinal_state=next(states),
        scale=1.0 if is_mamba2 else 0.25,
        impl="triton",
    )
    return moved(x, device)


def tensors(x: SsdBackward) -> dict[str, Tensor]:
    """List the tensors among the arguments."""
    given = {f.name: getattr(x, f.name) for f in fields(x)}
    return {name: each for name, each in given.items() if isinstance(each, Tensor)}


def moved(x: SsdBackward, device: str) -> SsdBackward:
    """Move all tensors of the arguments to a device."""
    return replace(x, **{name: each.to(device) for name, each in tensors(x).items()})


def gradients(x: SsdBackward, impl: str = "triton") -> tuple[Tensor, ...]:
    """Call the op."""
    given = {f.name: getattr(x, f.name) for f in fields(x)}
    grads: tuple[Tensor, ...] = ssd_backward(**{**given, "impl": impl})
    return grads


def check(x: SsdBackward, tolerance: float) -> None:
    """Compare with the oracle in float64, by the norms of all gradients."""
    given = tensors(moved(x, "cpu")).items()
    wide = replace(x, **{n: t.double() if t.is_floating_point() else t for n, t in given})
    grads = gradients(x)
    for name, got, exact in zip(NAMES, grads, gradients(wide, "torch"), strict=True):
        assert got.shape == exact.shape, name
        off = (got.cpu().double() - exact).norm()
        assert off <= tolerance * exact.norm(), f"{name}: {off / exact.norm()}"
    for got in grads[:5]:
        assert not got[int(x.cu_seqlens[-1]) :].any()


def check_single(x: SsdBackward) -> None:
    """Check that each sequence has the bits that it has alone."""
    packed = gradients(x)
    for n, (begin, end) in enumerate(pairwise(x.cu_seqlens.tolist())):
        given = tensors(x)
        own = {name: given[name][begin:end] for name in ("q", "k", "v", "g", "dt", "dout")}
        for name in ("initial_state", "dfinal_state"):
            own[name] = given[name][n : n + 1]
        own["cu_seqlens"] = x.cu_seqlens.new_tensor([0, end - begin])
        alone = gradients(replace(x, **own))
        assert all(torch.equal(a, b[begin:end]) for a, b in zip(alone[:5], packed, strict=False))
        assert torch.equal(alone[6], packed[6][n : n + 1])
