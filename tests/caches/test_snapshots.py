"""Forks, snapshots and what is kept to spare, in random order, over pools that hold stamps.

A step of a model is stood in for by its reads and writes: it stamps the places of new tokens, and
makes each state of the one before. Whoever holds something must find his own stamps, whatever
others did meanwhile.
"""

from __future__ import annotations

from array import array
from itertools import accumulate, pairwise

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from torch_hybrid.caches.allocator import Allocator
from torch_hybrid.caches.hybrid import HybridCache
from torch_hybrid.caches.pool_copies import HostCopy
from torch_hybrid.caches.sequence import Sequence
from torch_hybrid.caches.snapshot import Snapshot
from torch_hybrid.errors import CapacityError
from torch_hybrid.specs import AttentionSpec, DeltaRuleSpec, LatentSpec, LayerTable

FULL = AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=2, scale=1.0)
LATENT = LatentSpec(num_heads=1, latent_rank=1, nope_dim=1, rope_dim=1, v_dim=1, scale=1.0)
LINEAR = DeltaRuleSpec(num_k_heads=1, num_v_heads=1, head_k_dim=1, head_v_dim=1, conv_width=2)
MAX_SEQS, MAX_CHECKPOINTS, NUM_PAGES, PAGE_SIZE = 3, 3, 8, 4


class Spare:
    """Keeps snapshots to spare, the oldest first."""

    def __init__(self, cache: HybridCache) -> None:
        self.cache = cache
        self.kept: dict[Snapshot, list[int]] = {}

    def _drop(self) -> None:
        self.kept.pop(oldest := next(iter(self.kept)))
        self.cache.release(oldest)

    def free_pages(self, count: int) -> None:
        while self.kept and self.cache.pages.num_free < count:
            self._drop()

    def free_snapshot(self) -> None:
        while self.kept and not self.cache.num_free_snapshots:
            self._drop()


