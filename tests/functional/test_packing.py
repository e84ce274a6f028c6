"""Packings: tables whose sizes no length changes, from all that collators send."""

from __future__ import annotations

import io
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import torch_hybrid as th
from tests.functional.recurrence import offsets

LENGTHS = (3, 1, 4)
POSITIONS = [0, 1, 2, 0, 0, 1, 2, 3]
SEQUENCES = [0, 0, 0, 1, 2, 2, 2, 2]


def tables(packing: th.Packing) -> tuple[list[int], list[int], list[int]]:
    return (
        packing.cu_seqlens.tolist(), packing.positions.tolist(), packing.sequences.tolist()
    )  # fmt: skip


EXPECTED = [0, 3, 4, 8, 8, 8, 8, 8, 8], POSITIONS, SEQUENCES


def ways() -> dict[str, Callable[[], th.Packing]]:
    positions, numbers = torch.tensor(POSITIONS), torch.tensor(SEQUENCES, dtype=torch.int32)
    return {
        "cu_seqlens": lambda: th.Packing(offsets(LENGTHS)),
        "cu_seqlens, int32": lambda: th.Packing(offsets(LENGTHS).int(), num_tokens=8),
        "position_ids": lambda: th.Packing.from_position_ids(positions),
        "position_ids [1, T]": lambda: th.Packing.from_position_ids(positions[None]),
        "seq_idx": lambda: th.Packing.from_seq_idx(numbers[None]),
    }


@pytest.mark.parametrize("way", ways())
def test_from_what_collators_send(way: str) -> None:
    assert tables(ways()[way]()) == EXPECTED


@pytest.mark.parametrize("way", ["position_ids", "seq_idx"])
def test_from_what_collators_send_in_a_graph(way: str) -> None:
    given = torch.tensor(POSITIONS if way == "position_ids" else SEQUENCES)
    make = getattr(th.Packing, f"from_{way}")
    compiled = torch.compile(lambda x: tables_of(make(x)), fullgraph=True, backend="aot_eager")
    assert [x.tolist() for x in compiled(given)] == list(EXPECTED)


def test_cu_seqlens_in_a_graph() -> None:
    def plan(x):
        return tables_of(th.Packing(x, num_tokens=8))

    compiled = torch.compile(plan, fullgraph=True, backend="aot_eager")
    assert [x.tolist() for x in compiled(offsets(LENGTHS))] == list(EXPECTED)


def tables_of(packing: th.Packing) -> tuple[Tensor, Tensor, Tensor]:
    return packing.cu_seqlens, packing.positions, packing.sequences


def test_rows_of_a_batch_and_padding_at_either_side() -> None:
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [1, 0, 0, 0]])
    packing = th.Packing.from_attention_mask(mask, capacity=6)
    assert packing.cu_seqlens.tolist() == [0, 4, 6, 8, 9, 12, 12]
    assert packing.positions.tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 0, 0, 1, 2]
    assert tables(th.Packing.from_attention_mask(mask.bool(), capacity=6)) == tables(packing)
    ids = torch.arange(4).repeat(3, 1)
    assert th.Packing.from_position_ids(ids).cu_seqlens.tolist()[:5] == [0, 4, 8, 12, 12]


def test_empty_sequences_and_capacity() -> None:
    packing = th.Packing(torch.tensor([0, 0, 2, 2]), capacity=5)
    assert tables(packing) == ([0, 0, 2, 2, 2, 2], [0, 1], [1, 1])
    assert (packing.num_tokens, packing.capacity) == (2, 5)
    assert tables(th.Packing(torch.tensor([0]))) == ([0], [], [])


def test_no_tokens_begin_no_sequence() -> None:
    none = torch.zeros(2, 0, dtype=torch.int64)
    for way in ("position_ids", "seq_idx", "attention_mask", "starts"):
        assert tables(getattr(th.Packing, f"from_{way}")(none)) == ([0], [], [])


def test_each_row_begins_a_sequence() -> None:
    starts = torch.tensor([[0, 1, 0], [0, 0, 0]])
    assert th.Packing.from_starts(starts, 3).cu_seqlens.tolist() == [0, 1, 3, 6]
    assert tables(th.Packing.from_starts(starts[:, :0])) == ([0], [], [])


