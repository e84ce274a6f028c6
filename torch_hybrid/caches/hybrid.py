"""Hybrid cache: all pools of a model, and the slots and pages of its sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from itertools import accumulate, count, pairwise

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_hybrid.batch import Batch, bucket_of, pad_to
from torch_hybrid.caches.adapter import Adapter
from torch_hybrid.caches.allocator import Allocator
from torch_hybrid.caches.packing import pack, pack_unread, places_after
from torch_hybrid.caches.page_table import PageTable
from torch_hybrid.caches.pool_copies import PoolCopies
from torch_hybrid.caches.pools import LayerCache, make_pools, pool_cost
from torch_hybrid.caches.room import check_pools
from torch_hybrid.caches.scales import write_scales
from torch_hybrid.caches.sequence import Sequence, SequenceState
from torch_hybrid.caches.sizes import PoolCost, PoolSizes
from torch_hybrid.caches.snapshot import Snapshot, Snapshots, SnapshotState
from torch_hybrid.host.ints import counts_of, int_tensor
from torch_hybrid.specs import SCALES, LayerTable


class HybridCache:
    """Pools of every layer by kind, and the slots, pages and lengths of the live sequences.

    ``snapshots`` are the live snapshots; ``packing`` makes batches of sequences.

    It can be made in ``torch.inference_mode()`` and used outside. Not thread-safe.

    Args:
        table: the model's layers.
        max_seqs: slots for sequences.
        kv_tokens: tokens that all sequences together may hold, rounded up to whole pages.
        page_size: tokens in a page.
        dtype: dtype of keys, values and convolution states.
        device: device of the pools; the bookkeeping stays on the host.
        max_snapshots: slots for the states of snapshots. A model without states needs none: only
            pages limit its snapshots.
        num_drafts: the most drafts of a sequence.
        opens_chunks: whether decode keeps chunks open, as ``opens_chunks`` of the backends tells.

    Raises:
        ValueError: a size is too small to hold anything.
        CapacityError: the device has no memory for the pools, or the host for the bookkeeping.
    """

    @torch.inference_mode(mode=False)
    def __init__(
        self,
        table: LayerTable,
        *,
        max_seqs: int,
        kv_tokens: int,
        page_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        max_snapshots: int = 0,
        num_drafts: int = 0,
        opens_chunks: bool = False,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        if max_snapshots < 0:
            raise ValueError(f"max_snapshots must not be negative, got {max_snapshots}")
        self._owner = object()
        self.table = table
        self._has_states = table.has_states
        self.page_size = page_size
        self.num_pages = -(-kv_tokens // page_size)
        self.sizes = PoolSizes(
            num_pages=self.num_pages,
            page_size=page_size,
            num_slots=max_seqs,
            num_snapshots=max_snapshots if self._has_states else 0,
            dtype=dtype,
            device=torch.device(device),
            num_drafts=num_drafts,
            opens_chunks=opens_chunks,
        )
        check_pools(self.sizes, self.costs())
        self.slots = Allocator(max_seqs, unit="sequence slot", limit="max_seqs")
        self.states = Allocator(
            max_seqs + self.sizes.num_snapshots, unit="state slot", limit="max_snapshots"
        )
        self.pages = Allocator(self.num_pages, unit="KV page", limit="kv_tokens")
        self.pools: dict[str, tuple[LayerCache, ...]] = {
            kind: tuple(make_pools(entry.spec, self.sizes) for entry in table.of_kind(kind))
            for kind in table.kinds
        }
        self._held: dict[int, SequenceState] = {}  # by the id of a live sequence
        self._ids = count(1)
        self._copies = PoolCopies(table, self.pools, self.sizes.device)
        self.snapshots = Snapshots(
            slots=self.slots,
            states=self.states if self._has_states else None,
            pages=self.pages,
            page_size=page_size,
            copies=self._copies,
            ids=self._ids,
            capacity=self.sizes.num_snapshots,
            owner=self._owner,
        )
        self._page_table = PageTable(max_seqs, self.num_pages)

    def allocate(
        self,
        num_seqs: int,
        start: Snapshot | None = None,
        length: int | None = None,
        adapter: Adapter | None = None,
    ) -> list[Sequence]:
        """Take a slot for each of ``num_seqs`` new sequences.

        Args:
            num_seqs: number of sequences.
            start: snapshot to start from, if any. Its pages are shared, its states read.
            length: number of tokens of ``start`` to keep; all by default, as a model with states
                requires.
            adapter: adapter of their tokens.

        Raises:
            CapacityError: fewer slots are free.
            ValueError: ``start`` is foreign, was released, has another adapter, or cannot be cut to
                ``length`` tokens.
        """
        if length is not None:
            (length,) = counts_of("length", [length])
        kept = None if start is None else self.snapshots.find(start, length)
        if kept is not None and kept.adapter is not adapter:
            own, wanted = (None if x is None else x.name for x in (kept.adapter, adapter))
            of_before = ", which was unloaded meanwhile" if own == wanted else ""
            raise ValueError(
                f"{start} has adapter {own!r}{of_before}, and sequences with {wanted!r} start"
            )
        places = self.slots.take(num_seqs)
        slots = self.states.take(num_seqs)
        seqs = []
        for place, slot in zip(places, slots, strict=True):
            held = SequenceState(place=place, slot=slot, start=slot, adapter=adapter)
            seqs.append(Sequence(next(self._ids), self._owner, held))
            self._held[seqs[-1].id] = held
            if start is not None and kept is not None:
                self._start(held, kept, start.num_tokens if length is None else length)
        return seqs

    def _start(self, held: SequenceState, kept: SnapshotState, length: int) -> None:
        """Start a new sequence after the first ``length`` tokens of a snapshot."""
        held.pages = kept.pages[: -(-length // self.page_size)]
        held.length = length
        held.has_borrowed = length % self.page_size != 0
        self.pages.share(held.pages)
        self._page_table.row(held)[: len(held.pages)] = int_tensor(held.pages, torch.int32)
        if kept.slot is not None:
            self.states.share([kept.slot])
            held.start = kept.slot

    def free(self, seqs: Many[Sequence]) -> None:
        """Give back the slots and pages of ``seqs``; all or none.

        Raises:
            ValueError: a handle is foreign, was freed before, or is given twice.
        """
        self.check(seqs)
        for seq in seqs:
            held = self._held.pop(seq.id)
            self.pages.give_back(held.pages)
            self.states.give_back(list({held.slot, held.start}))
            self.slots.give_back([held.place])
            self._page_table.row(held)[: len(held.pages)] = 0

    def snapshot(self, seq: Sequence, *, spare: bool = False) -> Snapshot:
        """Make a snapshot of a sequence, without a copy.

        The pages are shared. The snapshot takes over the sequence's slot: the next step of the
        sequence reads that slot once more, and stores to another one.

        Args:
            seq: a sequence with at least one token.
            spare: the snapshot belongs to a reclaimer, which releases it when pages run short.

        Raises:
            ValueError: the handle is foreign, was freed, is broken, or holds no token.
            CapacityError: all state slots of snapshots are taken.
        """
        self.check_usable([seq])
        held = self._held[seq.id]
        if not held.length:
            raise ValueError(f"{seq} holds no token, and a snapshot must have at least 1")
        slot = None
        if self._has_states:
            if held.start == held.slot:
                self.snapshots.free_one()
                (held.slot,) = self.states.take(1)
            slot = held.start
            self.states.share([slot])
        pages = held.pages[: -(-held.length // self.page_size)]
        self.pages.share(pages, spare=spare)
        return self.snapshots.add(held.length, slot, pages, spare=spare, adapter=held.adapter)

    @property
    def adapters_in_use(self) -> set[Adapter]:
        """Adapters of live sequences."""
        return {held.adapter for held in self._held.values() if held.adapter is not None}

    def release(self, snapshot: Snapshot) -> None:
        """Release a snapshot; sequences that started from it stay as they are.

        Raises:
            ValueError: the handle is foreign or was released before.
        """
        self.snapshots.release(snapshot)

    @property
    def num_free_snapshots(self) -> int:
        """Number of snapshots that can still be made."""
        return self.snapshots.num_free

    def num_freed_by(self, seq: Sequence) -> int:
        """Count the pages that become free or spare once a sequence is freed."""
        self.check([seq])
        return self.pages.count_firm_once(self._held[seq.id].pages)

    def check(self, seqs: Many[Sequence]) -> None:
        """Raise ValueError unless every handle is live, ours, and given once.

        Raises TypeError for what is no list of sequences.
        """
        owner, held = self._owner, self._held
        try:
            unknown = [seq for seq in seqs if seq.owner is not owner or seq.id not in held]
        except (AttributeError, TypeError):
            raise TypeError(f"expected a list of sequences, got {seqs!r}") from None
        for seq in unknown:
            what = "was freed" if seq.owner is owner else "belongs to another runner"
            raise ValueError(f"{seq} {what}")
        if len({seq.id for seq in seqs}) != len(seqs):
            raise ValueError("a sequence is given twice in one call")

    def holds(self, seq: Sequence) -> bool:
        """Tell whether a handle is ours and live."""
        return seq.owner is self._owner and seq.id in self._held

    def check_nothing_held(self) -> None:
        """Raise ValueError if there are sequences, or snapshots that are not spare."""
        kept = self.snapshots.num_firm
        if self._held or kept:
            raise ValueError(
                f"{len(self._held)} sequences and {kept} snapshots are held, with states of the "
                f"weights as they are: free and release them first"
            )

    @property
    def keeps_anything(self) -> bool:
        """True if there are sequences, snapshots, or holders of spare snapshots or their copies."""
        return bool(self._held or self.snapshots.num_firm or self.snapshots.reclaimers)

    def check_usable(self, seqs: Many[Sequence]) -> None:
        """Raise ValueError as ``check`` does, or if an interrupted step has broken a sequence."""
        self.check(seqs)
        held = self._held
        for seq in [seq for seq in seqs if held[seq.id].is_broken]:
            raise ValueError(f"{seq} was in a step that did not finish: free it")

    def length(self, seq: Sequence) -> int:
        """Count the committed tokens of a sequence."""
        self.check([seq])
        return self._held[seq.id].length

    def slot(self, seq: Sequence) -> int:
        """Return the slot that a step stores the states of ``seq`` to."""
        self.check([seq])
        return self._held[seq.id].slot

    def places_of(self, seqs: Many[Sequence]) -> list[int]:
        """List the numbers of distinct sequences, 1 to ``max_seqs``, each fixed for life."""
        self.check(seqs)
        return [self._held[seq.id].place for seq in seqs]

    def pages_needed(self, seq: Sequence, num_new: int) -> int:
        """Count the pages that ``seq`` needs for ``num_new`` more tokens.

        Raises:
            ValueError: the handle is foreign or was freed.
        """
        self.check([seq])
        return self._pages_short(self._held[seq.id], num_new)

    def _pages_short(self, held: SequenceState, num_new: int) -> int:
        total = -(-(held.length + num_new) // self.page_size)
        return max(0, total - len(held.pages)) + (held.has_borrowed and num_new > 0)

    def reserve(self, seqs: Many[Sequence], num_new: Many[int]) -> None:
        """Give each sequence the pages that its new tokens need; all or none.

        Reclaimers give up spare snapshots for it. A last page that a snapshot shares is copied.

        Raises:
            CapacityError: fewer pages are free.
        """
        owners = [self._held[seq.id] for seq in seqs]
        size = self.page_size
        needed = [
            0
            if held.length + n <= len(held.pages) * size and not held.has_borrowed
            else self._pages_short(held, n)
            for held, n in zip(owners, num_new, strict=True)
        ]
        if not any(needed):
            return
        self.snapshots.free_pages(sum(needed))
        taken = self.pages.take(sum(needed))
        ends = list(accumulate(needed, initial=0))
        grown = [
            (held, taken[start:end], len(held.pages) - held.has_borrowed)
            for held, (start, end) in zip(owners, pairwise(ends), strict=True)
            if end > start
        ]
        borrowed = [(held.pages[-1], new[0]) for held, new, _ in grown if held.has_borrowed]
        try:
            if borrowed:
                self._copies.copy(*zip(*borrowed, strict=True))
            tables = [
                (self._page_table.row(held)[first : first + len(new)], int_tensor(new, torch.int32))
                for held, new, first in grown
            ]
            for row, pages in tables:
                row.copy_(pages)
        except BaseException:
            for held, _, _ in grown:  # entries beyond a row's own pages are unused
                self._page_table.row(held)[: len(held.pages)] = int_tensor(held.pages, torch.int32)
            self.pages.give_back(taken)
            raise
        for held, new, first in grown:
            held.pages[first:] = new
            held.has_borrowed = False
        self.pages.give_back_each([page for page, _ in borrowed])

    def commit(self, seqs: Many[Sequence], num_new: Many[int], *, are_read: bool = False) -> None:
        """Commit the new tokens of a step that has finished.

        Tokens accepted before have been replayed, and other drafts are forgotten. With
        ``are_read``, the model's head has read the new tokens.
        """
        for seq, n in zip(seqs, counts_of("num_new", num_new), strict=True):
            held = self._held[seq.id]
            held.length += n
            held.num_unread += 0 if are_read else n
            held.num_drafts = held.num_accepted = 0
            self._leave_start(held)

    def commit_drafts(self, seqs: Many[Sequence], num_drafts: Many[int]) -> None:
        """Commit the first new token of each sequence, and record its drafts.

        Tokens accepted before have been replayed.

        Args:
            seqs: sequences of a step that verified drafts.
            num_drafts: number of drafts of each; -1 for a sequence without a new token.
        """
        for seq, n in zip(seqs, num_drafts, strict=True):
            held = self._held[seq.id]
            held.length += n >= 0
            held.num_unread += n >= 0
            held.num_drafts, held.num_accepted = max(n, 0), 0
            self._leave_start(held)

    def _leave_start(self, held: SequenceState) -> None:
        """Release the slot that a sequence started from: its own slot has its states now."""
        if held.start != held.slot:
            self.states.give_back([held.start])
            held.start = held.slot

    def accept(self, seqs: Many[Sequence], counts: Many[int]) -> None:
        """Commit the first drafts of each sequence, and free the pages of the others; all or none.

        Raises:
            ValueError: a sequence has fewer drafts, or a handle is foreign, freed or given twice.
        """
        self.check(seqs)
        owners, counts = [self._held[seq.id] for seq in seqs], counts_of("counts", counts)
        for seq, held, n in zip(seqs, owners, counts, strict=True):
            if not 0 <= n <= held.num_drafts:
                raise ValueError(
                    f"accepted must be within 0 and {held.num_drafts}, the drafts of {seq} in its "
                    f"last step, got {n}"
                )
        for held, n in zip(owners, counts, strict=True):
            held.length += n
            held.num_unread += n
            held.num_drafts, held.num_accepted = 0, n
        self.give_back_pages(seqs)

    def give_back_pages(self, seqs: Many[Sequence]) -> None:
        """Give back the pages that hold neither committed tokens nor drafts."""
        for held in (self._held[seq.id] for seq in seqs):
            num_used = -(-(held.length + held.num_drafts) // self.page_size)
            if num_used < len(held.pages):
                self.pages.give_back(held.pages[num_used:])
                self._page_table.row(held)[num_used : len(held.pages)] = 0
                del held.pages[num_used:]

    def are_replayed(self, seqs: Many[Sequence]) -> bool:
        """Tell whether the states of all sequences hold all of their committed tokens.

        Unknown sequences count as replayed.
        """
        known = (self._held.get(seq.id) for seq in seqs)
        return not any(held.num_accepted for held in known if held is not None)

    def mark_broken(self, seqs: Many[Sequence]) -> None:
        """Mark sequences of an interrupted step: with unknown contents, they can only be freed."""
        for seq in seqs:
            self._held[seq.id].is_broken = True

    def make_batch(
        self,
        seqs: Many[Sequence],
        tokens: Many[Many[int]],
        *,
        positions: Tensor | None = None,
        num_position_axes: int = 1,
        table_width: Callable[[int], int] = lambda used: used,
        num_drafts: Many[int] | None = None,
        embed_places: Many[int] | None = None,
        buckets: Many[int] | None = None,
    ) -> Batch:
        """Reserve pages for the new tokens of ``seqs`` and pack them, on the host.

        Args:
            seqs: N live sequences.
            tokens: the new tokens of each.
            positions, num_position_axes, embed_places: see ``torch_hybrid.batch.make_batch``.
            table_width: maps the most pages of one sequence to the width of the page table.
            num_drafts: number of drafts among the new tokens of each; the step then replays tokens
                that were accepted before.
            buckets: ascending sizes, the first at least 2. The batch is padded to the first sizes
                that hold its sequences and its tokens; a decode batch has as many tokens as
                sequences. A compiled module then has one graph for decode and one for extend.
                Padding comes last, and its results mean nothing.

        Raises:
            ValueError: a handle is foreign, was freed, is given twice, or was broken, or no bucket
                is large enough.
            CapacityError: fewer pages are free than the tokens need; nothing has changed.
        """
        self.check_usable(seqs)
        lengths = [len(new) for new in tokens]
        sizes = None if buckets is None else bucket_of(lengths, buckets)
        self.reserve(seqs, lengths)
        owners = [self._held[seq.id] for seq in seqs]
        batch = pack(
            owners,
            tokens,
            page_table=self._page_table.rows(owners, table_width),
            page_size=self.page_size,
            positions=positions,
            num_position_axes=num_position_axes,
            num_drafts=num_drafts,
            embed_places=embed_places,
        )
        return batch if sizes is None else pad_to(batch, num_seqs=sizes[0], num_tokens=sizes[1])

    def make_draft_batch(
        self,
        seqs: Many[Sequence],
        tokens: Many[Many[int]],
        counts: Many[int],
        *,
        num_position_axes: int = 1,
        table_width: Callable[[int], int] = lambda used: used,
    ) -> Batch:
        """Pack the tokens that the model's head has to read, and reserve pages for its drafts.

        These are the last committed tokens that the head has not read (``KEPT``), and ``tokens``
        after them. No state is stored.

        Args:
            seqs: N live sequences.
            tokens: the token after the committed ones of each, one or none.
            counts: number of tokens of each to reserve pages for, ``tokens`` included.
            num_position_axes, table_width: see ``make_batch``.

        Raises:
            ValueError, CapacityError: see ``make_batch``.
        """
        self.check_usable(seqs)
        self.reserve(seqs, counts)
        owners = [self._held[seq.id] for seq in seqs]
        return pack_unread(
            owners,
            tokens,
            page_table=self._page_table.rows(owners, table_width),
            page_size=self.page_size,
            num_position_axes=num_position_axes,
        )

    def places_after(
        self, seqs: Many[Sequence], counts: Many[int], num_steps: int
    ) -> dict[str, list[list[int]]]:
        """Compute positions, KV slots and lengths of decode steps, after a first one.

        No token of these steps, or of the first one, is committed.

        Args:
            seqs: N live sequences, or none.
            counts: tokens of each that there are pages for, at least 1, the first step's included.
                Later steps repeat the last of them.
            num_steps: number of decode steps.
        """
        return places_after([self._held[seq.id] for seq in seqs], counts, num_steps, self.page_size)

    def num_unread(self, seq: Sequence) -> int:
        """Count the last tokens of a sequence that the model's head has not read; 0 if unknown."""
        held = self._held.get(seq.id)
        return 0 if held is None else held.num_unread

    def moves(self, seq: Sequence) -> bool:
        """Tell whether the next step reads a sequence's states from a snapshot's slot.

        False for unknown sequences.
        """
        held = self._held.get(seq.id)
        return held is not None and held.start != held.slot

    def note_read(self, seqs: Many[Sequence]) -> None:
        """Record that the model's head has read all tokens of sequences."""
        for seq in seqs:
            self._held[seq.id].num_unread = 0

    def pool_tensors(self) -> list[Tensor]:
        """List all pool tensors, kind by kind."""
        tensors: list[Tensor] = pytree.tree_leaves(self.pools)
        return tensors

    @property
    def scales(self) -> dict[int, Tensor]:
        """Dequantization scales in use of an FP8 cache, by layer id; empty for other caches.

        Keys and values have scales [2, heads], latents [1].
        """
        return {
            layer_id: pools[SCALES]
            for layer_id, layer in enumerate(self.table.layers)
            for entry in layer
            if SCALES in (pools := self.pools[entry.kind][entry.index])
        }

    def set_scales(self, scales: Mapping[int, Tensor]) -> None:
        """Set the dequantization scales of all layers with an FP8 cache.

        Raises:
            ValueError: layers or shapes are not those of ``scales``, or one is not positive.
        """
        write_scales(self.scales, scales)

    def costs(self) -> list[PoolCost]:
        """Count the bytes of a token and of a sequence for each mixer of ``table.entries``."""
        return [pool_cost(entry.spec, self.sizes) for entry in self.table.entries]
