"""Attention over blocks of layers: a branch reads a mix of the sums of all blocks before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class BlockResidual(nn.Module):
    """Softmax attention of a few queries to the sums of blocks of layers.

    All tokens have the same queries. Keys and values are the sums of complete blocks, and that of
    the present block. Every layer has room for all blocks, and
    a bias that masks incomplete ones. Layers of a kind thus differ by tensors alone, and are
    compiled once.

    Args:
        query: [Q, dim].
        num_blocks: number of blocks of the model.
        num_known: number of complete blocks.
        eps: epsilon of the norm.
        weight: [dim] weight of the keys' norm. Scores are then not scaled by ``dim ** -0.5``, nor
            values normed (Kimi-K3). None: they are (Inkling-2).
    """

    def __init__(
        self,
        query: nn.Parameter,
        num_blocks: int,
        num_known: int,
        *,
        eps: float = 1e-6,
        weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.query, self.weight, self.eps = query, weight, eps
        known = torch.arange(num_blocks, dtype=torch.int64, device=query.device) < num_known
        bias = torch.zeros(num_blocks, dtype=torch.float32, device=query.device)
        bias = bias.masked_fill(~known, -torch.inf)
        self.bias = nn.Buffer(bias, persistent=False)

    def forward(self, blocks: Tensor, present: Tensor) -> tuple[Tensor, ...]:
        """Mix the sums of each token, once for each query.

        Args:
            blocks: [1, T, B, dim] sums of blocks; those of incomplete blocks must be finite.
            present: [1, T, dim] sum of the present block.

        Returns:
            A mix [1, T, dim] float32 for each query.
        """
        query = self.query.float()
        rows, row = blocks.float(), present.float()[..., None, :]
        norms, norm = inverse_norms(rows, self.eps), inverse_norms(row, self.eps)
        of_values: tuple[Tensor | float, Tensor | float] = norms, norm
        scale = query.shape[1] ** -0.5
        if self.weight is not None:
            query, scale, of_values = query * self.weight.float(), 1.0, (1.0, 1.0)
        mixed = []
        for own in query.unbind():
            scores = (rows * own).sum(-1) * norms * scale + self.bias
            score = (row * own).sum(-1) * norm * scale
            peak = torch.maximum(scores.amax(-1, keepdim=True), score)
            of_blocks, of_present = (scores - peak).exp(), (score - peak).exp()
            total = of_blocks.sum(-1, keepdim=True) + of_present
            summed = (rows * (of_blocks * of_values[0])[..., None]).sum(-2)
            mixed.append((summed + row.squeeze(-2) * (of_present * of_values[1])) / total)
        return tuple(mixed)


def inverse_norms(rows: Tensor, eps: float) -> Tensor:
    """Compute the factors [...] that norm rows [..., dim] float32 by root mean square."""
    return torch.rsqrt(rows.square().mean(-1) + eps)
