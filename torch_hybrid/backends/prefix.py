"""Prefill of MLA layers after a prefix: the policy, and chunks of prefix rows to expand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.host.ints import int_tensor
from torch_hybrid.pytrees import register_value

_MEASURED_COST = {"cpu": 0.72, "cuda": 0.6}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixPolicy:
    """Policy of MLA layers at prefill: the form is chosen once for a step, from its lengths.

    Args:
        token_budget: the most rows to expand to keys and values at once; more come in chunks. None
            never makes chunks.
        one_shot: attend to prefix and new tokens in one pass where both fit.
        absorbed: "auto" attends to the latents themselves, as decode does, where that costs less
            (few new tokens after a prefix); "always" and "never" fix the choice.
        absorbed_cost: time of a FLOP of the absorbed form over one of the expanded form. None takes
            a measured value (``python -m benchmarks.latent_prefix``): 0.72 on a CPU, where
            absorbing pays up to some 160 new tokens without a prefix and 240 after one; 0.6 on a
            GPU. On an H200, 0.6 chose the faster form at 21 of 21 sizes: with 16, 32 and 128
            heads, 32 to 1024 new tokens, and up to 32768 before them.

    Raises:
        ValueError: ``absorbed`` or ``token_budget`` is invalid.
        UnsupportedError: no form is left for a sequence that is prefilled in pieces.
    """

    token_budget: int | None = 8192
    one_shot: bool = True
    absorbed: Literal["auto", "always", "never"] = "auto"
    absorbed_cost: float | None = None

    def __post_init__(self) -> None:
        if self.absorbed not in ("auto", "always", "never"):
            raise ValueError(f"absorbed must be 'auto', 'always' or 'never', got {self.absorbed!r}")
        if self.token_budget is not None and self.token_budget < 1:
            raise ValueError(f"token_budget must be at least one page, got {self.token_budget}")
        if self.absorbed == "never" and self.token_budget is None and not self.one_shot:
            raise UnsupportedError(
                "no way is left to attend to a prefix: token_budget is None (no chunks), one_shot "
                "is off, and absorbed is 'never'"
            )

    def cost_on(self, device: torch.device) -> float:
        """Return ``absorbed_cost``; by default the value that was measured on such a device."""
        return _MEASURED_COST[device.type] if self.absorbed_cost is None else self.absorbed_cost


@dataclass(frozen=True, slots=True)
class PrefixPiece:
    """Positions ``[start, start + length)`` of one sequence's prefix."""

    sequence: int
    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixChunks:
    """Rows of the pool to expand, with a tensor for each chunk."""

    rows: tuple[Tensor, ...]  # [num_rows] each: page * page_size + offset; 0 is padding
    cu_seqlens: tuple[Tensor, ...]  # [N + 1] each: offsets of the sequences' rows


register_value(PrefixChunks)


def plan_prefix_chunks(prefix_lens: Sequence[int], token_budget: int) -> list[list[PrefixPiece]]:
    """Pack prefixes into chunks of ``token_budget`` tokens, in order; the last may be smaller.

    No piece is empty, and there are exactly ``ceil(sum(prefix_lens) / token_budget)`` chunks.

    Raises:
        ValueError: the budget is below one token.
    """
    if token_budget < 1:
        raise ValueError(f"token_budget must be at least 1, got {token_budget}")
    chunks: list[list[PrefixPiece]] = []
    room = 0
    for sequence, length in enumerate(prefix_lens):
        start = 0
        while start < length:
            if room == 0:
                chunks.append([])
                room = token_budget
            take = min(length - start, room)
            chunks[-1].append(PrefixPiece(sequence, start, take))
            start, room = start + take, room - take
    return chunks


def chunk_tables(
    chunks: Sequence[Sequence[PrefixPiece]],
    page_table: Tensor,
    *,
    page_size: int,
    num_chunks: int,
    num_rows: int,
) -> PrefixChunks:
    """Make tables of ``num_chunks`` chunks of ``num_rows`` rows; those after the last are empty."""
    padded = [*chunks, *([] for _ in range(num_chunks - len(chunks)))]
    return PrefixChunks(
        rows=tuple(_rows(pieces, page_table, page_size, num_rows) for pieces in padded),
        cu_seqlens=tuple(_offsets(pieces, page_table.shape[0]) for pieces in padded),
    )


def _rows(
    pieces: Sequence[PrefixPiece], page_table: Tensor, page_size: int, num_rows: int
) -> Tensor:
    rows = torch.zeros(num_rows, dtype=torch.int32, device="cpu")
    end = 0
    for piece in pieces:
        position = torch.arange(
            piece.start, piece.start + piece.length, dtype=torch.int32, device="cpu"
        )
        page = page_table[piece.sequence, position // page_size]
        rows[end : end + piece.length] = page * page_size + position % page_size
        end += piece.length
    return rows


def _offsets(pieces: Sequence[PrefixPiece], num_seqs: int) -> Tensor:
    lengths = [0] * num_seqs
    for piece in pieces:
        lengths[piece.sequence] += piece.length
    return int_tensor(accumulate(lengths, initial=0), torch.int32)
