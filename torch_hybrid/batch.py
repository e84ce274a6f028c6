"""A batch of ragged sequences: every field declares how it is cut and how it is padded.

``split`` and ``pad_to`` are generated from the declarations, so a new field cannot be forgotten
in either: a field without one fails when this module is imported.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from itertools import accumulate, chain
from operator import add
from typing import Any

import torch
from torch import Tensor

from torch_hybrid.host.ints import int_tensor, joined
from torch_hybrid.pytrees import register_value


class Axis(Enum):
    """Rules by which a field follows the batch when it is cut at a token."""

    TOKEN = "one entry per token, on the last dimension"
    SEQUENCE = "one row per sequence; a sequence that is cut is in both halves"
    LENGTHS = "as SEQUENCE; in the first half a cut sequence ends at the cut"
    STARTS = "as SEQUENCE; in the second half a cut sequence starts where the first left its state"
    OFFSETS = "running offsets of tokens; always rebuilt from 0, never sliced"
    CONSTANT = "the same for the whole batch"


def _declared(axis: Axis, pad: int = 0, *, may_miss: bool = False) -> Any:
    metadata = {"axis": axis, "pad": pad}
    return field(metadata=metadata, default=None) if may_miss else field(metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The new tokens of N sequences, packed one after another: T tokens in all.

    Index tensors are int32. Slot 0 and page 0 are null: padding rows point there. Tokens from
    ``cu_seqlens[N]`` on are padding.
    """

    tokens: Tensor = _declared(Axis.TOKEN)  # [T] int64
    positions: Tensor = _declared(Axis.TOKEN)  # [T] or [3, T] (mrope) int64
    slot_mapping: Tensor = _declared(Axis.TOKEN)  # [T] where new K and V go
    cu_seqlens: Tensor = _declared(Axis.OFFSETS)  # [N + 1] query offsets
    seq_lens: Tensor = _declared(Axis.LENGTHS)  # [N] total lengths, these tokens included
    page_table: Tensor = _declared(Axis.SEQUENCE)  # [N, max_pages]
    initial_indices: Tensor = _declared(Axis.STARTS)  # [N] slot of the state before; 0: none
    state_indices: Tensor = _declared(Axis.SEQUENCE)  # [N] slot of the state after
    # [N] draft records to replay first: accepted drafts of the step before; None: no replay
    accepted: Tensor | None = _declared(Axis.SEQUENCE, may_miss=True)
    # [N] drafts, the last of its new tokens; None: no sequence has any
    num_drafts: Tensor | None = _declared(Axis.SEQUENCE, may_miss=True)
    # [T] given row in the place of the token's embedding, from 1; 0: its own. None: no given rows
    embed_rows: Tensor | None = _declared(Axis.TOKEN, may_miss=True)
    # [T] slot of the adapter of the token's sequence, from 1; 0: none. None: no sequence has one
    adapter_slots: Tensor | None = _declared(Axis.TOKEN, may_miss=True)

    @property
    def num_tokens(self) -> int:
        """Number T of tokens, padding included."""
        return self.tokens.shape[-1]

    @property
    def num_seqs(self) -> int:
        """Number N of sequences, padding included."""
        return self.seq_lens.shape[0]

    def tensors_for(self, plan: type) -> dict[str, Any]:
        """Collect the tensors that a plan's class has fields of the same names for."""
        return {each.name: getattr(self, each.name) for each in fields(plan) if each.name in AXES}


def _axes() -> dict[str, tuple[Axis, int]]:
    undeclared = [f.name for f in fields(Batch) if "axis" not in f.metadata]
    if undeclared:
        raise TypeError(f"fields of Batch without a declared axis: {undeclared}")
    return {f.name: (f.metadata["axis"], f.metadata["pad"]) for f in fields(Batch)}


AXES = _axes()
register_value(Batch)

_FEW_TOKENS = 32  # up to this count, Python places each token by itself
KEPT = -1  # the token id, for the draft head, of a token that the model has run


