"""Several sequences in a row of tokens: where each begins, for every layer of a micro-batch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_hybrid.errors import CapacityError


class Packing:
    """Sequences that lie one after the other in T tokens, planned once for all layers.

    A pytree of tensors alone. Their sizes depend on T and the capacity, on no length: a graph that
    takes one serves every packing of as many tokens. Batches [B, T] are packed as [B * T] tokens.

    Args:
        cu_seqlens: [N + 1] int32 or int64 offsets of the sequences, from 0 to T; empty sequences
            are allowed.
        capacity: most sequences, at least N. By default T, which holds any packing; on a GPU, where
            launches and memory of forwards grow with it, at most 1024 or T / 32, whichever is more.
            Initial and final states have as many rows.
        num_tokens: T. By default the last offset, which is read; so it must be given inside a graph
            and for offsets on a GPU, whose values are not checked.

    Attributes:
        cu_seqlens: [capacity + 1] int32; the offsets past N are T.
        positions: [T] int64 place of each token in its sequence.
        sequences: [T] int64 number of each token's sequence.

    Raises:
        ValueError: a dtype or shape is not as above; or, for offsets on a CPU and outside of a
            graph, they do not rise from 0 to T.
        CapacityError: there are more sequences than ``capacity``; inside a graph or on a GPU a
            RuntimeError, if only values tell.
    """

    cu_seqlens: Tensor
    positions: Tensor
    sequences: Tensor

    def __init__(
        self, cu_seqlens: Tensor, capacity: int | None = None, *, num_tokens: int | None = None
    ) -> None:
        check_form("cu_seqlens", cu_seqlens, (1,))
        if not cu_seqlens.shape[0]:
            raise ValueError("cu_seqlens must have shape [N + 1], got [0]")
        is_read = cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling()
        if num_tokens is None:
            if not is_read:
                raise ValueError(
                    "num_tokens must be given for offsets that are on a GPU or in a graph, got None"
                )
            num_tokens = int(cu_seqlens[-1])
        if is_read:
            _check_offsets(cu_seqlens.tolist(), num_tokens)
        num_seqs = cu_seqlens.shape[0] - 1
        if capacity is None:
            capacity = max(_default_capacity(num_tokens, cu_seqlens.device), num_seqs)
        if num_seqs > capacity:
            raise _too_many(num_seqs, capacity)
        self._plan(
            torch.cat([cu_seqlens, cu_seqlens.new_full((capacity - num_seqs,), num_tokens)]),
            num_tokens,
        )

    @classmethod
    def from_position_ids(cls, position_ids: Tensor, capacity: int | None = None) -> Packing:
        """Plan sequences that begin where positions do not go on: no value is read on the host.

        Args:
            position_ids: [T] or [B, T] integers; each row begins a sequence.
            capacity: as above.

        Raises:
            ValueError, CapacityError: as above.
        """
        check_form("position_ids", position_ids, (1, 2))
        return cls.from_starts(after_first(position_ids.diff() != 1, position_ids), capacity)

    @classmethod
    def from_seq_idx(cls, seq_idx: Tensor, capacity: int | None = None) -> Packing:
        """Plan sequences that begin where the number of the sequence changes.

        Args:
            seq_idx: [T] or [B, T] integers; each row begins a sequence.
            capacity: as above.

        Raises:
            ValueError, CapacityError: as above.
        """
        check_form("seq_idx", seq_idx, (1, 2))
        return cls.from_starts(after_first(seq_idx.diff() != 0, seq_idx), capacity)

    @classmethod
    def from_attention_mask(cls, attention_mask: Tensor, capacity: int | None = None) -> Packing:
        """Plan a sequence for each row of a padded batch, and one for each run of padding.

        Padding so meets no token of a sequence, and its outputs are finite.

        Args:
            attention_mask: [B, T] integers or bools, false for padding at either side of a row.
            capacity: as above; 3 * B hold padding at both sides.

        Raises:
            ValueError: as above; or, for a mask on a CPU and outside of a graph, it has holes.
            CapacityError: as above.
        """
        check_form("attention_mask", attention_mask, (2,), or_bool=True)
        is_token = attention_mask.bool()
        changes = is_token[:, 1:] != is_token[:, :-1]
        if is_token.device.type == "cpu" and not torch.compiler.is_compiling():
            begins = is_token[:, :1].sum(1) + (changes & is_token[:, 1:]).sum(1)
            if rows := (begins > 1).nonzero().flatten().tolist():
                raise ValueError(
                    f"attention_mask must have one run of tokens in a row, got holes in rows {rows}"
                )
        return cls.from_starts(after_first(changes, is_token), capacity)

    @classmethod
    def from_starts(cls, starts: Tensor, capacity: int | None = None) -> Packing:
        """Plan sequences by their first tokens.

        Args:
            starts: [T] or [B, T] integers or bools, true at the first token of each sequence; each
                row begins one.
            capacity: as above.

        Raises:
            ValueError, CapacityError: as above.
        """
        check_form("starts", starts, (1, 2), or_bool=True)
        starts = after_first(starts[..., 1:].bool(), starts)
        is_first, num_tokens, device = starts.flatten(), starts.numel(), starts.device
        capacity = _default_capacity(num_tokens, device) if capacity is None else capacity
        ordinal = is_first.cumsum(0) - 1
        if capacity < num_tokens:
            if device.type != "cpu" or torch.compiler.is_compiling():
                torch._assert_async(ordinal[-1] < capacity, _TOO_MANY.format(capacity, "more"))
            elif (num_seqs := int(ordinal[-1]) + 1) > capacity:
                raise _too_many(num_seqs, capacity)
        # Tokens that begin nothing write to one element more, which is left out.
        token = torch.arange(num_tokens, dtype=torch.int64, device=device)
        offsets = torch.full((capacity + 2,), num_tokens, dtype=torch.int64, device=device)
        index = torch.where(is_first, ordinal, capacity + 1)
        packing = object.__new__(cls)
        packing._plan(offsets.index_put((index,), token)[: capacity + 1], num_tokens)
        return packing

    def _plan(self, offsets: Tensor, num_tokens: int) -> None:
        token = torch.arange(num_tokens, dtype=torch.int64, device=offsets.device)
        offsets = offsets.long()
        self.sequences = torch.searchsorted(offsets[1:].contiguous(), token, right=True)
        self.positions = token - offsets[self.sequences]
        self.cu_seqlens = offsets.int()

    @property
    def num_tokens(self) -> int:
        """Number T of tokens, padding included."""
        return self.positions.shape[0]

    @property
    def capacity(self) -> int:
        """Number of rows of states: the most sequences."""
        return self.cu_seqlens.shape[0] - 1

    def to(self, device: torch.device | str) -> Packing:
        """Copy the plan to a device: made and checked on the host, it needs no read there."""
        return _unflatten([each.to(device) for each in _flatten(self)[0]], None)


def after_first(marks: Tensor, rows: Tensor) -> Tensor:
    """Put a mark before each row of ``marks [..., T - 1]``: its first token begins a sequence.

    ``rows`` [..., T] has no tokens, perhaps, and then none is first.
    """
    before = rows.shape[-1] - marks.shape[-1]
    return torch.nn.functional.pad(marks, (before, 0), value=True)


_FIELDS = ("cu_seqlens", "positions", "sequences")


def _flatten(packing: Packing) -> tuple[list[Tensor], None]:
    return [packing.cu_seqlens, packing.positions, packing.sequences], None


def _flatten_with_keys(packing: Packing) -> tuple[list[tuple[pytree.KeyEntry, Any]], None]:
    keys = map(pytree.GetAttrKey, _FIELDS)
    return list(zip(keys, _flatten(packing)[0], strict=True)), None


def _unflatten(tensors: Any, _: None) -> Packing:
    packing = object.__new__(Packing)
    packing.cu_seqlens, packing.positions, packing.sequences = tensors
    return packing


pytree.register_pytree_node(
    Packing,
    _flatten,
    _unflatten,
    serialized_type_name="torch_hybrid.Packing",
    flatten_with_keys_fn=_flatten_with_keys,
)
torch.serialization.add_safe_globals([Packing])  # an exported program has example inputs


def check_form(name: str, given: Tensor, ndims: tuple[int, ...], *, or_bool: bool = False) -> None:
    """Raise ValueError unless a tensor has one of these numbers of dimensions, and integers."""
    if not isinstance(given, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(given).__name__}")
    if given.ndim not in ndims:
        allowed = " or ".join(map(str, ndims))
        raise ValueError(f"{name} must have {allowed} dimensions, got shape {list(given.shape)}")
    if given.dtype not in (torch.int32, torch.int64) and not (
        or_bool and given.dtype is torch.bool
    ):
        raise ValueError(f"{name} must have dtype torch.int32 or torch.int64, got {given.dtype}")


def _check_offsets(offsets: list[int], num_tokens: int) -> None:
    if offsets[0] != 0:
        raise ValueError(f"cu_seqlens must begin at 0, got {offsets[0]}")
    for n, (start, end) in enumerate(pairwise(offsets)):
        if end < start:
            raise ValueError(f"cu_seqlens must not fall, got {end} after {start} at {n + 1}")
    if offsets[-1] != num_tokens:
        raise ValueError(f"cu_seqlens must end at {num_tokens} tokens, got {offsets[-1]}")


_TOO_MANY = "a packing must have at most {} sequences, got {}; `capacity` raises that"


def _too_many(num_seqs: int, capacity: int) -> CapacityError:
    return CapacityError(_TOO_MANY.format(capacity, num_seqs))


def _default_capacity(num_tokens: int, device: torch.device) -> int:
    """Choose the most sequences of so many tokens."""
    return num_tokens if device.type == "cpu" else min(num_tokens, max(1024, num_tokens // 32))
