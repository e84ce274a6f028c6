"""Backwards of ops over packed sequences: calls of them, and comparisons with the oracle."""

from __future__ import annotations

from dataclasses import fields, replace
from importlib import import_module
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from tests.ops.registered import public_ops
from torch_hybrid.ops.core.declaration import Declaration
from torch_hybrid.ops.core.declare import DECLARED, Op, Rows

Backward = TypeVar("Backward", bound=Op)
OPS = public_ops()


def tensors(x: Op) -> dict[str, Tensor]:
    """List the tensors among the arguments."""
    given = {f.name: getattr(x, f.name) for f in fields(x)}
    return {name: each for name, each in given.items() if isinstance(each, Tensor)}


def moved(x: Backward, device: str) -> Backward:
    """Move all tensors of the arguments to a device."""
    return replace(x, **{name: each.to(device) for name, each in tensors(x).items()})


def make_channels(
    name: str,
    lengths: tuple[int, ...] = (70, 0, 1, 200, 64),
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    num_padding_tokens: int = 7,
    has_states: bool = True,
    **sizes: int,
) -> Op:
    """Make the arguments of the backward of a recurrence of single channels from its cases, with
    NaN in rows of padding, and with states at both ends or at none."""
    cases = import_module(f"tests.ops.{name}.cases")
    case = cases.Case(lengths=lengths, num_padding_tokens=num_padding_tokens, **sizes)
    x = cases.make_inputs(case, dtype)
    given = x.tokens(slice(None))
    given["dout"] = torch.randn_like(next(iter(given.values())))
    given = {name: rows.contiguous() for name, rows in given.items()}
    for rows in given.values():
        rows[sum(lengths) :] = torch.nan
    if has_states:  # of slots that hold none, those of the last, which nobody has
        initial = x.state.where(x.state == x.state, x.state[-1])[: len(lengths)]
        given |= {"initial_state": initial, "dfinal_state": torch.randn_like(initial)}
    declaration = DECLARED[f"{name}_backward"]
    return moved(
        declaration.cls(
            **{each: given.get(each, getattr(x, each, None)) for each in declaration.kinds},
            impl="triton",
        ),
        device,
    )


def widened(x: Backward) -> Backward:
    """Convert all numbers to float64, on a CPU."""
    given = tensors(moved(x, "cpu")).items()
    return replace(x, **{n: t.double() if t.is_floating_point() else t for n, t in given})


def gradients(x: Op, impl: str = "triton") -> tuple[Tensor, ...]:
    """Call the op."""
    given = {f.name: getattr(x, f.name) for f in fields(x)}
    grads: tuple[Tensor, ...] = OPS[Declaration(type(x)).name](**given | {"impl": impl})
    return grads


def check(x: Op, tolerance: float) -> None:
    """Compare with the oracle in float64, by the norms of all gradients."""
    grads, exact = _by_name(x, gradients(x)), gradients(widened(x), "torch")
    for (name, got), of in zip(grads.items(), exact, strict=True):
        assert got.shape == of.shape, name
        off = (got.cpu().double() - of).norm()
        assert off <= tolerance * of.norm(), f"{name}: {off / of.norm()}"
        if name in _rows(x):
            assert not got[int(x.cu_seqlens[-1]) :].any(), name


def check_single(x: Op) -> None:
    """Check that each sequence has the bits that it has alone, but in what all share."""
    packed, given = _by_name(x, gradients(x)), tensors(x)
    for n, (begin, end) in enumerate(pairwise(x.cu_seqlens.tolist())):
        own = dict.fromkeys(given.keys() & _rows(x), slice(begin, end))
        own |= dict.fromkeys(given.keys() & {"initial_state", "dfinal_state"}, slice(n, n + 1))
        alone = {name: given[name][part] for name, part in own.items()}
        alone["cu_seqlens"] = x.cu_seqlens.new_tensor([0, end - begin])
        for name, grad in _by_name(x, gradients(replace(x, **alone))).items():
            if name in own:
                assert torch.equal(grad, packed[name][own[name]]), name


def _rows(x: Op) -> set[str]:
    kinds = Declaration(type(x)).kinds
    return {name for name, kind in kinds.items() if isinstance(kind, Rows)}


def _by_name(x: Op, grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Give gradients the names of their arguments, the first ones but for offsets."""
    names = [name for name in Declaration(type(x)).kinds if name != "cu_seqlens"]
    return dict(zip(names, grads, strict=False))
