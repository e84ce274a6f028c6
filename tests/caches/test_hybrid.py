"""Who owns what in the pools: nothing leaks, nothing is shared, errors change nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.errors import error_text
from torch_hybrid.batch import KEPT
from torch_hybrid.caches.allocator import Allocator
from torch_hybrid.caches.hybrid import HybridCache
from torch_hybrid.caches.sequence import Sequence
from torch_hybrid.errors import CapacityError
from torch_hybrid.specs import AttentionSpec, DeltaRuleSpec, LayerTable

FULL = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
LINEAR = DeltaRuleSpec(num_k_heads=1, num_v_heads=3, head_k_dim=8, head_v_dim=16, conv_width=4)
MAX_SEQS, NUM_PAGES, PAGE_SIZE = 4, 7, 4


def make_cache(device: str = "cpu", **options: int) -> HybridCache:
    sizes = {"max_seqs": MAX_SEQS, "kv_tokens": NUM_PAGES * PAGE_SIZE, "page_size": PAGE_SIZE}
    return HybridCache(
        LayerTable.from_specs([LINEAR, FULL, LINEAR]),
        **{**sizes, **options},
        dtype=torch.bfloat16,
        device=device,
    )


def page_row(cache: HybridCache, seq: Sequence) -> list[int]:
    """The pages of one sequence, as a step sees them."""
    batch = cache.make_batch([seq], [[]])
    return batch.page_table[0].tolist()


class CacheMachine(RuleBasedStateMachine):
    """Random calls against a model that counts tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.cache, self.other = make_cache(), make_cache()
        self.live: dict[Sequence, int] = {}  # sequence to the tokens it holds
        self.reserved: dict[Sequence, int] = {}  # and to the pages it owns
        self.dead: list[Sequence] = []

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // PAGE_SIZE)

    @rule(count=st.integers(0, MAX_SEQS + 1))
    def allocate(self, count: int) -> None:
        free = MAX_SEQS - len(self.live)
        if count > free:
            with pytest.raises(CapacityError, match=f"asked for {count} .*, {free} of 4 are free"):
                self.cache.allocate(count)
            return
        for seq in self.cache.allocate(count):
            assert seq not in self.live
            assert seq not in self.dead
            assert self.cache.length(seq) == 0
            self.live[seq] = self.reserved[seq] = 0

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        """Reserve for some sequences; then the step finishes, or is given up."""
        seqs = data.draw(st.lists(st.sampled_from(sorted(self.live, key=repr)), unique=True))
        counts = [data.draw(st.integers(1, 12)) for _ in seqs]
        needed = [
            max(0, self.pages_for(self.live[seq] + n) - self.reserved[seq])
            for seq, n in zip(seqs, counts, strict=True)
        ]
        if sum(needed) > self.cache.pages.num_free:
            with pytest.raises(CapacityError, match="raise kv_tokens"):
                self.cache.reserve(seqs, counts)
            return
        self.cache.reserve(seqs, counts)
        for seq, more in zip(seqs, needed, strict=True):
            self.reserved[seq] += more
        if data.draw(st.booleans()):
            self.cache.commit(seqs, counts)
            for seq, n in zip(seqs, counts, strict=True):
                self.live[seq] += n

    @precondition(lambda self: self.live)
    @rule(data=st.data(), breaks=st.booleans())
    def free(self, data: st.DataObject, breaks: bool) -> None:
        seqs = data.draw(st.lists(st.sampled_from(sorted(self.live, key=repr)), unique=True))
        if breaks:
            self.cache.mark_broken(seqs)
        self.cache.free(seqs)
        for seq in seqs:
            del self.live[seq], self.reserved[seq]
            self.dead.append(seq)

    @precondition(lambda self: self.dead)
    @rule(data=st.data())
    def free_again(self, data: st.DataObject) -> None:
        stale = data.draw(st.sampled_from(self.dead))
        with pytest.raises(ValueError, match="was freed"):
            self.cache.free([*self.live, stale])

    @precondition(lambda self: self.live)
    @rule()
    def free_twice_at_once(self) -> None:
        seqs = list(self.live)
        with pytest.raises(ValueError, match="given twice"):
            self.cache.free([*seqs, seqs[0]])

    @rule()
    def free_foreign(self) -> None:
        [foreign] = self.other.allocate(1)
        with pytest.raises(ValueError, match="belongs to another runner"):
            self.cache.free([*self.live, foreign])
        self.other.free([foreign])

    @invariant()
    def books_agree(self) -> None:
        assert self.cache.slots.num_free == MAX_SEQS - len(self.live)
        assert self.cache.pages.num_free == NUM_PAGES - sum(self.reserved.values())
        slots = set(map(self.cache.slot, self.live))
        assert len(slots) == len(self.live)
        assert all(0 < slot <= MAX_SEQS for slot in slots)
        owned = [page for seq in self.live for page in page_row(self.cache, seq)]
        assert len(set(owned)) == len(owned) == sum(self.reserved.values())
        assert all(0 < page <= NUM_PAGES for page in owned)
        for seq, num_tokens in self.live.items():
            assert self.cache.length(seq) == num_tokens

    def teardown(self) -> None:
        self.cache.free(list(self.live))
        assert self.cache.slots.num_free == MAX_SEQS
        assert self.cache.pages.num_free == NUM_PAGES


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_pools():
    cache = make_cache()
    [full] = cache.pools["paged_attention"]
    first, second = cache.pools["gated_delta_rule"]
    assert (list(full), list(first)) == (["kv"], ["conv", "state"])
    kv, conv, state = full["kv"], first["conv"], first["state"]
    assert kv.shape == (2, NUM_PAGES + 1, PAGE_SIZE, 2, 16)
    assert conv.shape == (MAX_SEQS + 1, 3, 64)
    assert state.shape == (MAX_SEQS + 1, 3, 16, 8)
    assert (kv.dtype, conv.dtype) == (torch.bfloat16, torch.bfloat16)
    assert state.dtype is second["state"].dtype is torch.float32


