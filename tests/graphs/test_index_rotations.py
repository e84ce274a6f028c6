"""The pass that takes the cat out of rotary embeddings."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.graphs.test_passes import run
from torch_hybrid.graphs.index_rotations import index_rotations
from torch_hybrid.graphs.passes import Pass

PASSES = (Pass("index_rotations", index_rotations),)


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def test_text():
    _, graph, _ = run(rotate_half, torch.randn(3, 2, 8), passes=PASSES)
    assert_expected_inline(graph, """\
getitem = getitem(x, (Ellipsis, slice(4, None, None)))
neg = neg(getitem)
getitem_1 = getitem(x, (Ellipsis, slice(None, 4, None)))
arange = arange(2)
unsqueeze = unsqueeze(arange, -1)
eq = eq(unsqueeze, 0)
unflatten = unflatten(x, -1, (2, -1))
flip = flip(unflatten, -2)
neg_1 = neg(flip)
where = where(eq, neg_1, flip)
flatten = flatten(where, -2)""")
