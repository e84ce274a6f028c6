"""Vocabulary divided among ranks: each has a stretch of the embedding, and of the head's outputs.

A head of 150,000 tokens is the largest GEMM of a decode step. Its weight and the embedding are the
largest that would otherwise be whole on every rank.
"""

from __future__ import annotations

from torch import Tensor, nn

from torch_hybrid.ranks import Ranks


class EmbeddingOverRanks(nn.Module):
    """Embedding of which each rank has a stretch of rows.

    Args:
        part: embedding of this rank's rows, numbered from 0.
        num_rows: number of this rank's rows.
        ranks: ranks that share the embedding, each with equally many rows.
    """

    def __init__(self, part: nn.Module, num_rows: int, ranks: Ranks) -> None:
        super().__init__()
        self.part, self.num_rows, self.ranks = part, num_rows, ranks

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids [...] int64 -> [..., width], bit-identical to the whole embedding's rows."""
        own = ids - self.ranks.rank * self.num_rows
        is_elsewhere = (own < 0) | (own >= self.num_rows)
        rows: Tensor = self.part(own.clamp(0, self.num_rows - 1))
        return self.ranks.sum(rows.masked_fill(is_elsewhere[..., None], 0.0))


class HeadOverRanks(nn.Module):
    """Projection to the vocabulary, of which each rank computes a stretch.

    Args:
        part: projection to this rank's stretch.
        ranks: ranks that share the head, each with equally many outputs.
    """

    def __init__(self, part: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.part, self.ranks = part, ranks

    def forward(self, hidden: Tensor) -> Tensor:
        """Project hidden [R, dim] -> [R, vocab_size], the same on every rank."""
        return self.ranks.gather(self.part(hidden))