def test_one_storage_for_each_pool():
    pools = make_cache().pool_tensors()
    assert len(pools) == 5
    assert len({pool.untyped_storage().data_ptr() for pool in pools}) == len(pools)


def test_costs_are_those_of_the_pools():
    cache = make_cache()
    costs = cache.costs()
    per_token = sum(cost.per_token for cost in costs)
    per_sequence = sum(cost.per_sequence for cost in costs)
    assert [cost.per_token > 0 for cost in costs] == [False, True, False]
    expected = per_token * (NUM_PAGES + 1) * PAGE_SIZE + per_sequence * (MAX_SEQS + 1)
    assert sum(pool.nbytes for pool in cache.pool_tensors()) == expected


def test_kv_tokens_round_up_to_pages():
    assert make_cache(kv_tokens=9).num_pages == 3


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"max_seqs": 0}, "max_seqs must allow at least one sequence slot, got 0"),
        ({"kv_tokens": 0}, "kv_tokens must allow at least one KV page, got 0"),
        ({"page_size": 0}, "page_size must be at least 1, got 0"),
    ],
)
def test_sizes_too_small(option: dict[str, int], text: str):
    with pytest.raises(ValueError, match=f"^{text}$"):
        make_cache(**option)


def test_texts():
    cache = make_cache()
    seqs = cache.allocate(3)
    assert_expected_inline(
        error_text(CapacityError, cache.allocate, 2),
        """asked for 2 sequence slot(s), 1 of 4 are free: free sequences or raise max_seqs""",
    )
    assert_expected_inline(
        error_text(CapacityError, cache.reserve, seqs, [9, 9, 9]),
        """asked for 9 KV page(s), 7 of 7 are free: free sequences or raise kv_tokens""",
    )
    cache.free(seqs[:1])
    assert_expected_inline(error_text(ValueError, cache.free, seqs), """Sequence(id=1) was freed""")
    assert_expected_inline(
        error_text(ValueError, cache.free, make_cache().allocate(1)),
        """Sequence(id=1) belongs to another runner""",
    )
    assert_expected_inline(
        error_text(TypeError, cache.free, seqs[1]),
        """expected a list of sequences, got Sequence(id=2)""",
    )
    assert_expected_inline(
        error_text(TypeError, cache.allocate, 1, seqs[1]),
        """expected what Runner.snapshot returned, got Sequence(id=2)""",
    )
    cache.mark_broken(seqs[1:2])
    assert_expected_inline(
        error_text(ValueError, cache.check_usable, seqs[1:]),
        """Sequence(id=2) was in a step that did not finish: free it""",
    )


def test_lengths_grow_in_one_place():
    """A count may be of a tensor, which adds in place."""
    cache = HybridCache(LayerTable.from_specs([FULL]), max_seqs=3, kv_tokens=64, page_size=4)
    [seq] = cache.allocate(1)
    cache.reserve([seq], [9])
    cache.commit([seq], torch.tensor([5]))
    cache.commit_drafts([seq], [3])
    cache.accept([seq], torch.tensor([2]))
    kept = cache.snapshot(seq)
    fork, other = cache.allocate(2, kept, torch.tensor(8))
    cache.commit([seq, fork], [1, 2])
    assert [kept.num_tokens, *map(cache.length, [seq, fork, other])] == [8, 9, 10, 8]
    with pytest.raises(TypeError, match=r"num_new must be integers, got \[1.0\]"):
        cache.commit([seq], [1.0])


