"""What functions to train with refuse: bad arguments, and derivatives that they do not have."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import torch_hybrid as th
from tests.functional.recurrence import Recurrence, packing
from tests.functional.recurrences import RECURRENCES
from tests.functional.scans import SCAN
from torch_hybrid.functional import (
    causal_conv1d,
    gated_delta_rule,
    kimi_delta_attention,
    selective_scan,
)

each_function = pytest.mark.parametrize("of", RECURRENCES.values(), ids=RECURRENCES)


def leaves(of: Recurrence) -> list[Tensor]:
    return [x.requires_grad_() for x in of.inputs((5,))]


@each_function
def test_second_derivatives(of: Recurrence) -> None:
    name = rf"torch_hybrid::\w*{of.op}"
    for at in (0, 1):  # of steps by their softplus too
        xs = leaves(of)[:-1]
        (dx,) = torch.autograd.grad(of.function(*xs)[0].square().sum(), xs[at], create_graph=True)
        text = f"^{name}_backward has no derivative: {name} can be differentiated once. "
        with pytest.raises(NotImplementedError, match=text):
            dx.sum().backward()


@each_function
def test_forward_mode_and_transforms(of: Recurrence) -> None:
    x, *rest = (each.detach() for each in leaves(of)[:-1])
    text = f"{of.function.__name__} has no forward-mode derivative; use a backward"
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=f"^{text}$"):
        of.function(forward_ad.make_dual(x, torch.ones_like(x)), *rest)
    text = (
        f"torch_hybrid::{of.op}_forward differentiates by backward() alone: no transform of "
        "torch.func (grad, vjp, jvp, vmap) can pass through it"
    )
    with pytest.raises(NotImplementedError, match=re.escape(text)):
        torch.func.grad(lambda x: of.function(x, *rest)[0].sum())(x)


@each_function
def test_nothing_is_mutated(of: Recurrence) -> None:
    xs = leaves(of)
    before = [x.detach().clone() for x in xs]
    o, final = of.function(*xs[:-1], None, xs[-1])
    (o.sum() + final.sum()).backward()
    assert all(torch.equal(a, b) for a, b in zip(xs, before, strict=True))


def bad(name: str, at: int, by: Callable[[Tensor], Tensor], **options: Any) -> Callable[[], object]:
    of = RECURRENCES[name]
    xs = of.inputs((5,))
    xs[at] = by(xs[at])
    return lambda: of.function(*xs[:-1], None, xs[-1], **options)


BAD: Mapping[str, tuple[Callable[[], object], str]] = {
    "k": (bad("gated", 1, lambda k: k[:4]), "k must have shape [5, 2, 16], got [4, 2, 16]"),
    "g": (bad("gated", 3, lambda g: g[..., None]), "g must have shape [5, 4], got [5, 4, 1]"),
    "g of kimi": (
        bad("kimi", 3, lambda g: g[..., 0]),
        "g must have shape [5, 3, 16], got [5, 3]",
    ),
    "beta": (
        bad("gated", 4, Tensor.bfloat16),
        "beta must have dtype torch.float32, got torch.bfloat16",
    ),
    "v": (bad("gated", 2, Tensor.double), "v must have dtype torch.float32, got torch.float64"),
    "heads": (
        lambda: gated_delta_rule(
            *(x[:, :3] if n > 1 else x for n, x in enumerate(RECURRENCES["gated"].inputs((5,))[:5]))
        ),
        "v must have a multiple of the 2 heads of k, got 3",
    ),
    "states": (
        bad("gated", 5, lambda s: s[:0]),
        "initial_state must have shape [1, 4, 24, 16], got [0, 4, 24, 16]",
    ),
    "layout": (
        bad("gated", 0, lambda q: q.mT.contiguous().mT),
        "q must have contiguous rows, got strides [32, 1, 2]",
    ),
    "float64 by cpp": (
        lambda: gated_delta_rule(*RECURRENCES["gated"].inputs((5,), torch.float64)[:5], impl="cpp"),
        "impl 'cpp' takes ['torch.bfloat16', 'torch.float32'], got tensors of torch.float64",
    ),
    "impl": (
        bad("gated", 0, Tensor.clone, impl="cuda"),
        "impl must be one of ['cpp', 'triton_rounded', 'triton', 'torch'], got 'cuda'",
    ),
    "a scale that trains": (
        bad("lightning", 0, Tensor.clone, scale=torch.ones((), requires_grad=True)),
        "scale must be a number, got a tensor: multiply q by one that trains",
    ),
    "packing": (
        lambda: kimi_delta_attention(*RECURRENCES["kimi"].inputs((5,))[:5], packing((3, 4))),
        "packing must be of the 5 tokens given, got 7",
    ),
    "offsets for a packing": (
        lambda: causal_conv1d(torch.ones(3, 2), torch.ones(2, 4), None, torch.tensor([0, 3])),
        "packing must be a th.Packing, got Tensor",
    ),
    "device": (
        lambda: gated_delta_rule(*RECURRENCES["gated"].inputs((5,))[:5], packing((5,)).to("meta")),
        "packing must be on cpu, got meta; `to` moves it",
    ),
    "x of ssd": (
        bad("ssd", 0, lambda x: x[0]),
        "x must be [T, H, P] and B [T, G, N], got [6, 24] and [5, 2, 16]",
    ),
    "dt of ssd": (bad("ssd", 1, lambda dt: dt[:, :5]), "dt must have shape [5, 6], got [5, 5]"),
    "A of ssd": (bad("ssd", 2, lambda A: A[None]), "A must have shape [6], got [1, 6]"),
    "C of ssd": (
        bad("ssd", 4, lambda C: C[:, :1]),
        "C must have shape [5, 2, 16], got [5, 1, 16]",
    ),
    "C's dtype": (
        bad("ssd", 4, Tensor.double),
        "C must have dtype torch.float32, got torch.float64",
    ),
    "layout of ssd": (
        bad("ssd", 3, lambda B: B.mT.contiguous().mT),
        "B must have contiguous rows, got strides [32, 1, 2]",
    ),
    "states of ssd": (
        bad("ssd", 7, lambda s: s[:0]),
        "initial_state must have shape [1, 6, 24, 16], got [0, 6, 24, 16]",
    ),
    "gates": (
        bad("rg_lru", 1, lambda g: g[:4]),
        "gates must have shape [5, 3, 46], got [4, 3, 46]",
    ),
    "heads of gates": (
        bad("rg_lru", 1, lambda g: g[:, :2]),
        "gates must have heads that divide 69 channels, got 2",
    ),
    "log_a": (
        bad("rg_lru", 2, Tensor.double),
        "log_a must have dtype torch.float32, got torch.float64",
    ),
    "states of rg_lru": (
        bad("rg_lru", 3, lambda s: s[:0]),
        "initial_state must have shape [1, 69], got [0, 69]",
    ),
    "v of wkv": (
        bad("wkv", 1, Tensor.double),
        "v must have dtype torch.float32, got torch.float64",
    ),
    "bonus": (bad("wkv", 3, lambda b: b[:5]), "bonus must have shape [69], got [5]"),
    "states of wkv": (
        bad("wkv", 4, lambda s: s[:, :2]),
        "initial_state must have shape [1, 3, 69], got [1, 2, 69]",
    ),
    "k of lightning": (
        bad("lightning", 1, lambda k: k[:4]),
        "k must have shape [5, 3, 16], got [4, 3, 16]",
    ),
    "slopes": (
        bad("lightning", 3, lambda s: s[:, None]),
        "slopes must have shape [3], got [3, 1]",
    ),
    "i of mlstm": (bad("mlstm", 3, lambda i: i[:, :2]), "i must have shape [5, 3], got [5, 2]"),
    "f of mlstm": (bad("mlstm", 4, lambda f: f[:4]), "f must have shape [5, 3], got [4, 3]"),
    "states of mlstm": (
        bad("mlstm", 5, lambda s: s[:, :, :25]),
        "initial_state must have shape [1, 3, 32, 16], got [1, 3, 25, 16]",
    ),
    "x of a scan": (
        bad("selective_scan", 0, lambda x: x[0]),
        "x must have 2 dimensions, got [140]",
    ),
    "A of a scan": (
        bad("selective_scan", 2, lambda A: A[0]),
        "A must have 2 dimensions, got [12]",
    ),
    "C of a scan": (
        bad("selective_scan", 4, lambda C: C[:, :1]),
        "C must have shape [5, 2, 12], got [5, 1, 12]",
    ),
    "groups of a scan": (
        lambda: selective_scan(*replace(SCAN, groups=3).inputs((5,))[:5]),
        "x must have a multiple of the 3 groups of B, got 140",
    ),
    "dt's dtype": (
        bad("selective_scan", 1, Tensor.double),
        "dt must have dtype torch.float32, got torch.float64",
    ),
    "states of a scan": (
        bad("selective_scan", 8, lambda s: s[:0]),
        "initial_state must have shape [1, 140, 12], got [0, 140, 12]",
    ),
    "activation": (
        lambda: causal_conv1d(torch.ones(3, 2), torch.ones(2, 4), activation="gelu"),
        "activation must be one of ['none', 'silu'], got 'gelu'",
    ),
    "width": (
        lambda: causal_conv1d(torch.ones(3, 2), torch.ones(2, 1)),
        "weight must have width 2 to 16, got 1",
    ),
    "bias": (
        lambda: causal_conv1d(torch.ones(3, 2), torch.ones(2, 4), torch.ones(3)),
        "bias must have shape [2], got [3]",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments_are_refused(what: str) -> None:
    run, text = BAD[what]
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        run()


def test_offsets_out_of_range_are_refused() -> None:
    """Of a packing that was changed after it was made, by the forward."""
    xs = RECURRENCES["gated"].inputs((5,))
    wrong = th.Packing(torch.tensor([0, 5]), capacity=1)
    wrong.cu_seqlens[1] = 9
    for impl in ("cpp", "torch"):
        with pytest.raises(ValueError, match=re.escape("cu_seqlens must rise from 0 to at most 5")):
            gated_delta_rule(*xs[:5], wrong, impl=impl)
