"""Attention of 64 rows, heads of one token, to chosen blocks of latents on Hopper.

The kernel is that of ``latent_attention`` without rotation. Each of two groups of warps has half of
the output, the first also the logits and the softmax. Further warps look up blocks and pages, and
copy latents.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from torch_hybrid.ops.latent_attention._triton_hopper_groups import (
    attend_first,
    attend_second,
    rows_of_block,
)
from torch_hybrid.ops.triton.hopper import (
    COPIED,
    COPYING_THREADS,
    ROWS,
    new_barriers,
)


@gluon.jit
def _sequence_of_token(cu_seqlens: gl.tensor, num_seqs: gl.tensor, token: gl.tensor) -> gl.tensor:
    """Find a token's sequence; ``num_seqs`` for padding."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    before = gl.zeros([256], gl.int32, L)
    for base in range(0, num_seqs, 256):
        seq = base + gl.arange(0, 256, L)
        end = gl.load(cu_seqlens + seq + 1, mask=seq < num_seqs, other=2**31 - 1)
        before += (end <= token).to(gl.int32)
    return gl.sum(before, 0)


@gluon.jit
def _rows_of(
    number: gl.tensor,
    pool: gl.tensor,
    new: gl.tuple,
    names: gl.tuple,
    RANK: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
) -> gl.tensor:
    """Locate keys by number: first those of chosen blocks, then the unfinished block's up to the
    query's.

    Keys of this step may not be in pages yet: they come from ``k``.
    """
    chosen, table, in_blocks, tail, position = names
    is_chosen = number < in_blocks
    block = gl.load(chosen + number // BLOCK_SIZE, mask=is_chosen, other=0)
    key = gl.where(is_chosen, block * BLOCK_SIZE + number % BLOCK_SIZE, tail + number - in_blocks)
    key = gl.minimum(key, position)
    page = gl.load(table + key // PAGE_SIZE)
    row = pool + (page.to(gl.int64) * PAGE_SIZE + key % PAGE_SIZE) * RANK
    k, stride_k, ahead, num_held = new
    if k is not None:
        own = k + gl.maximum(key - ahead, 0).to(gl.int64) * stride_k
        row = gl.where(key < num_held, row, own)
    return row


@gluon.jit
def _copy_chosen(
    pool: gl.tensor,
    new: gl.tuple,
    names: gl.tuple,
    keys: gl.tuple,
    bars: gl.tuple,
    bufs: gl.tuple,
    RANK: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Copy all tiles of chosen latents, each half as soon as its pipeline stage is free.

    Rows past the last key repeat it; the softmax masks them.
    """
    begin, end, num_tiles = keys
    ready, free, _, _, _ = bars
    b_first, b_second, _, _, _ = bufs
    HALF: gl.constexpr = RANK // 2
    index_kv = gl.arange(0, BLOCK_KV, gl.SliceLayout(1, COPIED))
    index_half = gl.arange(0, HALF, gl.SliceLayout(0, COPIED))[None, :]
    last = gl.maximum(end - 1, 0)
    number = gl.minimum(begin + index_kv, last)
    rows = _rows_of(number, pool, new, names, RANK, BLOCK_SIZE, PAGE_SIZE)
    for tile in range(num_tiles):
        p_row = rows[:, None]
        # Looked up a tile ahead, for the copies to find it here.
        number = gl.minimum(begin + (tile + 1) * BLOCK_KV + index_kv, last)
        rows = _rows_of(number, pool, new, names, RANK, BLOCK_SIZE, PAGE_SIZE)
        stage = tile % STAGES
        before = ((tile // STAGES) & 1) ^ 1
        mbarrier.wait(free.index(2 * stage), before)
        async_copy.async_copy_global_to_shared(b_first.index(stage), p_row + index_half)
        async_copy.mbarrier_arrive(ready.index(2 * stage), increment_count=False)
        mbarrier.wait(free.index(2 * stage + 1), before)
        p_second = p_row + (HALF + index_half)
        async_copy.async_copy_global_to_shared(b_second.index(stage), p_second)
        async_copy.mbarrier_arrive(ready.index(2 * stage + 1), increment_count=False)


@gluon.jit(do_not_specialize=["num_tokens", "num_seqs", "stride_page_table"])
def hopper_gather_kernel(
    q: gl.tensor,
    pool: gl.tensor,
    k: gl.tensor,
    slot_mapping: gl.tensor,
    blocks: gl.tensor,
    cu_seqlens: gl.tensor,
    seq_lens: gl.tensor,
    page_table: gl.tensor,
    out: gl.tensor,
    lse: gl.tensor,
    scale_log2: gl.tensor,
    num_tokens: gl.tensor,
    num_seqs: gl.tensor,
    stride_q_token: gl.tensor,
    stride_q_head: gl.tensor,
    stride_k: gl.tensor,
    stride_page_table: gl.tensor,
    H: gl.constexpr,
    RANK: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    TOP_K: gl.constexpr,
    BLOCK_K: gl.constexpr,
    M: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    STAGES: gl.constexpr,
    NUM_SPLITS: gl.constexpr,
    REGISTERS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
    EARLY: gl.constexpr,
) -> None:
    """Attend M heads of one token to one split of its chosen blocks' latents, and store new
    latents.

    Grid: (tokens, heads / M, splits). Tile: M heads by BLOCK_KV latents. Pipeline: STAGES tiles in
    shared memory, in halves, which copying warps fill (``cp.async``) and WGMMA reads. Registers:
    half an output [M, RANK / 2] a computing group; REGISTERS and COPY_REGISTERS a thread of the
    others.

    With ``k``, the program of split 0 and the first heads also writes the token's latent to its
    page. EARLY: programs wait for the launch before (PDL). Padding tokens write nothing.
    """
    if EARLY:
        if k is not None:  # nothing is known of the launch before
            gdc_wait()
        gdc_launch_dependents()
    HALF: gl.constexpr = RANK // 2
    token = gl.program_id(0)
    split = gl.program_id(2)
    # On their way while the sequence is looked up.
    chosen = blocks + token.to(gl.int64) * TOP_K
    index_k = gl.arange(0, BLOCK_K, gl.BlockedLayout([1], [32], [4], [0]))
    b_chosen = gl.load(chosen + index_k, mask=index_k < TOP_K, other=-1)
    seq = _sequence_of_token(cu_seqlens, num_seqs, token)
    if seq < num_seqs:
        block = (token, token + 1, gl.program_id(1) * M, H)
        row = gl.arange(0, M, gl.SliceLayout(1, COPIED))
        _, head, mask = rows_of_block(block, M, row)
        p_q = (q + token.to(gl.int64) * stride_q_token + head * stride_q_head)[:, None]
        index_half = gl.arange(0, HALF, gl.SliceLayout(0, COPIED))[None, :]
        dtype: gl.constexpr = pool.dtype.element_ty
        b_q_first = gl.allocate_shared_memory(dtype, [M, HALF], ROWS)
        b_q_second = gl.allocate_shared_memory(dtype, [M, HALF], ROWS)
        is_row = mask[:, None]
        async_copy.async_copy_global_to_shared(b_q_first, p_q + index_half, mask=is_row)
        async_copy.async_copy_global_to_shared(b_q_second, p_q + (HALF + index_half), mask=is_row)
        q_ready = new_barriers(1, COPYING_THREADS).index(0)
        async_copy.mbarrier_arrive(q_ready, increment_count=False)

        ahead = gl.load(seq_lens + seq) - gl.load(cu_seqlens + seq + 1)
        position = ahead + token
        in_blocks = gl.sum((b_chosen >= 0).to(gl.int32), 0) * BLOCK_SIZE
        tail = (position + 1) // BLOCK_SIZE * BLOCK_SIZE
        num_keys = in_blocks + position + 1 - tail
        split_keys = gl.cdiv(gl.cdiv(num_keys, NUM_SPLITS), BLOCK_KV) * BLOCK_KV
        split_begin = split * split_keys
        split_end = gl.minimum(num_keys, split_begin + split_keys)
        num_tiles = gl.cdiv(gl.maximum(0, split_end - split_begin), BLOCK_KV)
        if NUM_SPLITS == 1:  # a query that sees nothing has its own row for a tile, hidden
            num_tiles = gl.maximum(1, num_tiles)
        keys = (split_begin, split_end, num_tiles)

        b_first = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_KV, HALF], ROWS)
        b_second = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_KV, HALF], ROWS)
        b_weights = gl.allocate_shared_memory(dtype, [M, BLOCK_KV], ROWS)
        L: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        b_factors = gl.allocate_shared_memory(gl.float32, [M], L)
        # In the place of rotated parts, of which there are none, the first halves again.
        bufs = (b_first, b_second, b_first, b_weights, b_factors)
        ready = new_barriers(2 * STAGES, COPYING_THREADS)
        weights_ready = new_barriers(1, 1).index(0)
        weights_free = new_barriers(1, 1).index(0)
        bars = (ready, new_barriers(2 * STAGES, 1), weights_ready, weights_free, q_ready)
        outputs = (out, lse, split.to(gl.int64) * num_tokens)
        queries = (b_q_first, b_q_second)
        table = page_table + seq.to(gl.int64) * stride_page_table
        names = (chosen, table, in_blocks, tail, position)
        new = (k, stride_k, ahead, ahead + gl.load(cu_seqlens + seq))
        if EARLY:
            gdc_wait()
        if k is not None:  # noqa: SIM102  (only the outer one is known to the compiler)
            if (split == 0) & (gl.program_id(1) == 0):
                index = gl.arange(0, RANK, gl.BlockedLayout([4], [32], [4], [0]))
                b_new = gl.load(k + token.to(gl.int64) * stride_k + index)
                slot = gl.load(slot_mapping + token).to(gl.int64)
                gl.store(pool + slot * RANK + index, b_new)
        gl.warp_specialize(
            [
                (attend_first, (outputs, queries, block, keys, None, scale_log2, bars, bufs,
                                M, M, HALF, BLOCK_KV, STAGES)),
                (attend_second, (outputs, block, keys, bars, bufs, M, M, HALF, STAGES)),
                (_copy_chosen, (pool, new, names, keys, bars, bufs, RANK, PAGE_SIZE, BLOCK_SIZE,
                                BLOCK_KV, STAGES)),
            ],
            [4, 4],
            [REGISTERS, COPY_REGISTERS],
        )  # fmt: skip
    elif EARLY:
        gdc_wait()