class SnapshotMachine(RuleBasedStateMachine):
    """Random calls; every holder's tokens are known, and are what the pools must say."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = HybridCache(
            LayerTable.from_specs([LINEAR, FULL, LATENT]),
            max_seqs=MAX_SEQS,
            kv_tokens=NUM_PAGES * PAGE_SIZE,
            page_size=PAGE_SIZE,
            max_snapshots=MAX_CHECKPOINTS,
        )
        self.spare = Spare(self.cache)
        self.cache.snapshots.reclaimers.append(self.spare)
        self.live: dict[Sequence, list[int]] = {}
        self.kept: dict[Snapshot, list[int]] = {}
        self.on_host: list[tuple[HostCopy, list[int]]] = []
        self.last = 0

    def some(self, data: st.DataObject, holders: dict) -> object:
        return data.draw(st.sampled_from(sorted(holders, key=repr)))

    @rule(count=st.integers(1, 2))
    def begin(self, count: int) -> None:
        if len(self.live) + count <= MAX_SEQS:
            self.live.update({seq: [] for seq in self.cache.allocate(count)})

    @precondition(lambda self: (self.kept or self.spare.kept) and len(self.live) < MAX_SEQS)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        kept = {**self.kept, **self.spare.kept}
        start = self.some(data, kept)
        (seq,) = self.cache.allocate(1, start)
        self.live[seq] = kept[start].copy()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), finishes=st.sampled_from([True, True, False]))
    def step(self, data: st.DataObject, finishes: bool) -> None:
        seqs = data.draw(
            st.lists(st.sampled_from(sorted(self.live, key=repr)), unique=True, min_size=1)
        )
        counts = [data.draw(st.integers(1, 6)) for _ in seqs]
        ends = list(accumulate(counts, initial=self.last + 1))
        self.last = ends[-1]
        new = [list(range(start, end)) for start, end in pairwise(ends)]
        pages = self.cache.pages
        room = pages.num_free + pages.num_spare
        needed = sum(self.cache.pages_needed(s, n) for s, n in zip(seqs, counts, strict=True))
        try:
            batch = self.cache.make_batch(seqs, new)
        except CapacityError:
            assert needed > room
            return
        assert needed <= room
        if not finishes:
            return
        (kv,), (latents,) = (self.cache.pools[x] for x in ("paged_attention", "latent_attention"))
        for pool in (kv["kv"][0], kv["kv"][1], latents["latents"]):
            flat = pool.view(-1, pool.shape[-1])
            flat[batch.slot_mapping.long()] = batch.tokens.float()[:, None]
        (linear,) = self.cache.pools["gated_delta_rule"]
        state = linear["state"].view(-1)
        before = state[batch.initial_indices.long()] * (batch.initial_indices > 0)
        sums = torch.tensor([float(sum(tokens)) for tokens in new])
        state[batch.state_indices.long()] = before + sums
        self.cache.commit(seqs, counts)
        for seq, tokens in zip(seqs, new, strict=True):
            self.live[seq] = self.live[seq] + tokens

    @precondition(lambda self: any(self.live.values()))
    @rule(data=st.data(), spare=st.booleans())
    def snapshot(self, data: st.DataObject, spare: bool) -> None:
        seq = self.some(data, {seq: x for seq, x in self.live.items() if x})
        try:
            made = self.cache.snapshot(seq, spare=spare)
        except CapacityError:
            assert not self.spare.kept
            return
        (self.spare.kept if spare else self.kept)[made] = self.live[seq]

    @precondition(lambda self: self.kept or self.spare.kept)
    @rule(data=st.data())
    def copy_to_host(self, data: st.DataObject) -> None:
        kept = {**self.kept, **self.spare.kept}
        made = self.some(data, kept)
        self.on_host = [*self.on_host[-2:], (self.cache.snapshots.to_host(made), kept[made])]

    @precondition(lambda self: self.on_host)
    @rule(data=st.data())
    def bring_back(self, data: st.DataObject) -> None:
        copy, tokens = data.draw(st.sampled_from(self.on_host))
        pages = self.cache.pages
        has_room = -(-len(tokens) // PAGE_SIZE) <= pages.num_free + pages.num_spare
        try:
            made = self.cache.snapshots.from_host(copy)
        except CapacityError:
            assert not has_room or not self.spare.kept
            return
        self.spare.kept[made] = tokens

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.kept.pop(old := self.some(data, self.kept))
        self.cache.release(old)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.live.pop(old := self.some(data, self.live))
        self.cache.free([old])

    @invariant()
    def everybody_finds_his_own(self) -> None:
        for seq, tokens in self.live.items():
            held = self.cache._held[seq.id]
            self.assert_holds(held.pages, held.start, tokens)
            assert self.cache.make_batch([seq], [[]]).page_table[0].tolist() == held.pages.tolist()
        for made, tokens in {**self.kept, **self.spare.kept}.items():
            kept = self.cache.snapshots._kept[made.id]
            assert made.num_tokens == len(tokens)
            self.assert_holds(kept.pages, kept.slot, tokens)

    def assert_holds(self, pages: array[int], slot: int | None, tokens: list[int]) -> None:
        if not tokens:
            return
        (kv,), (latents,) = (self.cache.pools[x] for x in ("paged_attention", "latent_attention"))
        for pool in (kv["kv"][0], kv["kv"][1], latents["latents"]):
            found = pool[pages.tolist()].reshape(-1, pool.shape[-1])[: len(tokens), 0]
            assert found.tolist() == tokens
        (linear,) = self.cache.pools["gated_delta_rule"]
        assert linear["state"].view(-1)[slot] == sum(tokens)

    @invariant()
    def books_agree(self) -> None:
        cache = self.cache
        owned = {page for seq in self.live for page in cache._held[seq.id].pages}
        firm = owned | {page for made in self.kept for page in cache.snapshots._kept[made.id].pages}
        spare = {
            page for made in self.spare.kept for page in cache.snapshots._kept[made.id].pages
        } - firm
        assert cache.pages.num_spare == len(spare)
        assert cache.pages.num_free == NUM_PAGES - len(firm | spare)
        assert cache.slots.num_free == MAX_SEQS - len(self.live)
        assert cache.num_free_snapshots >= 0

    def teardown(self) -> None:
        for made in (*self.kept, *self.spare.kept):
            self.cache.release(made)
        self.cache.free(list(self.live))
        assert self.cache.pages.num_free == NUM_PAGES
        assert self.cache.pages.num_spare == 0
        assert self.cache.slots.num_free == MAX_SEQS
        assert self.cache.states.num_free == MAX_SEQS + MAX_CHECKPOINTS


TestSnapshotMachine = SnapshotMachine.TestCase
TestSnapshotMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_an_id_is_free_when_its_last_holder_gave_it_back():
    allocator = Allocator(4, unit="page", limit="pages")
    a, b = allocator.take(2)
    allocator.share([a])
    allocator.share([a, b], spare=True)
    assert (allocator.num_free, allocator.num_spare) == (2, 0)
    assert allocator.count_firm_once([a, b]) == 1
    allocator.give_back([a, b])
    assert (allocator.num_free, allocator.num_spare) == (2, 1)
    allocator.give_back([a])
    assert allocator.count_spare([a, b]) == 2
    allocator.share([b])
    assert allocator.num_spare == 1
    allocator.give_back([a, b], spare=True)
    assert (allocator.num_free, allocator.num_spare) == (3, 0)
    allocator.give_back([b])
    assert allocator.num_free == 4
