"""Residuals that are picked: what a branch reads is a mix of all that was added up before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class BlockResidual(nn.Module):
    """Softmax attention of a few queries, the same for every token, to the sums of blocks of layers
    and to the sum of the present one, each normed by its root mean square.

    Every layer has room for all blocks, and a tensor that says which of them are complete: so
    layers of a kind differ by tensors alone, and are compiled once.

    Args:
        query: [Q, dim].
        num_blocks: that the model has.
        num_known: of those, how many are complete.
        eps: of the norm.
    """

    def __init__(
        self, query: nn.Parameter, num_blocks: int, num_known: int, *, eps: float = 1e-6
    ) -> None:
        super().__init__()
        self.query, self.eps = query, eps
        known = torch.arange(num_blocks, dtype=torch.int64, device=query.device) < num_known
        bias = torch.zeros(num_blocks, dtype=torch.float32, device=query.device)
        bias = bias.masked_fill(~known, -torch.inf)
        self.bias = nn.Buffer(bias, persistent=False)

    def forward(self, blocks: Tensor, present: Tensor) -> tuple[Tensor, ...]:
        """Mix the streams of each token.

        Args:
            blocks: [1, T, B, dim] sums of blocks; those that are not known are finite.
            present: [1, T, dim].

        Returns:
            For each query [1, T, dim] float32.
        """
        query = self.query.float()
        rows, row = blocks.float(), present.float()[..., None, :]
        norms, norm = self._norms(rows), self._norms(row)
        scale = query.shape[1] ** -0.5
        mixed = []
        for own in query.unbind():
            scores = (rows * own).sum(-1) * norms * scale + self.bias
            score = (row * own).sum(-1) * norm * scale
            peak = torch.maximum(scores.amax(-1, keepdim=True), score)
            of_blocks, of_present = (scores - peak).exp(), (score - peak).exp()
            total = of_blocks.sum(-1, keepdim=True) + of_present
            summed = (rows * (of_blocks * norms)[..., None]).sum(-2)
            mixed.append((summed + row.squeeze(-2) * (of_present * norm)) / total)
        return tuple(mixed)

    def _norms(self, rows: Tensor) -> Tensor:
        """[..., dim] float32 -> [...], the factors that norm the rows."""
        return torch.rsqrt(rows.square().mean(-1) + self.eps)
