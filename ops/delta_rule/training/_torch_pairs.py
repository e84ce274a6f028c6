"""Decayed products of the rows of a chunk with each other, and their gradients, in torch.

    kk_ij = k_i . k_j decayed from j to i, for i > j;  qk_ij = q_i . k_j decayed, for i >= j

Gradients of a decay are sums over the pairs that it lies between. They are made without the usual
differences of sums, so that a small one keeps its digits beside large ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torch_hybrid.ops.delta_rule._torch import sum_after
from torch_hybrid.ops.ragged_chunks import FULL_DECAY, before_row, from_row_on


@dataclass(frozen=True, slots=True, kw_only=True)
class PairGradients:
    """Gradients that come by the products: of q and k [X, H, C, K], and of g, like g."""

    q: Tensor
    k: Tensor
    g: Tensor


class PairsByHead:
    """Products where all channels of a head have one decay.

    Args:
        q, k: [X, H, C, K].
        g: [X, H, C, 1] natural-log decays.
    """

    def __init__(self, q: Tensor, k: Tensor, g: Tensor) -> None:
        # In float64: a difference of two large sums must not lose a small decay between them.
        G = g[..., 0].clamp(min=FULL_DECAY).double().cumsum(-1)
        self._q, self._k = q, k
        self._decay = (G[..., :, None] - G[..., None, :]).to(k.dtype).tril().exp().tril()
        self.kk = (k @ k.mT * self._decay).tril(-1)
        self.qk = q @ k.mT * self._decay

    def gradients(self, dkk: Tensor, dqk: Tensor) -> PairGradients:
        """Compute the gradients by those of the products, [X, H, C, C]."""
        q, k = self._q, self._k
        between = dkk * self.kk + (dqk * self.qk).tril(-1)
        dkk, dqk = dkk * self._decay, dqk * self._decay
        # The decay of row t lies between all i >= t and j < t.
        dg = before_row(from_row_on(between).mT).diagonal(dim1=-2, dim2=-1)
        return PairGradients(q=dqk @ k, k=dkk @ k + dkk.mT @ k + dqk.mT @ q, g=dg[..., None])


class PairsByChannel:
    """Products where each channel has its own decay.

    The chunk is halved again and again: late rows meet early rows at the middle of a block. Both
    sides carry the decay between their row and the middle, never more than 1.

    Args:
        q, k, g: [X, H, C, K]; g natural-log decays.
    """

    def __init__(self, q: Tensor, k: Tensor, g: Tensor) -> None:
        self._q, self._k, self._g = q, k, g
        self.kk, self.qk = (k.new_zeros(*k.shape[:3], k.shape[2]) for _ in range(2))
        for half in self._halves():
            k_early, k_late, q_late, *_ = self._block(half)
            for products, late in ((self.kk, k_late), (self.qk, q_late)):
                _between(products, half).copy_(late @ k_early.mT)
        self.qk.diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))

    def _halves(self) -> list[int]:
        size = self._k.shape[2]
        return [size >> level for level in range(1, size.bit_length())]

    def _block(self, half: int) -> tuple[Tensor, ...]:
        """Return k of early rows, k and q of late ones, decayed to the middle and since it, and
        both decays; each [X, H, blocks, half, K]."""
        (early_g, late_g), (k_early, k_late), (_, q_late) = (
            _parts(each, half) for each in (self._g, self._k, self._q)
        )
        early, late = sum_after(early_g).exp(), late_g.cumsum(-2).exp()
        return k_early * early, k_late * late, q_late * late, early, late

    def gradients(self, dkk: Tensor, dqk: Tensor) -> PairGradients:
        """Compute the gradients by those of the products, [X, H, C, C]."""
        diagonal = dqk.diagonal(dim1=-2, dim2=-1)[..., None]
        dq, dk, dg = diagonal * self._k, diagonal * self._q, torch.zeros_like(self._g)
        for half in self._halves():
            k_early, k_late, q_late, early, late = self._block(half)
            dkk_b, dqk_b = _between(dkk, half), _between(dqk, half)
            dk_late, dq_late = dkk_b @ k_early, dqk_b @ k_early
            dk_early = dkk_b.mT @ k_late + dqk_b.mT @ q_late
            _parts(dq, half)[1].add_(dq_late * late)
            _parts(dk, half)[1].add_(dk_late * late)
            _parts(dk, half)[0].add_(dk_early * early)
            _parts(dg, half)[1].add_(from_row_on(dk_late * k_late + dq_late * q_late))
            _parts(dg, half)[0].add_(before_row(dk_early * k_early))
        return PairGradients(q=dq, k=dk, g=dg)


def _parts(rows: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """View rows [X, H, C, K] as early and late halves of blocks, [X, H, blocks, half, K] each."""
    blocks = rows.unflatten(2, (-1, 2, half))
    return blocks[..., 0, :, :], blocks[..., 1, :, :]


def _between(products: Tensor, half: int) -> Tensor:
    """View products [X, H, C, C] of late rows with early ones: [X, H, blocks, half, half]."""
    blocks = products.unflatten(3, (-1, 2, half)).unflatten(2, (-1, 2, half))
    between: Tensor = blocks[..., 1, :, :, 0, :].diagonal(dim1=2, dim2=4)
    return between.movedim(-1, 2)
