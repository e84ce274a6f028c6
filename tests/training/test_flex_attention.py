"""Blocks that FlexAttention reads are those of a mask of all tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from tests.functional.recurrence import offsets
from torch_hybrid.ops.packed_attention.reference import masked_attention
from torch_hybrid.training.flex_attention import attend_in_blocks, blocks_of

LENGTHS = {
    "one": [300],
    "of all lengths": [1, 127, 128, 200, 5],
    "halves of blocks": [64] * 8,
    "one token each": [1] * 260,
    "empty ones": [0, 100, 0, 156, 128, 0, 0],
}


@pytest.mark.parametrize("window", [None, 1, 100, 129, 256])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_blocks_are_those_of_a_mask(lengths: list[int], window: int | None):
    cu_seqlens = offsets(lengths)
    num_tokens = sum(lengths)
    blocks = blocks_of(cu_seqlens, num_tokens, window)
    rule = blocks.mask_mod
    expected = create_block_mask(rule, None, None, num_tokens, num_tokens, "cpu", BLOCK_SIZE=128)
    assert torch.equal(blocks.to_dense(), expected.to_dense())
    if num_tokens % 128 == 0:  # theirs has no whole block in a last row that is not full
        assert torch.equal(blocks.full_kv_num_blocks, expected.full_kv_num_blocks)


def draw_picked(lengths: list[int], block_size: int, count: int) -> Tensor:
    """Pick blocks [T, count] at random among complete ones."""
    rows = []
    for length in lengths:
        for complete in ((position + 1) // block_size for position in range(length)):
            best = torch.randperm(complete)[:count].sort().values
            rows.append([*best.tolist(), *[-1] * count][:count])
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_picked_blocks_are_those_of_a_mask(lengths: list[int]):
    torch.manual_seed(0)
    num_tokens, picked = sum(lengths), draw_picked(lengths, 16, 2)
    q, k, v = (torch.randn(num_tokens, *each) for each in ((4, 48), (2, 48), (2, 32)))
    options = {"blocks": picked, "block_size": 16}
    expected = masked_attention(q, k, v, offsets(lengths), scale=0.2, **options)
    with torch.no_grad():
        out = attend_in_blocks(q, k, v, offsets(lengths), 0.2, None, picked, 16)
    torch.testing.assert_close(out, expected)
    blocks = blocks_of(offsets(lengths), num_tokens, None, picked, 16)
    shape = None, None, num_tokens, num_tokens, "cpu"
    needed = create_block_mask(blocks.mask_mod, *shape, BLOCK_SIZE=128).to_dense()
    assert (blocks.to_dense() >= needed).all()


def test_blocks_that_nobody_picks_are_not_read():
    """Of 1024 tokens that pick the first 16, and so see 16 more at most."""
    picked = torch.zeros(1024, 1, dtype=torch.int32)
    picked[:15] = -1
    blocks = blocks_of(offsets([1024]), 1024, None, picked, 16).to_dense()[0, 0]
    near = torch.eye(8, dtype=torch.bool) | torch.eye(8, dtype=torch.bool).roll(-1, 1).tril()
    near[:, 0] = True
    assert torch.equal(blocks.bool(), near)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_outputs_are_those_of_a_mask(lengths: list[int], window: int | None):
    torch.manual_seed(0)
    num_tokens = sum(lengths)
    q, k, v = (torch.randn(num_tokens, *each) for each in ((4, 48), (2, 48), (2, 32)))
    expected = masked_attention(q, k, v, offsets(lengths), scale=0.2, window=window)
    with torch.no_grad():
        out = attend_in_blocks(q, k, v, offsets(lengths), 0.2, window)
    torch.testing.assert_close(out, expected)
