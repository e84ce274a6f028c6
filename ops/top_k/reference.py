"""The oracle: one largest element after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.top_k.op import TopK


def top_k(x: TopK) -> tuple[Tensor, Tensor]:
    """Take the first of the largest out of each row, k times; NaN is larger than any number."""
    rest = x.x.double().clone()
    is_nan = rest.isnan()
    left = torch.ones_like(is_nan)
    places = []
    for _ in range(x.k):
        largest = rest.masked_fill(~left, -torch.inf).amax(-1, keepdim=True)
        nans_left = (is_nan & left).any(-1, keepdim=True)
        best = left & torch.where(nans_left, is_nan, rest == largest)
        places.append(best.to(torch.uint8).argmax(-1))  # the first of them
        left = left.scatter(-1, places[-1][..., None], False)
    found = torch.stack(places, -1)
    return x.x.gather(-1, found), found
