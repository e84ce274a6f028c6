"""Verification of drafts by ops that do not replay records themselves: the op is called twice.

    certain    accepted records, then new tokens that are no drafts; the state is stored
    further    drafts, from that state; only their inputs are stored, as records

An op that takes tokens one by one leaves the state of plain decoding, bit by bit. ``ops.verify``
defines a step that verifies drafts, for ops that run such a step in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Ragged sequences of one call of an op, and the slots of their states."""

    cu_seqlens: Tensor  # [N + 1]
    seq_lens: Tensor  # [N] total lengths after the call
    initial_indices: Tensor  # [N] slot that each sequence starts from; 0: zeros
    state_indices: Tensor  # [N] slot that receives its state; 0: the state is not stored


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Rows of both calls in a step of N sequences and T tokens, of which each has up to D drafts.

    Row i of the first call comes from the records if ``is_record[i]``, else from this step's
    tokens. The call has C = N D + N + 1 rows, or N D + T + 1 in a step of any lengths. Padding rows
    repeat some token. The last row is always padding, so that no other size of a step equals C.
    """

    certain: Segments
    is_record: Tensor  # [C] bool
    record_slots: Tensor  # [C] int64 slot of a row's record
    record_places: Tensor  # [C] int64 place of the record in its slot
    certain_tokens: Tensor  # [C] int64 token of a row that is no record
    further: Segments
    further_tokens: Tensor  # [N D] int64 token of each row of the second call
    outputs: Tensor  # [T] int64 row of each token in both results, joined
    left_slots: Tensor  # [T] int64 slot that receives a token's record; 0: the token is no draft
    left_places: Tensor  # [T] int64 place of that record in its slot


def rows_of_replay(
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    accepted: Tensor,
    num_further: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    num_tokens: int,
    num_drafts: int,
    most_new: int,
) -> Replay:
    """Plan both calls.

    Args:
        cu_seqlens, seq_lens, accepted, initial_indices, state_indices: of the step.
        num_further: [N] drafts of each sequence.
        num_tokens: rows of the step, T.
        num_drafts: the most drafts of a sequence, D.
        most_new: the most new tokens of all sequences that are no drafts.
    """
    starts = cu_seqlens[:-1]
    num_new = cu_seqlens.diff() - num_further  # new tokens that are no drafts
    all_drafts = accepted.shape[0] * num_drafts
    certain, n, place = _rows(accepted + num_new, all_drafts + most_new + 1)
    further, m, draft = _rows(num_further, all_drafts)

    tokens = torch.arange(num_tokens, dtype=torch.int64, device=cu_seqlens.device)
    of, at = _places(cu_seqlens, tokens)
    is_new = tokens < cu_seqlens[-1]
    after = at - num_new[of]  # place among the drafts; negative: no draft
    is_draft = is_new & (after >= 0)
    outputs = torch.where(
        after >= 0, n.shape[0] + further[of] + after, certain[of] + accepted[of] + at
    )
    slots, last = state_indices, num_tokens - 1
    return Replay(
        certain=Segments(
            cu_seqlens=certain,
            seq_lens=seq_lens - num_further,
            initial_indices=initial_indices,
            state_indices=slots,
        ),
        is_record=place < accepted[n],
        record_slots=initial_indices[n].long(),
        record_places=place.clamp(max=num_drafts - 1),
        certain_tokens=(starts[n] + (place - accepted[n]).clamp(min=0)).clamp(max=last).long(),
        further=Segments(
            cu_seqlens=further,
            seq_lens=seq_lens,
            initial_indices=slots,
            state_indices=torch.zeros_like(slots),
        ),
        further_tokens=(starts[m] + num_new[m] + draft).clamp(max=last).long(),
        outputs=outputs.where(is_new, n.shape[0] - 1).long(),
        left_slots=slots[of].where(is_draft, 0).long(),
        left_places=after.where(is_draft, 0).long(),
    )


def _rows(lengths: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the offsets [N + 1] of sequences, and the sequence and place of each row.

    Rows after the last sequence count as its own.
    """
    offsets = torch.constant_pad_nd(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return offsets, *_places(
        offsets, torch.arange(num_rows, dtype=torch.int64, device=offsets.device)
    )


def _places(offsets: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the sequence of each row, and the row's place in that sequence."""
    n = torch.searchsorted(offsets[1:], rows, right=True).clamp(max=offsets.shape[0] - 2)
    return n, rows - offsets[n]


def call_twice(
    run: Callable[[Sequence[Tensor], Sequence[Tensor], Segments], Tensor],
    advancing: Sequence[Tensor],
    reading: Sequence[Tensor],
    replay: Replay,
    records: Tensor,
) -> Tensor:
    """Run a step that verifies drafts as two calls of an op.

    Args:
        run: calls the op on rows of ``advancing`` and ``reading``, with the sequences and slots of
            one of the two calls.
        advancing: [T, ...] each, inputs that states depend on; records have them side by side.
        reading: [T, ...] each, inputs that outputs alone depend on.
        replay: rows of both calls.
        records: [S, D, R]. **Mutated** at the slots that ``replay`` names.

    Returns:
        [T, ...] outputs; rows of padding are what ``run`` makes of padding.
    """
    widths = [x.shape[1:].numel() for x in advancing]
    rows = torch.cat([x.flatten(1) if x.ndim > 1 else x[:, None] for x in advancing], 1)
    replayed = records[replay.record_slots, replay.record_places]
    rows_certain = replayed.where(replay.is_record[:, None], rows[replay.certain_tokens])
    parts = zip(rows_certain.split(widths, 1), advancing, strict=True)
    certain = run(
        [
            (part.unflatten(1, x.shape[1:]) if x.ndim > 1 else part[:, 0]).to(x.dtype)
            for part, x in parts
        ],
        [x[replay.certain_tokens] for x in reading],
        replay.certain,
    )
    further = run(
        [x[replay.further_tokens] for x in advancing],
        [x[replay.further_tokens] for x in reading],
        replay.further,
    )
    records.index_put_((replay.left_slots, replay.left_places), rows)
    return torch.cat([certain, further])[replay.outputs]
