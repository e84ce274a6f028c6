"""Tiles of queries that share keys: the lists in the interpreter, and the kernel on a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tests.devices import needs_cuda
from tests.ops.block_attention.cases import CASES, Case, Inputs, make_inputs
from tests.ops.contract import assert_within_budget
from tests.ops.paged_attention import cases as pages
from tests.ops.triton_interpreter import needs_interpreter
from torch_hybrid.ops.block_attention import block_attention


@needs_interpreter
@pytest.mark.parametrize(
    ("name", "block_q", "num_shared"),
    [("qwen4_exp_extend", 10, 13), ("a_token_a_block", 3, 1), ("odd", 5, 0)],
)
def test_a_list_has_what_any_of_a_tile_sees(name: str, block_q: int, num_shared: int):
    from torch_hybrid.ops.block_attention._triton_shared import list_keys

    case = CASES[name]
    inputs = make_inputs(case, padding=(3, 1))
    size, page_size = case.block_size, inputs.kv.shape[2]
    token = torch.arange(len(inputs.blocks))
    is_done = ((token % 7 == 0) | (token // block_q == 1)).int()
    before = is_done.clone()
    slots, sees, num_keys = list_keys(inputs, is_done, block_q=block_q)

    expected = torch.zeros_like(num_keys)
    for seq, tile, tokens in tiles_of(inputs, block_q):
        seen = [keys_of(inputs, seq, token, size) for token in tokens]
        named = [{key // size for key in keys} for keys in seen]
        chosen = sum(int((inputs.blocks[token] >= 0).sum()) for token in tokens)
        blocks = sorted(set().union(*named))
        if all(before[token] for token in tokens) or 2 * len(blocks) > chosen:
            assert torch.equal(is_done[tokens], before[tokens])
            continue
        expected[tile] = max(1, size * len(blocks))
        assert is_done[tokens].all()
        table = inputs.page_table[seq]
        listed = [key for block in blocks for key in range(block * size, (block + 1) * size)]
        for place in range(-(-max(1, len(listed)) // 128) * 128):
            key = listed[place] if place < len(listed) else None
            bits = sum(1 << i for i, keys in enumerate(seen) if key in keys)
            assert sees[tile, place] == bits
            if bits:
                assert slots[tile, place] == table[key // page_size] * page_size + key % page_size
            if key is None:
                assert slots[tile, place] == -1
    assert torch.equal(num_keys, expected)
    assert (num_keys > 0).sum() == num_shared


def tiles_of(inputs: Inputs, block_q: int) -> list[tuple[int, int, list[int]]]:
    """Sequence, number and tokens of each tile that has some."""
    ends = inputs.cu_seqlens.tolist()
    return [
        (seq, begin // block_q + seq + i, list(range(first, min(first + block_q, end))))
        for seq, (begin, end) in enumerate(pairwise(ends))
        for i, first in enumerate(range(begin, end, block_q))
    ]


def keys_of(inputs: Inputs, seq: int, token: int, size: int) -> set[int]:
    """What a token sees, by position."""
    end, length = inputs.cu_seqlens[seq + 1], inputs.seq_lens[seq]
    position = int(length - end) + token
    chosen = [block for block in inputs.blocks[token].tolist() if block >= 0]
    tail = range((position + 1) // size * size, position + 1)
    return {block * size + place for block in chosen for place in range(size)} | set(tail)


# Of 83 tiles 57 share, and the queries of the others see all.
SHARING = Case(
    pages=pages.Case(
        num_q_heads=24,
        num_kv_heads=2,
        head_dim=64,
        lengths=((530, 531), (280, 700), (1, 40), (3, 90)),
    ),
    block_size=4,
    top_k=60,
)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_queries_that_share_keys_on_a_gpu(head_dim: int, dtype: torch.dtype):
    case = replace(SHARING, pages=replace(SHARING.pages, head_dim=head_dim))
    inputs = make_inputs(case, dtype=dtype, padding=(5, 1))
    options = {"block_size": case.block_size, "scale": head_dim**-0.5}
    exact, rounded, out = (
        block_attention(*[x if x is None else x.cuda() for x in given.args()], **options, impl=impl)
        for given, impl in (
            (inputs.exact(), "torch"),
            (inputs, "torch"),
            (inputs, "triton"),
        )
    )
    assert_within_budget(out, exact, rounded)
