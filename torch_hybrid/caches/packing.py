"""Batch of a step, packed from the state of its sequences and their new tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor

from torch_hybrid.batch import KEPT, Batch, make_batch
from torch_hybrid.caches.adapter import slot_of
from torch_hybrid.caches.sequence import SequenceState
from torch_hybrid.host.ints import int_tensor


def pack(
    owners: Sequence[SequenceState],
    tokens: Sequence[Sequence[int]],
    *,
    page_table: Tensor,
    page_size: int,
    positions: Tensor | None,
    num_position_axes: int,
    num_drafts: Sequence[int] | None,
    embed_places: Sequence[int] | None,
) -> Batch:
    """Pack the new tokens of sequences, which have pages for them.

    Args:
        owners: state of N sequences. Mutated: the shift of their rotary positions.
        tokens: new tokens of each.
        page_table: [N, any width] int32.
        page_size, positions, num_position_axes, embed_places: see ``make_batch``.
        num_drafts: number of drafts among the tokens of each; None if the step replays nothing.
    """
    if positions is not None:
        _note_shifts(owners, list(map(len, tokens)), positions)
    return make_batch(
        tokens,
        prefix_lens=[held.length for held in owners],
        page_table=page_table,
        pages=[held.pages for held in owners],
        initial_indices=[held.start if held.length else 0 for held in owners],
        state_indices=[held.slot for held in owners],
        page_size=page_size,
        positions=positions,
        num_position_axes=num_position_axes,
        accepted=None if num_drafts is None else [held.num_accepted for held in owners],
        num_drafts=num_drafts,
        embed_places=embed_places,
        adapters=_adapters_of(owners),
    )


def pack_unread(
    owners: Sequence[SequenceState],
    tokens: Sequence[Sequence[int]],
    *,
    page_table: Tensor,
    page_size: int,
    num_position_axes: int,
) -> Batch:
    """Pack the tokens that the model's head has to read: unread ones (``KEPT``), and new ones.

    No state is stored.

    Args:
        owners: state of N sequences.
        tokens: tokens after those that each sequence holds.
        page_table: [N, any width] int32.
        page_size, num_position_axes: see ``make_batch``.
    """
    read = [[KEPT] * held.num_unread + [*n] for held, n in zip(owners, tokens, strict=True)]
    prefix_lens = [held.length - held.num_unread for held in owners]
    positions = None
    if any(held.shift for held in owners):
        starts = [length + held.shift for length, held in zip(prefix_lens, owners, strict=True)]
        spans = (range(x, x + len(own)) for x, own in zip(starts, read, strict=True))
        positions = int_tensor(chain.from_iterable(spans), torch.int64)
        positions = positions.expand(num_position_axes, -1)
    return make_batch(
        read,
        prefix_lens=prefix_lens,
        positions=positions,
        page_table=page_table,
        pages=[held.pages for held in owners],
        initial_indices=[held.start if held.length else 0 for held in owners],
        state_indices=[0] * len(owners),
        page_size=page_size,
        num_position_axes=num_position_axes,
    )


def places_after(
    owners: Sequence[SequenceState], counts: Sequence[int], num_steps: int, page_size: int
) -> dict[str, list[list[int]]]:
    """Compute positions, KV slots and lengths of decode steps; see ``HybridCache.places_after``."""
    numbers = [
        [held.length + min(ahead, n - 1) for held, n in zip(owners, counts, strict=True)]
        for ahead in range(1, 1 + num_steps)
    ]

    def each(of: Callable[[SequenceState, int], int]) -> list[list[int]]:
        return [list(map(of, owners, row)) for row in numbers]

    return {
        "positions": each(lambda held, number: number + held.shift),
        "slots": each(lambda held, n: held.pages[n // page_size] * page_size + n % page_size),
        "seq_lens": each(lambda held, number: number + 1),
    }


def _adapters_of(owners: Sequence[SequenceState]) -> list[int] | None:
    """List the slot of each sequence's adapter, 0 for none; None if no sequence has one."""
    if all(held.adapter is None for held in owners):
        return None
    return [slot_of(held.adapter) for held in owners]


def _note_shifts(
    owners: Sequence[SequenceState], num_new: Sequence[int], positions: Tensor
) -> None:
    """Record how far images shift the rotary positions of the tokens after a step."""
    furthest = positions.reshape(-1, positions.shape[-1]).amax(0)
    for held, n, end in zip(owners, num_new, accumulate(num_new), strict=True):
        if n:
            held.shift = int(furthest[end - n : end].max()) + 1 - (held.length + n)