def pad_to(batch: Batch, *, num_seqs: int, num_tokens: int) -> Batch:
    """Append null sequences and padding tokens up to a bucket's sizes.

    Raises:
        ValueError: the batch is larger than the bucket.
    """
    more_seqs, more_tokens = num_seqs - batch.num_seqs, num_tokens - batch.num_tokens
    if more_seqs < 0 or more_tokens < 0:
        raise ValueError(
            f"a batch of {batch.num_seqs} sequences and {batch.num_tokens} tokens does not fit "
            f"a bucket of {num_seqs} sequences and {num_tokens} tokens"
        )
    if more_seqs == more_tokens == 0:
        return batch

    def padded(name: str, tensor: Tensor | None) -> Any:
        axis, value = AXES[name]
        if tensor is None or not (more_tokens if axis is Axis.TOKEN else more_seqs):
            return tensor
        match axis:
            case Axis.TOKEN:
                return torch.constant_pad_nd(tensor, (0, more_tokens), value)
            case Axis.OFFSETS:
                return torch.cat([tensor, tensor[-1:].expand(more_seqs)])
            case Axis.SEQUENCE | Axis.LENGTHS | Axis.STARTS:
                last_first = (0, 0) * (tensor.ndim - 1) + (0, more_seqs)
                return torch.constant_pad_nd(tensor, last_first, value)
            case Axis.CONSTANT:
                return tensor

    return Batch(**{name: padded(name, getattr(batch, name)) for name in AXES})


def bucket_of(query_lens: Sequence[int], buckets: Sequence[int]) -> tuple[int, int]:
    """Choose the bucket of a batch: the sequences and tokens that it is padded to.

    Args:
        query_lens: new tokens of each sequence. In a decode step (one token each), the padded batch
            has as many tokens as sequences.
        buckets: ascending sizes, the first at least 2.

    Raises:
        ValueError: no bucket is large enough, or ``buckets`` are not as above.
    """
    if list(buckets) != sorted(set(buckets)) or min(buckets, default=0) < 2:
        raise ValueError(f"buckets must be ascending sizes from 2 on, got {list(buckets)}")

    def padded(size: int, what: str) -> int:
        place = bisect_left(buckets, size)
        if place == len(buckets):
            raise ValueError(f"buckets must hold {size} {what}, got at most {buckets[-1]}")
        return buckets[place]

    num_seqs = padded(len(query_lens), "sequences")
    if max(query_lens, default=0) <= 1:
        return num_seqs, num_seqs
    return num_seqs, padded(sum(query_lens), "tokens")


def at_least_two(batch: Batch) -> Batch:
    """Append null sequences and pages up to two of each.

    The compiler takes a size of 1 as a constant: a graph that is traced on it serves no other size.
    """
    padded = pad_to(batch, num_seqs=max(2, batch.num_seqs), num_tokens=batch.num_tokens)
    if padded.page_table.shape[1] > 1:
        return padded
    missing = 2 - padded.page_table.shape[1]
    return replace(padded, page_table=torch.constant_pad_nd(padded.page_table, (0, missing)))