def test_a_slot_reused_is_another_sequence():
    cache = make_cache(max_seqs=1)
    [old] = cache.allocate(1)
    cache.reserve([old], [5])
    cache.commit([old], [5])
    slot = cache.slot(old)
    cache.free([old])
    [new] = cache.allocate(1)
    assert cache.slot(new) == slot
    assert cache.length(new) == 0
    for call in (
        cache.length,
        cache.slot,
        lambda seq: cache.pages_needed(seq, 1),
        lambda seq: cache.make_batch([seq], [[1]]),
    ):
        with pytest.raises(ValueError, match="was freed"):
            call(old)


def test_a_handle_outlives_its_cache_as_a_stranger():
    """Identity is an object that handles keep alive: an address could come again."""
    seq = make_cache().allocate(1)[0]
    for _ in range(20):
        cache = make_cache()
        cache.allocate(1)
        with pytest.raises(ValueError, match="another runner"):
            cache.check([seq])


def test_make_batch_checks_before_it_reserves():
    cache = make_cache()
    [seq] = cache.allocate(1)
    cache.mark_broken([seq])
    with pytest.raises(ValueError, match="did not finish"):
        cache.make_batch([seq], [[1, 2]])
    with pytest.raises(ValueError, match="given twice"):
        cache.make_batch([seq, seq], [[1], [2]])
    assert cache.pages.num_free == NUM_PAGES


def test_allocator_refuses_what_it_did_not_hand_out():
    allocator = Allocator(3, unit="page", limit="pages")
    a, b = allocator.take(2)
    for bad in (0, -1, 4, 3):
        with pytest.raises(ValueError, match=f"page {bad} is not in use"):
            allocator.give_back([a, bad])
        assert allocator.num_free == 1
    with pytest.raises(ValueError, match="given back twice in one call"):
        allocator.give_back([a, b, a])
    assert allocator.num_free == 1
    allocator.give_back([a, b])
    assert allocator.num_free == 3


def test_handles_are_values():
    seq = make_cache().allocate(1)[0]
    assert replace(seq) == seq
    assert len({seq, replace(seq)}) == 1


def test_what_a_head_reads_is_at_the_positions_after_an_image():
    """Tokens that it has not read, and those that it drafts, go on where an image left off."""
    cache = make_cache()
    seqs = cache.allocate(2)
    image = torch.tensor([[0, 1, 1, 1, 1, 2, 0, 1]] * 3)  # of four tokens at two positions
    image[1, 1:5], image[2, 1:5] = torch.tensor([[1, 1, 2, 2], [1, 2, 1, 2]])
    image[:, 5] = 3
    cache.make_batch(seqs, [[5] * 6, [5] * 2], positions=image, num_position_axes=3)
    cache.commit(seqs, [6, 2], are_read=True)
    cache.make_batch(seqs[:1], [[7]], num_position_axes=3)
    cache.commit(seqs[:1], [1])
    batch = cache.make_draft_batch(seqs, [[8], [9]], [3, 1], num_position_axes=3)
    assert batch.tokens.tolist() == [KEPT, 8, 9]
    assert batch.positions.tolist() == [[4, 5, 2]] * 3
    assert batch.seq_lens.tolist() == [8, 3]
    after = cache.places_after(seqs, [3, 1], 2)
    assert after["positions"] == [[6, 2], [7, 2]]
    assert after["seq_lens"] == [[9, 3], [10, 3]]
    own, other = (page_row(cache, seq) for seq in seqs)
    assert after["slots"] == [
        [own[2] * PAGE_SIZE, other[0] * PAGE_SIZE + 2],
        [own[2] * PAGE_SIZE + 1, other[0] * PAGE_SIZE + 2],
    ]


def test_buckets_pad_a_batch_and_refuse_it_before_pages_are_taken():
    cache = make_cache()
    seqs = cache.allocate(3)
    batch = cache.make_batch(seqs, [[1], [2], [3]], buckets=(2, 4))
    assert (batch.num_seqs, batch.num_tokens) == (4, 4)
    assert batch.cu_seqlens.tolist() == [0, 1, 2, 3, 3]
    assert batch.state_indices.tolist() == [*map(cache.slot, seqs), 0]
    free = cache.pages.num_free
    with pytest.raises(ValueError, match=r"^buckets must hold 7 tokens, got at most 4$"):
        cache.make_batch(seqs, [[1] * 5, [2], [3]], buckets=(2, 4))
    assert cache.pages.num_free == free
