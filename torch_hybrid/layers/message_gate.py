"""Gate by which a layer that runs again takes what its last pass tells it (Inkling-2's loops)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torch_hybrid.layers.block_residual import inverse_norms
from torch_hybrid.layers.mixer import Composed


@dataclass(eq=False, repr=False)
class MessageGate(Composed):
    """Mix of an input and a message: ``(1 - forget) * x + take * message``.

    Both gates are hyperbolic tangents of a low-rank projection of the input and the message, each
    of which is normed by its root mean square.
    """

    down_proj: nn.Linear  # projection with weight [rank, 2 * dim], of input and message
    gate: nn.Linear  # projection with weight [2 * dim, rank] float32, to ``[forget | take]``
    eps: float  # epsilon of the norm

    def forward(self, x: Tensor, message: Tensor, dtype: torch.dtype) -> Tensor:
        """Mix x and message [1, T, dim] float32 to the same; ``dtype`` is that of products."""
        normed = [rows * inverse_norms(rows, self.eps)[..., None] for rows in (x, message)]
        low_rank = self.down_proj(torch.cat(normed, -1).to(dtype)).float()
        forget, take = torch.tanh(self.gate(low_rank)).chunk(2, -1)
        mixed: Tensor = (1 - forget) * x + take * message
        return mixed