def split(batch: Batch, token: int) -> tuple[Batch, Batch]:
    """Cut a batch on the host at ``token``: tokens before it, and the rest.

    The cut may fall inside a sequence. Both halves then have its row: it ends at the cut in the
    first, and carries on from there in the second.

    Args:
        batch: a batch of CPU tensors: the cut reads its offsets.
        token: 0 to T.

    Raises:
        ValueError: ``token`` is out of range.
    """
    if not 0 <= token <= batch.num_tokens:
        raise ValueError(f"the cut must be within 0 and {batch.num_tokens}, got {token}")
    cu_seqlens = batch.cu_seqlens
    num_first = int((cu_seqlens[:-1] < token).sum())  # sequences that start before the cut
    num_done = int((cu_seqlens[1:] <= token).sum())  # sequences that end at or before it
    num_done = min(num_done, num_first)
    left_out = (cu_seqlens[1 : num_first + 1] - token).clamp(min=0)

    def halves(name: str, tensor: Tensor | None) -> tuple[Any, Any]:
        if tensor is None:
            return None, None
        match AXES[name][0]:
            case Axis.TOKEN:
                return tensor[..., :token], tensor[..., token:]
            case Axis.SEQUENCE:
                return tensor[:num_first], tensor[num_done:]
            case Axis.LENGTHS:
                return tensor[:num_first] - left_out, tensor[num_done:]
            case Axis.STARTS:
                left = batch.state_indices[num_done:num_first]
                return tensor[:num_first], torch.cat([left, tensor[num_first:]])
            case Axis.OFFSETS:
                first = tensor[: num_first + 1].clamp(max=token)
                return first, (tensor[num_done:] - token).clamp(min=0)
            case Axis.CONSTANT:
                return tensor, tensor

    pairs = {name: halves(name, getattr(batch, name)) for name in AXES}
    first = Batch(**{name: pair[0] for name, pair in pairs.items()})
    second = Batch(**{name: pair[1] for name, pair in pairs.items()})
    return first, second


def make_batch(
    tokens: Sequence[Sequence[int]],
    *,
    prefix_lens: Sequence[int],
    page_table: Tensor,
    state_indices: Sequence[int],
    page_size: int,
    initial_indices: Sequence[int] | None = None,
    positions: Tensor | None = None,
    num_position_axes: int = 1,
    accepted: Sequence[int] | None = None,
    num_drafts: Sequence[int] | None = None,
    embed_places: Sequence[int] | None = None,
    adapters: Sequence[int] | None = None,
    pages: Sequence[Sequence[int]] | None = None,
) -> Batch:
    """Pack the new tokens of N sequences into a batch of CPU tensors.

    Args:
        tokens: the new tokens of each sequence; 1 token is a decode step.
        prefix_lens: the number of tokens that each sequence holds already.
        page_table: [N, max_pages] int32, each row long enough for prefix and new tokens.
        state_indices: each sequence's recurrent slot.
        page_size: tokens in a page.
        initial_indices: the slot of each sequence's initial state, 0 for zeros. By default a
            sequence with a prefix starts from its own slot, others from zeros.
        positions: [T] or [num_position_axes, T] int64; by default each sequence counts on from
            its prefix, alike on every axis.
        num_position_axes: 1, or 3 for models with 3-D rotary positions.
        accepted: the number of draft records of each sequence that a verify step replays; None in
            other steps.
        num_drafts: the number of drafts among each sequence's new tokens in a verify step.
        embed_places: the indices of packed tokens whose embeddings are given rows, in the order of
            the rows; None in a step without given rows.
        adapters: slot of each sequence's adapter, 0 for none; None if no sequence has one.
        pages: pages of each sequence, the first ones of its row of the page table, of which a cache
            keeps count. With them, the slots of few tokens are computed without work on tensors,
            and nothing is checked.

    Raises:
        ValueError: the arguments are not of N sequences and T tokens, or a row of the page table
            has too few pages.
    """
    query_lens = [len(new) for new in tokens]
    if pages is None:
        _check_lengths(
            len(query_lens),
            prefix_lens=prefix_lens,
            state_indices=state_indices,
            initial_indices=initial_indices,
            accepted=accepted,
            num_drafts=num_drafts,
            adapters=adapters,
        )
        _check_pages(query_lens, prefix_lens, page_table, page_size)
        _check_places(embed_places, positions, num_position_axes, sum(query_lens))
    cu_seqlens = int_tensor(accumulate(query_lens, initial=0), torch.int32)
    num_tokens = sum(query_lens)
    if pages is not None and num_tokens <= _FEW_TOKENS:
        counted, slots = _few_places(query_lens, prefix_lens, pages, page_size)
    else:
        counted, slots = _places(query_lens, prefix_lens, cu_seqlens, page_table, page_size)
    if positions is None:
        positions = counted if num_position_axes == 1 else counted.expand(num_position_axes, -1)
    if initial_indices is None:
        pairs = zip(state_indices, prefix_lens, strict=True)
        initial_indices = [slot if length else 0 for slot, length in pairs]
    return Batch(
        tokens=joined(tokens),
        positions=positions,
        slot_mapping=slots,
        cu_seqlens=cu_seqlens,
        seq_lens=int_tensor(map(add, prefix_lens, query_lens), torch.int32),
        page_table=page_table,
        initial_indices=int_tensor(initial_indices, torch.int32),
        state_indices=int_tensor(state_indices, torch.int32),
        accepted=None if accepted is None else int_tensor(accepted, torch.int32),
        num_drafts=None if num_drafts is None else int_tensor(num_drafts, torch.int32),
        embed_rows=None if embed_places is None else _numbered(embed_places, num_tokens),
        adapter_slots=None if adapters is None else _of_tokens(adapters, query_lens),
    )


