"""Checks of the arguments of ``Runner.extend``, before any state changes."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index as index_of
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from torch_hybrid.host.ints import has_bools, joined, packed_ints

# From this many tokens on, the range of a tensor is found faster than that of a list.
_MANY_TOKENS = 256


def token_lists(tokens: Any) -> Sequence[Sequence[int]]:
    """Pack the new tokens of each sequence from lists, tuples, or 1-D or 2-D integer tensors.

    Raises:
        TypeError: ``tokens`` holds something other than lists of ints.
    """
    rows = tokens.tolist() if isinstance(tokens, Tensor) else tokens
    return [_packed(row.tolist() if isinstance(row, Tensor) else row) for row in rows]


def _packed(row: Any) -> Sequence[int]:
    """Pack a list of tokens into an array, in a third of the time of a check of each token."""
    if not isinstance(row, list | tuple):
        raise TypeError(f"tokens must be a list of token ids for each sequence, got {row!r}")
    try:
        packed = packed_ints(row, "q")
    except (TypeError, OverflowError):  # no ints, or too large: a check of the range says which
        return [_token(token) for token in row]
    return [_token(token) for token in row] if has_bools(row, packed) else packed


def _token(token: object) -> int:
    if isinstance(token, bool) or not isinstance(token, SupportsIndex):
        raise TypeError(f"a token must be an int, got {token!r} ({type(token).__name__})")
    return index_of(token)


def check_extend(
    tokens: Sequence[Sequence[int]],
    positions: Tensor | None,
    logits: str,
    *,
    num_seqs: int,
    max_tokens: int,
    vocab_size: int,
    num_position_axes: int,
    most_each: int | None = None,
) -> None:
    """Raise ValueError unless the arguments are as ``Runner.extend`` says.

    ``most_each`` is the most new tokens of one sequence; None is any number.
    """
    if num_seqs != len(tokens):
        raise ValueError(
            f"tokens must have one list for each sequence, "
            f"got {len(tokens)} lists for {num_seqs} sequences"
        )
    if logits not in ("last", "all"):
        raise ValueError(f"logits must be 'last' or 'all', got {logits!r}")
    if not tokens:
        return
    lengths = [len(new) for new in tokens]
    if min(lengths) == 0:
        raise ValueError(f"every sequence needs at least one new token, got {lengths}")
    if sum(lengths) > max_tokens:
        raise ValueError(
            f"at most max_tokens = {max_tokens} new tokens fit one step, got "
            f"{sum(lengths)}: extend in chunks"
        )
    if most_each is not None and max(lengths) > most_each:
        raise ValueError(
            f"a sequence must have one token and at most max_drafts = {most_each - 1} drafts, got "
            f"{lengths} tokens"
        )
    lowest, highest = _extremes(tokens)
    if lowest < 0 or highest >= vocab_size:
        bad = lowest if lowest < 0 else highest
        raise ValueError(f"token ids must be within 0 and {vocab_size - 1}, got {bad}")
    if positions is not None:
        axes = [] if num_position_axes == 1 else [num_position_axes]
        shape = (*axes, sum(lengths))
        if tuple(positions.shape) != shape or positions.dtype != torch.int64:
            raise ValueError(
                f"positions must be int64 of shape {list(shape)}, "
                f"got {positions.dtype} of shape {list(positions.shape)}"
            )


def _extremes(tokens: Sequence[Sequence[int]]) -> tuple[int, int]:
    if sum(map(len, tokens)) < _MANY_TOKENS:
        return min(map(min, tokens)), max(map(max, tokens))
    try:
        lowest, highest = torch.aminmax(joined(tokens))
    except OverflowError:
        return min(map(min, tokens)), max(map(max, tokens))
    return int(lowest), int(highest)
