"""Implementation "triton": write the new rows, then attend, some programs for each query."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from torch_hybrid.ops.block_attention._triton_hopper import attend_on_hopper, serves
from torch_hybrid.ops.block_attention._triton_shared import attend_shared
from torch_hybrid.ops.block_attention._triton_tiles import Tiles
from torch_hybrid.ops.block_attention._triton_whole import attend_whole, rows_of_tile
from torch_hybrid.ops.block_attention.op import BlockAttention
from torch_hybrid.ops.triton.devices import launches_early, multiplies_float32, rows_are_aligned
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.ragged import sequence_of_token
from torch_hybrid.ops.triton.softmax import advance, finish, log2_scale, merge_splits


def block_attention(x: BlockAttention, *, is_invariant: bool = False) -> Tensor:
    """Launch ``torch_hybrid::block_attention``.

    ``is_invariant``: a token has the bits that it has in any call.
    """
    q, v = x.q, x.v
    num_tokens, _, head_dim = q.shape
    (k, *_), kv = x.by_head()
    num_kv_heads = kv.shape[3]
    num_seqs, top_k = x.page_table.shape[0], x.blocks.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_tokens == 0 or num_seqs == 0:
        return out.zero_()
    tiles = Tiles.of(
        q,
        num_kv_heads=num_kv_heads,
        most_keys=(top_k + 1) * x.block_size,
        has_values=v is not None,
        is_invariant=is_invariant,
    )
    # Several new tokens of a sequence that see all before them share keys, if they share tiles.
    rows = rows_of_tile(q, num_kv_heads=num_kv_heads)
    is_whole = None
    shares = num_tokens > num_seqs and tiles.num_splits == 1 and not is_invariant
    if shares and rows is not None:
        is_whole = q.new_empty(num_tokens, dtype=torch.int32)
    early, latents = launches_early(q.device), kv[0, :, :, 0]
    on_hopper = v is None and serves(q, latents)
    # Programs that gather take new rows from where they are, and write them beside.
    writes = is_whole is None and (rows_are_aligned(k) or not on_hopper)
    if not writes:
        bind(_write_kernel, x)[(num_tokens,)](
            k=k,
            kv=kv,
            is_whole=is_whole,
            HKV=num_kv_heads,
            TOP_K=top_k,
            BLOCK=min(1024, triton.next_power_of_2(num_kv_heads * head_dim)),
            EARLY=early,
            num_warps=4,
        )
    new = k if writes else None
    if is_whole is not None:
        assert rows is not None
        attend_whole(x, k, kv, is_whole, out, block_m=rows)
        if v is not None:
            attend_shared(x, is_whole, out)
    to, lse = out, q.new_empty((tiles.num_splits, *q.shape[:2]), dtype=torch.float32)
    if tiles.num_splits > 1:
        to = q.new_empty((tiles.num_splits, *out.shape), dtype=torch.float32)
    if on_hopper:
        attend_on_hopper(x, latents, new, to, lse, num_splits=tiles.num_splits)
    else:
        _attend(x, kv, new, is_whole, to, lse, tiles)
    if tiles.num_splits > 1:
        merge_splits(to, lse, x.cu_seqlens, out, torch.empty_like(lse[0]))
    return out


def _attend(
    x: BlockAttention,
    kv: Tensor,
    k: Tensor | None,
    is_whole: Tensor | None,
    out: Tensor,
    lse: Tensor,
    tiles: Tiles,
) -> None:
    """Attend within each split of the keys; ``out`` and ``lse`` hold the splits in a row.

    With ``k``, no launch has written the new rows.
    """
    q = x.q
    num_tokens, num_q_heads, _ = q.shape
    v, slot_mapping = (None, None) if k is None else (x.v, x.slot_mapping)
    _, _, page_size, num_kv_heads, _ = kv.shape
    group, top_k = num_q_heads // num_kv_heads, x.blocks.shape[1]
    row_tiles = triton.cdiv(group, tiles.block_m)
    bind(_attend_kernel, x, tiles)[(num_tokens, num_kv_heads * row_tiles, tiles.num_splits)](
        kv=kv,
        k=k,
        v=v,
        slot_mapping=slot_mapping,
        is_whole=is_whole,
        out=out,
        lse=lse,
        scale_log2=log2_scale(x.scale),
        GROUP=group,
        HKV=num_kv_heads,
        PAGE_SIZE=page_size,
        TOP_K=top_k,
        BLOCK_K=triton.next_power_of_2(top_k),
        FLOAT32_PRODUCTS=multiplies_float32(q),
        HAS_VALUES=x.v is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize=["num_seqs"])
def _write_kernel(
    k: tl.tensor,
    v: tl.tensor | None,
    kv: tl.tensor,
    blocks: tl.tensor,
    cu_seqlens: tl.tensor,
    seq_lens: tl.tensor,
    slot_mapping: tl.tensor,
    is_whole: tl.tensor | None,
    num_seqs: tl.tensor,
    stride_k_token: tl.tensor,
    stride_k_head: tl.tensor,
    stride_v_token: tl.tensor,
    stride_v_head: tl.tensor,
    stride_kv: tl.tensor,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Write the key and value of one token.

    Write too whether its query sees all before it and has others of its sequence beside it.
    """
    if EARLY:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    if is_whole is not None:
        seq = sequence_of_token(cu_seqlens, num_seqs, token)
        whole = tl.cast(0, tl.int32)
        if seq < num_seqs:
            end = tl.load(cu_seqlens + seq + 1)
            complete = (tl.load(seq_lens + seq) - end + token + 1) // BLOCK_SIZE
            # Names come first: a query sees all blocks if it names so many.
            may_name = (complete > 0) & (complete <= TOP_K)
            name = tl.load(blocks + token * TOP_K + complete - 1, mask=may_name, other=0)
            is_one_of_many = end - tl.load(cu_seqlens + seq) > 1
            whole = ((complete <= TOP_K) & (name >= 0) & is_one_of_many).to(tl.int32)
        tl.store(is_whole + token, whole)
    if token >= tl.load(cu_seqlens + num_seqs):
        return
    keys = kv + tl.load(slot_mapping + token).to(tl.int64) * HKV * D
    for base in range(0, HKV * D, BLOCK):
        index = base + tl.arange(0, BLOCK)
        mask = index < HKV * D
        head = index // D
        p_k = k + token * stride_k_token + head * stride_k_head + index % D
        tl.store(keys + index, tl.load(p_k, mask=mask), mask=mask)
        if v is not None:
            p_v = v + token * stride_v_token + head * stride_v_head + index % D
            tl.store(keys + stride_kv + index, tl.load(p_v, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def _attend_kernel(
    q: tl.tensor,
    kv: tl.tensor,
    k: tl.tensor | None,
    v: tl.tensor | None,
    slot_mapping: tl.tensor | None,
    blocks: tl.tensor,
    cu_seqlens: tl.tensor,
    seq_lens: tl.tensor,
    page_table: tl.tensor,
    is_whole: tl.tensor | None,
    out: tl.tensor,
    lse: tl.tensor,
    scale_log2: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    stride_q_token: tl.tensor,
    stride_q_head: tl.tensor,
    stride_kv: tl.tensor,
    stride_k_token: tl.tensor,
    stride_k_head: tl.tensor,
    stride_v_token: tl.tensor,
    stride_v_head: tl.tensor,
    stride_page_table: tl.tensor,
    GROUP: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_PART: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    FLOAT32_PRODUCTS: tl.constexpr,
    HAS_VALUES: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Attend in a program for query heads of one key head of one token, to a split of its keys.

    Its keys are numbered: those of its blocks in their order, then those of none. Every program
    waits for the rows that are written, also one without a token: what comes after this launch then
    comes after that one too. Without such a launch, one program of a token and key head writes its
    rows. Then all take those of new tokens from k and v, once the launch before has ended.
    """
    if EARLY:
        if k is not None:  # nothing is known of the launch before
            gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0)
    if is_whole is not None:
        if EARLY:
            gdc_wait()
        if tl.load(is_whole + token) > 0:  # done, by ``attend_whole`` or ``attend_shared``
            return
    TILES: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    PARTS: tl.constexpr = BLOCK_D // BLOCK_PART
    kv_head = tl.program_id(1) // TILES
    row_tile = tl.program_id(1) % TILES
    split = tl.program_id(2)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = (row < GROUP)[:, None]
    index_part = tl.arange(0, BLOCK_PART)[None, :]
    head = kv_head * GROUP + row
    own = (split.to(tl.int64) * num_tokens + token) * HKV * GROUP + head
    p_out = out + own[:, None] * D

    # On their way while the sequence is looked up.
    chosen = blocks + token.to(tl.int64) * TOP_K
    index_k = tl.arange(0, BLOCK_K)
    b_chosen = tl.load(chosen + index_k, mask=index_k < TOP_K, other=-1)
    seq = sequence_of_token(cu_seqlens, num_seqs, token)
    if seq >= num_seqs:
        if EARLY:
            gdc_wait()
        if NUM_SPLITS == 1:  # the merge of several knows what padding is
            zeros = tl.zeros([BLOCK_M, BLOCK_PART], out.dtype.element_ty)
            for part in tl.static_range(PARTS):
                index = part * BLOCK_PART + index_part
                tl.store(p_out + index, zeros, mask=is_row & (index < D))
        return
    ahead = tl.load(seq_lens + seq) - tl.load(cu_seqlens + seq + 1)  # of a number, to its position
    position = ahead + token
    in_blocks = tl.sum((b_chosen >= 0).to(tl.int32), 0) * BLOCK_SIZE
    tail = (position + 1) // BLOCK_SIZE * BLOCK_SIZE
    num_keys = in_blocks + position + 1 - tail
    per_split = tl.cdiv(tl.cdiv(num_keys, NUM_SPLITS), BLOCK_KV) * BLOCK_KV
    first = split * per_split
    last = tl.minimum(first + per_split, num_keys)
    if EARLY:
        gdc_wait()

    if k is not None:
        new_k = k + kv_head * stride_k_head
        num_held = ahead + tl.load(cu_seqlens + seq)
        if HAS_VALUES:
            new_v = v + kv_head * stride_v_head
        if (split == 0) & (row_tile == 0):
            index_d = tl.arange(0, BLOCK_D)
            own_row = kv + (tl.load(slot_mapping + token).to(tl.int64) * HKV + kv_head) * D
            b_new = tl.load(new_k + token.to(tl.int64) * stride_k_token + index_d, index_d < D)
            tl.store(own_row + index_d, b_new, mask=index_d < D)
            if HAS_VALUES:
                b_new = tl.load(new_v + token.to(tl.int64) * stride_v_token + index_d, index_d < D)
                tl.store(own_row + stride_kv + index_d, b_new, mask=index_d < D)

    p_q = (q + token.to(tl.int64) * stride_q_token + head * stride_q_head)[:, None]
    b_q, b_o = (), ()
    for part in tl.static_range(PARTS):
        index = part * BLOCK_PART + index_part
        b_q_part = tl.load(p_q + index, mask=is_row & (index < D), other=0.0)
        if FLOAT32_PRODUCTS:
            b_q_part = b_q_part.to(tl.float32)
        b_q = b_q + (b_q_part,)  # type: ignore[assignment]  # noqa: RUF005  (Triton has no unpacking)
        b_o = b_o + (tl.zeros([BLOCK_M, BLOCK_PART], dtype=tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    peak = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    keys = kv + kv_head * D
    table = page_table + seq * stride_page_table
    index_kv = tl.arange(0, BLOCK_KV)
    # Past the last key, that one again, which is hidden: no row needs a mask.
    held = tl.minimum(first + index_kv, last - 1)
    key = _key_of(held, chosen, in_blocks, position, BLOCK_SIZE)
    page = tl.load(table + key // PAGE_SIZE)
    # Tiles are counted from 0: with another lower bound the compiler loses sight of the alignment
    # of what is loaded, and loads element by element.
    for tile in range(tl.cdiv(last - first, BLOCK_KV)):
        number = first + tile * BLOCK_KV + index_kv
        slot = page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE
        p_k = keys + slot * (HKV * D)
        p_v = p_k + stride_kv
        if k is not None:
            own_token = tl.maximum(key - ahead, 0).to(tl.int64)
            if HAS_VALUES:
                p_v = tl.where(key < num_held, p_v, new_v + own_token * stride_v_token)
            p_k = tl.where(key < num_held, p_k, new_k + own_token * stride_k_token)
        products = tl.zeros([BLOCK_M, BLOCK_KV], dtype=tl.float32)
        b_v = ()
        for part in tl.static_range(PARTS):
            index = part * BLOCK_PART + index_part
            mask = (index < D) | (D == BLOCK_D)
            b_k_part = tl.load(p_k[:, None] + index, mask=mask, other=0.0)
            b_v_part = b_k_part
            if HAS_VALUES:
                b_v_part = tl.load(p_v[:, None] + index, mask=mask, other=0.0)
            if FLOAT32_PRODUCTS:
                b_k_part = b_k_part.to(tl.float32)
                b_v_part = b_v_part.to(tl.float32)
            products = tl.dot(b_q[part], tl.trans(b_k_part), products, input_precision="ieee")
            b_v = b_v + (b_v_part,)  # type: ignore[assignment]  # noqa: RUF005
        # Looked up a tile ahead, for the loads to find it here.
        key = _key_of(
            tl.minimum(number + BLOCK_KV, last - 1), chosen, in_blocks, position, BLOCK_SIZE
        )
        page = tl.load(table + key // PAGE_SIZE)
        products = tl.where((number < last)[None, :], products, -float("inf"))
        b_p, rescale, peak, total = advance(products, scale_log2, peak, total)
        b_sum = ()
        for part in tl.static_range(PARTS):
            b_o_part = b_o[part] * rescale[:, None]
            b_o_part = tl.dot(b_p.to(b_v[part].dtype), b_v[part], b_o_part, input_precision="ieee")
            b_sum = b_sum + (b_o_part,)  # type: ignore[assignment]  # noqa: RUF005
        b_o = b_sum

    total, b_lse = finish(peak, total)
    for part in tl.static_range(PARTS):
        index = part * BLOCK_PART + index_part
        b_part = (b_o[part] / total[:, None]).to(out.dtype.element_ty)
        tl.store(p_out + index, b_part, mask=is_row & (index < D))
    if NUM_SPLITS > 1:
        tl.store(lse + own, b_lse, mask=row < GROUP)


@triton.jit
def _key_of(
    number: tl.tensor,
    chosen: tl.tensor,
    in_blocks: tl.tensor,
    position: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
) -> tl.tensor:
    """Find where keys of the query at ``position`` are in its sequence, by number.

    A number of none gets the query's own place.
    """
    number = tl.maximum(number, 0)
    is_chosen = number < in_blocks
    block = tl.load(chosen + number // BLOCK_SIZE, mask=is_chosen, other=0)
    key = block * BLOCK_SIZE + number % BLOCK_SIZE
    tail = (position + 1) // BLOCK_SIZE * BLOCK_SIZE
    return tl.minimum(tl.where(is_chosen, key, tail + number - in_blocks), position)