def _check_lengths(num_seqs: int, **of_each: Sequence[int] | None) -> None:
    for name, given in of_each.items():
        if given is not None and len(given) != num_seqs:
            raise ValueError(f"{name} must have one entry for each of {num_seqs}, got {given}")


def _check_pages(
    query_lens: Sequence[int], prefix_lens: Sequence[int], page_table: Tensor, page_size: int
) -> None:
    if page_size < 1:
        raise ValueError(f"page_size must be at least 1, got {page_size}")
    if page_table.dtype != torch.int32 or page_table.shape[:-1] != (len(query_lens),):
        raise ValueError(
            f"page_table must be int32 of shape [{len(query_lens)}, max_pages], got "
            f"{page_table.dtype} of shape {list(page_table.shape)}"
        )
    if min(prefix_lens, default=0) < 0:
        raise ValueError(f"prefix_lens must be at least 0, got {prefix_lens}")
    needed = -(-max(map(add, prefix_lens, query_lens), default=0) // page_size)
    if needed > page_table.shape[1]:
        raise ValueError(
            f"page_table must have {needed} pages in a row for the longest sequence, got "
            f"{page_table.shape[1]}"
        )


def _check_places(
    embed_places: Sequence[int] | None, positions: Tensor | None, num_axes: int, num_tokens: int
) -> None:
    if embed_places and not 0 <= min(embed_places) <= max(embed_places) < num_tokens:
        raise ValueError(f"embed_places must be within 0 and {num_tokens - 1}, got {embed_places}")
    expected = (num_tokens,) if num_axes == 1 else (num_axes, num_tokens)
    if positions is not None and (positions.dtype, positions.shape) != (torch.int64, expected):
        raise ValueError(
            f"positions must be int64 of shape {list(expected)}, got {positions.dtype} of shape "
            f"{list(positions.shape)}"
        )


def _few_places(
    query_lens: Sequence[int],
    prefix_lens: Sequence[int],
    pages: Sequence[Sequence[int]],
    page_size: int,
) -> tuple[Tensor, Tensor]:
    """Compute the positions, [T] int64, and the KV slots, [T] int32, of few tokens."""
    positions, slots = array("q"), array("i")
    for length, first, own in zip(query_lens, prefix_lens, pages, strict=True):
        for position in range(first, first + length):
            positions.append(position)
            slots.append(own[position // page_size] * page_size + position % page_size)
    return int_tensor(positions, torch.int64), int_tensor(slots, torch.int32)


def _places(
    query_lens: Sequence[int],
    prefix_lens: Sequence[int],
    cu_seqlens: Tensor,
    page_table: Tensor,
    page_size: int,
) -> tuple[Tensor, Tensor]:
    """Compute the positions, [T] int64, and the KV slots, [T] int32, of any number of tokens."""
    num_seqs, num_tokens = len(query_lens), sum(query_lens)
    prefix = int_tensor(prefix_lens, torch.int32)
    # The first entry of each sequence's row in the flat page table.
    first_entry = torch.arange(num_seqs, dtype=torch.int64, device="cpu") * page_table.shape[1]
    if query_lens.count(1) == num_seqs:  # a decode step: token i belongs to sequence i
        position = prefix
    elif num_seqs == 1:
        first = prefix_lens[0]
        position = torch.arange(first, first + num_tokens, dtype=torch.int32, device="cpu")
    else:
        row_of_token = _row_of_token(query_lens)
        offset = torch.arange(num_tokens, dtype=torch.int32, device="cpu")
        position = offset + (prefix - cu_seqlens[:-1]).index_select(0, row_of_token)
        first_entry = first_entry.index_select(0, row_of_token)
    place = _divided(position, page_size)
    page = page_table.reshape(-1).index_select(0, first_entry + place)
    return position.long(), (page - place) * page_size + position


def chained(
    batch: Batch,
    *,
    positions: Sequence[Sequence[int]],
    slots: Sequence[Sequence[int]],
    seq_lens: Sequence[Sequence[int]],
) -> list[Batch]:
    """Make decode steps that follow a batch; their tokens are filled in later.

    The steps share tensors where they are alike. ``positions``, ``slots`` and ``seq_lens`` have a
    row for each step, of the first M sequences; later sequences are padding.

    Args:
        batch: a batch of N sequences, padding included.
        positions: positions of the tokens.
        slots: KV slots of the tokens.
        seq_lens: lengths of the sequences, the token included.
    """
    num_seqs, num_going = batch.num_seqs, max(map(len, slots), default=0)
    padding, axes = [0] * (num_seqs - num_going), batch.positions.shape[:-1]

    def rows(values: Sequence[Sequence[int]], dtype: torch.dtype) -> Iterable[Tensor]:
        packed = int_tensor(chain.from_iterable((*row, *padding) for row in values), dtype)
        return packed.view(len(values), num_seqs).unbind()

    tokens = torch.zeros(num_seqs, dtype=torch.int64, device="cpu")
    counted = [*range(num_going), *[num_going] * (1 + len(padding))]
    first = replace(batch, tokens=tokens, cu_seqlens=int_tensor(counted, torch.int32))
    each = rows(positions, torch.int64), rows(slots, torch.int32), rows(seq_lens, torch.int32)
    return [
        replace(
            first,
            positions=position.expand(*axes, -1) if axes else position,
            slot_mapping=mapping,
            seq_lens=lengths,
        )
        for position, mapping, lengths in zip(*each, strict=True)
    ]


def _numbered(places: Sequence[int], num_tokens: int) -> Tensor:
    """Number these places 1, 2 and so on: [num_tokens] int32, 0 elsewhere."""
    rows = torch.zeros(num_tokens, dtype=torch.int32, device="cpu")
    if places:
        count = torch.arange(1, 1 + len(places), dtype=torch.int32, device="cpu")
        rows[int_tensor(places, torch.int64)] = count
    return rows


def _divided(positions: Tensor, page_size: int) -> Tensor:
    """Divide positions by the page size; a shift takes a quarter of the time of a division."""
    bits = page_size.bit_length() - 1
    return positions >> bits if page_size == 1 << bits else positions // page_size


def _of_tokens(values: Sequence[int], query_lens: Sequence[int]) -> Tensor:
    """Repeat the value of each sequence for each of its tokens: [T] int32."""
    repeated = array("i")
    for value, length in zip(values, query_lens, strict=True):
        repeated.extend(array("i", (value,)) * length)
    return int_tensor(repeated, torch.int32)


def _row_of_token(query_lens: Sequence[int]) -> Tensor:
    """Find the sequence of each token: [T] int64.

    ``repeat_interleave`` would wake all threads, however few the tokens are. That takes
    milliseconds now and then, and tens of them where several processes share the cores.
    """
    rows = array("q")
    for row, length in enumerate(query_lens):
        rows.extend(array("q", (row,)) * length)
    return int_tensor(rows, torch.int64)
