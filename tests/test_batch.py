"""Packing, cutting and padding of a ragged batch."""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

import torch_hybrid.batch
from torch_hybrid.batch import AXES, Axis, Batch, bucket_of, chained, make_batch, pad_to, split

PAGE_SIZE = 4


@dataclass(frozen=True)
class Row:
    """One sequence as a person would write it down."""

    tokens: tuple[int, ...]
    prefix_len: int
    pages: tuple[int, ...]
    slot: int


@st.composite
def rows(draw: st.DrawFn, min_seqs: int = 0) -> list[Row]:
    made = []
    for _ in range(draw(st.integers(min_seqs, 5))):
        tokens = tuple(draw(st.lists(st.integers(0, 99), max_size=9)))
        prefix_len = draw(st.integers(0, 11))
        pages = tuple(draw(st.lists(st.integers(1, 40), min_size=5, max_size=5)))
        made.append(Row(tokens, prefix_len, pages, draw(st.integers(1, 9))))
    return made


def pack(
    rows: list[Row],
    num_position_axes: int = 1,
    positions: object = None,
    page_size: int = PAGE_SIZE,
    pages: object = None,
) -> Batch:
    packed = [token for row in rows for token in row.tokens]
    return make_batch(
        [row.tokens for row in rows],
        prefix_lens=[row.prefix_len for row in rows],
        page_table=torch.tensor([row.pages for row in rows], dtype=torch.int32).view(-1, 5),
        state_indices=[row.slot for row in rows],
        page_size=page_size,
        positions=positions,
        num_position_axes=num_position_axes,
        accepted=[row.slot % 4 for row in rows],
        num_drafts=[row.slot % 3 for row in rows],
        embed_places=[place for place, token in enumerate(packed) if token % 2],
        adapters=[row.slot % 5 for row in rows],
        pages=pages,
    )


def unpack(batch: Batch, num_tokens: int | None = None) -> list[dict[str, object]]:
    """Each sequence of a batch with the tokens, positions and cache rows that are its own."""
    starts = batch.cu_seqlens.tolist()
    assert starts[0] == 0
    assert starts == sorted(starts)
    assert starts[-1] <= batch.num_tokens
    assert len(starts) == batch.num_seqs + 1
    return [
        {
            "tokens": batch.tokens[start:end].tolist(),
            "positions": batch.positions[..., start:end].tolist(),
            "slot_mapping": batch.slot_mapping[start:end].tolist(),
            "seq_len": int(batch.seq_lens[n]),
            "pages": batch.page_table[n].tolist(),
            "slot": int(batch.state_indices[n]),
            "accepted": int(batch.accepted[n]),
            "num_drafts": int(batch.num_drafts[n]),
            "embed_rows": batch.embed_rows[start:end].tolist(),
            "adapter_slots": batch.adapter_slots[start:end].tolist(),
        }
        for n, (start, end) in enumerate(pairwise(starts))
    ]


