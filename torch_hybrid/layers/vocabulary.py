"""A vocabulary that ranks share: each has a stretch of the embeddings, and of the head's outputs.

A head of 150,000 tokens is the largest product of a decode step, and with its embedding the largest
weight that would otherwise be whole on every rank.
"""

from __future__ import annotations

from torch import Tensor, nn

from torch_hybrid.ranks import Ranks


class EmbeddingOverRanks(nn.Module):
    """Rows of a table of which each rank has a stretch.

    Args:
        part: looks up this rank's rows, by their numbers among them.
        num_rows: of this rank.
        ranks: that hold the table, each equally many rows.
    """

    def __init__(self, part: nn.Module, num_rows: int, ranks: Ranks) -> None:
        super().__init__()
        self.part, self.num_rows, self.ranks = part, num_rows, ranks

    def forward(self, ids: Tensor) -> Tensor:
        """[...] int64 -> [..., width], the same bits on every rank as of the whole table."""
        own = ids - self.ranks.rank * self.num_rows
        is_elsewhere = (own < 0) | (own >= self.num_rows)
        rows: Tensor = self.part(own.clamp(0, self.num_rows - 1))
        return self.ranks.sum(rows.masked_fill(is_elsewhere[..., None], 0.0))


class HeadOverRanks(nn.Module):
    """A projection to the vocabulary, of which each rank computes a stretch.

    Args:
        part: projects to this rank's stretch.
        ranks: that hold the head, each equally many outputs.
    """

    def __init__(self, part: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.part, self.ranks = part, ranks

    def forward(self, hidden: Tensor) -> Tensor:
        """[R, dim] -> [R, vocab_size], the same on every rank."""
        return self.ranks.gather(self.part(hidden))