def test_a_pytree_of_tensors() -> None:
    packing = th.Packing(offsets(LENGTHS))
    leaves, structure = pytree.tree_flatten(packing)
    assert all(isinstance(leaf, Tensor) for leaf in leaves)
    assert tables(pytree.tree_unflatten(leaves, structure)) == EXPECTED
    assert tables(packing.to("cpu")) == EXPECTED
    other = pytree.tree_flatten(th.Packing(offsets((8,))))[0]
    assert [x.shape for x in other] == [x.shape for x in leaves]


def test_a_file_with_a_packing_is_read_as_data() -> None:
    """So are an exported program's example inputs."""
    file = io.BytesIO()
    torch.save(th.Packing(offsets(LENGTHS)), file)
    file.seek(0)
    assert tables(torch.load(file, weights_only=True)) == EXPECTED


BAD: dict[str, tuple[Callable[[], th.Packing], type[Exception], str]] = {
    "begins late": (
        lambda: th.Packing(torch.tensor([1, 8])),
        ValueError,
        "cu_seqlens must begin at 0, got 1",
    ),
    "ends early": (
        lambda: th.Packing(torch.tensor([0, 6]), num_tokens=8),
        ValueError,
        "cu_seqlens must end at 8 tokens, got 6",
    ),
    "falls": (
        lambda: th.Packing(torch.tensor([0, 5, 3, 8])),
        ValueError,
        "cu_seqlens must not fall, got 3 after 5 at 2",
    ),
    "too many": (
        lambda: th.Packing(torch.tensor([0, 1, 2, 3]), capacity=2),
        th.CapacityError,
        "a packing must have at most 2 sequences, got 3; `capacity` raises that",
    ),
    "too many positions": (
        lambda: th.Packing.from_position_ids(torch.tensor(POSITIONS), capacity=2),
        th.CapacityError,
        "a packing must have at most 2 sequences, got 3; `capacity` raises that",
    ),
    "dtype": (
        lambda: th.Packing(torch.tensor([0.0, 8.0])),
        ValueError,
        "cu_seqlens must have dtype torch.int32 or torch.int64, got torch.float32",
    ),
    "dimensions": (
        lambda: th.Packing(torch.zeros(2, 2, dtype=torch.int32)),
        ValueError,
        "cu_seqlens must have 1 dimensions, got shape [2, 2]",
    ),
    "no offsets": (
        lambda: th.Packing(torch.zeros(0, dtype=torch.int32)),
        ValueError,
        "cu_seqlens must have shape [N + 1], got [0]",
    ),
    "on another device": (
        lambda: th.Packing(torch.zeros(2, dtype=torch.int32, device="meta")),
        ValueError,
        "num_tokens must be given for offsets that are on a GPU or in a graph, got None",
    ),
    "holes": (
        lambda: th.Packing.from_attention_mask(torch.tensor([[1, 1, 1], [1, 0, 1]])),
        ValueError,
        "attention_mask must have one run of tokens in a row, got holes in rows [1]",
    ),
    "a mask of one row": (
        lambda: th.Packing.from_attention_mask(torch.ones(3, dtype=torch.bool)),
        ValueError,
        "attention_mask must have 2 dimensions, got shape [3]",
    ),
    "no mask": (
        lambda: th.Packing.from_attention_mask(None),
        ValueError,
        "attention_mask must be a tensor, got NoneType",
    ),
    "starts of floats": (
        lambda: th.Packing.from_starts(torch.ones(2)),
        ValueError,
        "starts must have dtype torch.int32 or torch.int64, got torch.float32",
    ),
    "a list of starts": (
        lambda: th.Packing.from_starts([True, False]),
        ValueError,
        "starts must be a tensor, got list",
    ),
    "a mask of floats": (
        lambda: th.Packing.from_attention_mask(torch.ones(1, 2)),
        ValueError,
        "attention_mask must have dtype torch.int32 or torch.int64, got torch.float32",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_packings_are_refused(what: str) -> None:
    make, error, text = BAD[what]
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        make()


def test_too_many_sequences_fail_in_a_graph_by_name() -> None:
    def offsets_of(position_ids: Tensor) -> Tensor:
        return th.Packing.from_position_ids(position_ids, capacity=2).cu_seqlens

    compiled = torch.compile(offsets_of, fullgraph=True, backend="aot_eager")
    assert compiled(torch.tensor([0, 1, 0, 1])).tolist() == [0, 2, 4]
    with pytest.raises(RuntimeError, match="at most 2 sequences, got more"):
        compiled(torch.tensor([0, 0, 0, 1]))