@given(rows(), st.sampled_from([PAGE_SIZE, 5]))
def test_make_batch_equals_a_token_loop(rows: list[Row], size: int):
    expected = []
    numbers = count(1)
    for row in rows:
        positions = [row.prefix_len + i for i in range(len(row.tokens))]
        slots = [row.pages[p // size] * size + p % size for p in positions]
        expected.append(
            {
                "tokens": list(row.tokens),
                "positions": positions,
                "slot_mapping": slots,
                "seq_len": row.prefix_len + len(row.tokens),
                "pages": list(row.pages),
                "slot": row.slot,
                "accepted": row.slot % 4,
                "num_drafts": row.slot % 3,
                "embed_rows": [next(numbers) if token % 2 else 0 for token in row.tokens],
                "adapter_slots": [row.slot % 5] * len(row.tokens),
            }
        )
    batch = pack(rows, page_size=size)
    assert unpack(batch) == expected
    assert batch.num_tokens == batch.cu_seqlens[-1] == sum(len(row.tokens) for row in rows)
    assert batch.num_seqs == len(rows)


@given(rows(), st.sampled_from([PAGE_SIZE, 5]))
def test_few_tokens_are_placed_as_many_are(rows: list[Row], size: int):
    by_tensors = pack(rows, page_size=size)
    placed = pack(rows, page_size=size, pages=[row.pages for row in rows])
    for name in AXES:
        expected, found = getattr(by_tensors, name), getattr(placed, name)
        assert (found.dtype, found.tolist()) == (expected.dtype, expected.tolist())


def test_dtypes():
    batch = pack([Row((1, 2, 3), 4, (1, 2, 3, 4, 5), 1)])
    int64 = {name for name in AXES if getattr(batch, name).dtype is torch.int64}
    int32 = {name for name in AXES if getattr(batch, name).dtype is torch.int32}
    assert int64 == {"tokens", "positions"}
    assert int32 == set(AXES) - int64


@given(rows(min_seqs=1))
def test_default_positions_are_alike_on_every_axis(rows: list[Row]):
    one, three = pack(rows).positions, pack(rows, num_position_axes=3).positions
    assert torch.equal(three, one.expand(3, -1))


@given(rows(min_seqs=1), st.booleans(), st.data())
def test_split_cuts_at_any_token(rows: list[Row], mrope: bool, data: st.DataObject):
    num_tokens = sum(len(row.tokens) for row in rows)
    positions = torch.arange(3 * num_tokens).view(3, -1) if mrope else None
    batch = pack(rows, 3 if mrope else 1, positions)
    cut = data.draw(st.integers(0, num_tokens))
    first, second = split(batch, cut)

    expected_first, expected_second, start = [], [], 0
    for row in unpack(batch):
        end = start + len(row["tokens"])
        left = max(0, min(cut, end) - start)  # tokens before the cut
        if start < cut:
            expected_first.append(take(row, slice(None, left), end - start - left))
        if end > cut or start >= cut:
            expected_second.append(take(row, slice(left, None), 0))
        start = end
    assert unpack(first) == expected_first
    assert unpack(second) == expected_second
    assert (first.num_tokens, second.num_tokens) == (cut, num_tokens - cut)


def take(row: dict[str, object], span: slice, num_later: int) -> dict[str, object]:
    """A piece of a sequence, after which ``num_later`` of its new tokens are still to come."""
    positions = row["positions"]
    nested = positions and isinstance(positions[0], list)
    return row | {
        "tokens": row["tokens"][span],
        "positions": [axis[span] for axis in positions] if nested else positions[span],
        "slot_mapping": row["slot_mapping"][span],
        "embed_rows": row["embed_rows"][span],
        "adapter_slots": row["adapter_slots"][span],
        "seq_len": row["seq_len"] - num_later,
    }


def test_split_inside_a_sequence():
    batch = pack([Row((1, 2, 3, 4), 5, (1, 2, 3, 4, 5), 1), Row((5, 6), 0, (6, 7, 8, 9, 10), 2)])
    first, second = split(batch, 3)
    assert first.cu_seqlens.tolist() == [0, 3]
    assert second.cu_seqlens.tolist() == [0, 1, 3]
    assert first.seq_lens.tolist() == [8]
    assert second.seq_lens.tolist() == [9, 2]
    assert second.state_indices.tolist() == [1, 2]


def test_halves_share_no_tokens_or_offsets():
    batch = pack([Row((1, 2, 3, 4), 5, (1, 2, 3, 4, 5), 1), Row((5, 6), 0, (6, 7, 8, 9, 10), 2)])
    first, second = split(batch, 3)
    for name, (axis, _) in AXES.items():
        if axis is not Axis.SEQUENCE:  # a cut sequence's row is in both halves
            ours = bytes_of(getattr(first, name))
            assert not ours & bytes_of(getattr(second, name)), f"{name} aliases"


def bytes_of(tensor: torch.Tensor) -> set[int]:
    start = tensor.data_ptr()
    return set(range(start, start + tensor.nbytes))


@given(rows(min_seqs=1))
def test_split_of_a_padded_batch_keeps_padding_in_its_half(rows: list[Row]):
    batch = pad_to(pack(rows), num_seqs=8, num_tokens=64)
    first, second = split(batch, 32)
    assert (first.num_tokens, second.num_tokens) == (32, 32)
    tokens = [new for half in (first, second) for row in unpack(half) for new in row["tokens"]]
    assert tokens == [token for row in rows for token in row.tokens]


def test_empty_half():
    batch = pack([Row((1, 2), 0, (1, 2, 3, 4, 5), 1)])
    for cut, empty in ((0, 0), (2, 1)):
        half = split(batch, cut)[empty]
        assert (half.num_seqs, half.num_tokens) == (0, 0)
        assert half.cu_seqlens.tolist() == [0]
        assert half.page_table.shape == (0, 5)


@pytest.mark.parametrize("cut", [-1, 3])
def test_cut_out_of_range(cut: int):
    batch = pack([Row((1, 2), 0, (1, 2, 3, 4, 5), 1)])
    with pytest.raises(ValueError, match=f"^the cut must be within 0 and 2, got {cut}$"):
        split(batch, cut)


@given(rows(), st.integers(0, 3), st.integers(0, 9), st.sampled_from([1, 3]))
def test_padding_is_null(rows: list[Row], more_seqs: int, more_tokens: int, axes: int):
    batch = pack(rows, axes)
    num_seqs, num_tokens = batch.num_seqs + more_seqs, batch.num_tokens + more_tokens
    padded = pad_to(batch, num_seqs=num_seqs, num_tokens=num_tokens)
    assert (padded.num_seqs, padded.num_tokens) == (num_seqs, num_tokens)
    ours = unpack(padded)
    assert ours[: len(rows)] == unpack(batch)
    for row in ours[len(rows) :]:
        assert (row["tokens"], row["seq_len"], row["slot"]) == ([], 0, 0)
        assert row["pages"] == [0] * 5
    for name in ("tokens", "positions", "slot_mapping"):
        assert not getattr(padded, name)[..., batch.num_tokens :].any(), name


@pytest.mark.parametrize("axes", [1, 3])
@pytest.mark.parametrize("size", [PAGE_SIZE, 5])
def test_steps_that_follow_a_batch(size: int, axes: int):
    """Each is what one token more of each sequence makes, as far as the sequence goes on."""
    tables = torch.tensor([[3, 7, 2, 9], [5, 1, 8, 0], [4, 6, 0, 0]]).int()

    def batch_of(lengths: list[int], new: list[int]) -> Batch:
        return make_batch(
            [[0] * n for n in new],
            prefix_lens=lengths,
            page_table=tables,
            initial_indices=[2, 1, 3],
            state_indices=[0, 0, 0],
            page_size=size,
            num_position_axes=axes,
        )

    first = pad_to(batch_of([0, 7, 3], [9, 1, 4]), num_seqs=5, num_tokens=20)
    numbers = [[9, 8, 7], [10, 8, 7], [11, 8, 7]]
    slots = [
        [int(table[n // size]) * size + n % size for table, n in zip(tables, row, strict=True)]
        for row in numbers
    ]
    lengths = [[n + 1 for n in row] for row in numbers]
    steps = chained(first, positions=numbers, slots=slots, seq_lens=lengths)
    assert len(steps) == 3
    for held, step in zip(numbers, steps, strict=True):
        expected = pad_to(batch_of(held, [1, 1, 1]), num_seqs=5, num_tokens=5)
        for name in AXES:
            ours, theirs = getattr(step, name), getattr(expected, name)
            assert (ours is theirs is None) or ours.equal(theirs), name
            assert ours is None or ours.dtype is theirs.dtype
    assert all(len({id(getattr(step, name)) for step in steps}) == 1 for name in SHARED)
    none: list[list[int]] = [[], []]
    nobody = chained(first, positions=none, slots=none, seq_lens=none)
    assert [step.cu_seqlens.tolist() for step in nobody] == [[0] * 6] * 2


SHARED = ("tokens", "cu_seqlens", "page_table", "initial_indices", "state_indices")


def test_bucket_too_small():
    batch = pack([Row((1, 2), 0, (1, 2, 3, 4, 5), 1)])
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        pad_to(batch, num_seqs=1, num_tokens=1)
    assert_expected_inline(
        str(caught.value),
        """a batch of 1 sequences and 2 tokens does not fit a bucket of 1 sequences and 1 tokens""",
    )


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"prefix_lens": [0]}, "prefix_lens must have one entry for each of 2, got [0]"),
        ({"accepted": [1]}, "accepted must have one entry for each of 2, got [1]"),
        ({"prefix_lens": [7, 0]}, "page_table must have 3 pages in a row for the longest"),
        ({"prefix_lens": [-1, 0]}, "prefix_lens must be at least 0, got [-1, 0]"),
        ({"page_table": torch.ones(2, 2)}, "page_table must be int32 of shape [2, max_pages], got"),
        ({"page_size": 0}, "page_size must be at least 1, got 0"),
        ({"embed_places": [3]}, "embed_places must be within 0 and 2, got [3]"),
        ({"positions": torch.zeros(2)}, "positions must be int64 of shape [3], got torch.float32"),
    ],
)
def test_what_is_of_no_batch_is_refused(changed: dict[str, Any], told: str):
    """Positions past a row of the page table would be written to pages of the next sequence."""
    given = {"prefix_lens": [0, 0], "state_indices": [1, 2], "page_size": 4}
    given["page_table"] = torch.ones(2, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=re.escape(told)):
        make_batch([[1, 2], [3]], **(given | changed))


def test_every_field_is_declared_and_a_leaf():
    batch = pack([Row((1, 2), 0, (1, 2, 3, 4, 5), 1)])
    leaves, structure = pytree.tree_flatten(batch)
    assert len(leaves) == len(AXES)
    assert pytree.tree_unflatten(leaves, structure) == batch


def test_undeclared_field_fails_at_import(monkeypatch: pytest.MonkeyPatch):
    """A copy of the module with one more field, which declares nothing."""
    source = importlib.util.find_spec("torch_hybrid.batch").loader.get_source("torch_hybrid.batch")
    edited = source.replace("    @property\n", "    extra: Tensor\n\n    @property\n", 1)
    assert edited != source
    module = type(sys)("torch_hybrid_batch_copy")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(TypeError, match=r"fields of Batch without a declared axis: \['extra'\]"):
        exec(compile(edited, torch_hybrid.batch.__file__, "exec"), module.__dict__)


@pytest.mark.parametrize(
    ("query_lens", "expected"),
    [
        ([1], (2, 2)),
        ([1, 1, 1], (4, 4)),
        ([0, 1, 1], (4, 4)),
        ([], (2, 2)),
        ([2], (2, 2)),
        ([9], (2, 16)),
        ([5, 1, 1], (4, 16)),
        ([16] * 4, (4, 64)),
    ],
)
def test_the_bucket_of_a_batch(query_lens: list[int], expected: tuple[int, int]):
    assert bucket_of(query_lens, (2, 4, 16, 64)) == expected


@pytest.mark.parametrize(
    ("query_lens", "buckets", "message"),
    [
        ([1] * 5, (2, 4), r"^buckets must hold 5 sequences, got at most 4$"),
        ([5], (2, 4), r"^buckets must hold 5 tokens, got at most 4$"),
        ([1], (1, 2), r"^buckets must be ascending sizes from 2 on, got \[1, 2\]$"),
        ([1], (4, 2), r"^buckets must be ascending sizes from 2 on, got \[4, 2\]$"),
        ([1], (), r"^buckets must be ascending sizes from 2 on, got \[\]$"),
    ],
)
def test_buckets_that_do_not_serve(query_lens: list[int], buckets: tuple[int, ...], message: str):
    with pytest.raises(ValueError, match=message):
        bucket_of(query_lens, buckets)
