# mypy: disable-error-code="untyped-decorator"
"""Implementation "triton" of the backward of the selective scan.

Sequences are cut in segments, as in the forward, whose kernels find the states that segments start
from. ``_segment_gradients_kernel`` and ``_carry_gradients_kernel`` find the gradients of those that
they end in, alike. ``_inputs_kernel`` walks segments forwards, and keeps the states of every few
tokens in memory that a program uses for one segment after another; then back, from one of these
states to the one before. ``_sum_kernel`` adds up what blocks of channels have for B and C. Sums
over tokens are of segments first, and torch adds those.

All sums have one order, so that two runs have the same bits; none is atomic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.core.autocast import without_autocast
from torch_hybrid.ops.core.packed import empty_gradients
from torch_hybrid.ops.selective_scan._triton import Walks, walk_segments
from torch_hybrid.ops.selective_scan.op import SelectiveScan
from torch_hybrid.ops.selective_scan.training.op import TrainedSelectiveScan
from torch_hybrid.ops.triton.decays import LOG2_E, exp2_of_decay, softplus
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.ragged import fetch_rows, sequence_of_token, tokens_of_block

_LN_2 = tl.constexpr(0.6931471805599453)
_STATES = 512  # of a program of _inputs_kernel
_ROWS = 2  # tokens whose states that keeps in registers
_PROGRAMS = 1024  # of _inputs_kernel: more find no room on a GPU, and each has states in memory
_FETCHED = 4  # tokens that _segment_gradients_kernel fetches at once
_SUMMED = 256  # numbers of a program of _sum_kernel


@without_autocast
def selective_scan_backward(x: TrainedSelectiveScan) -> tuple[Tensor, ...]:
    """Compute the gradients of x, dt, A, B, C, D, z, dt_bias and the initial state."""
    dx, ddt, dA, dB, dC, dD, dz, dbias, dinitial = grads = empty_gradients(x)
    num_tokens, channels = x.x.shape
    if x.num_seqs == 0 or num_tokens == 0:
        for each in grads:
            each.zero_()
        if x.dfinal_state is not None and x.initial_state is not None:
            dinitial.copy_(x.dfinal_state)
        return grads
    for each in (dx, ddt, dz):
        each.zero_()  # rows of padding
    walks = Walks(given=_on_pool(x), is_chunked=True, fewest_segments=0)
    constants = walks.constants()
    _, ends = walk_segments(walks)
    blocks_t = triton.cdiv(num_tokens, walks.segment)
    befores = x.states(blocks_t)
    totals = x.A.new_empty(blocks_t, channels)
    bind(_segment_gradients_kernel, x)[(walks.programs * walks.segments,)](
        befores=befores, totals=totals, ROWS=_FETCHED, **constants
    )
    dinitial_state = None if x.initial_state is None else dinitial
    bind(_carry_gradients_kernel, x)[(walks.programs * x.num_seqs,)](
        befores=befores, totals=totals, dinitial=dinitial_state, **constants
    )
    constants["BLOCK_C"] = max(1, min(constants["BLOCK_C"], _STATES // constants["BLOCK_N"]))
    blocks_c = triton.cdiv(constants["CHANNELS"], constants["BLOCK_C"])
    parts = blocks_t * x.B.shape[1] * blocks_c
    programs = min(_PROGRAMS, parts)
    tile = constants["BLOCK_C"] * constants["BLOCK_N"]
    shares_b, shares_c = x.A.new_empty(2, blocks_c, *x.B.shape)
    sums_d, sums_bias = x.A.new_empty(2, blocks_t, channels)
    sums_a = x.states(blocks_t)
    bind(_inputs_kernel, x)[(programs,)](
        ends=ends,
        befores=befores,
        kept=x.A.new_empty(programs, triton.cdiv(walks.segment, _ROWS), tile),
        dx=dx,
        ddt=ddt,
        dz=None if x.z is None else dz,
        dinitial=dinitial_state,
        sums_a=sums_a,
        sums_d=sums_d,
        sums_bias=sums_bias,
        shares_b=shares_b,
        shares_c=shares_c,
        num_parts=parts,
        ROWS=_ROWS,
        **constants,
    )
    bind(_sum_kernel, x)[(triton.cdiv(dB.numel(), _SUMMED),)](
        shares_b=shares_b,
        shares_c=shares_c,
        dB=dB,
        dC=dC,
        SHARES=blocks_c,
        ROW=dB[0].numel(),
        BLOCK=_SUMMED,
    )
    given = ((sums_a, dA, x.A), (sums_d, dD, x.D), (sums_bias, dbias, x.dt_bias))
    for sums, grad, argument in given:
        if argument is not None:
            torch.sum(sums, 0, out=grad)
    return grads


def _on_pool(x: TrainedSelectiveScan) -> SelectiveScan:
    """Put initial states into a pool, of which sequence n starts from slot n + 1 or from none."""
    slots = torch.arange(1, x.num_seqs + 1, dtype=torch.int32, device=x.cu_seqlens.device)
    pool = x.states(1).zero_()
    if x.initial_state is None:
        slots = torch.zeros_like(slots)
    else:
        pool = torch.cat([pool, x.initial_state])
    D = x.A[:, 0] if x.D is None else x.D  # which no segment reads
    return SelectiveScan(
        *(x.x, x.dt, x.B, x.C, x.z, (-x.A).log(), D, pool, x.cu_seqlens, slots, slots),
        dt_bias=x.dt_bias,
        impl=x.impl,
    )


@triton.jit
def _gated(b_o: tl.tensor, b_z: tl.tensor) -> tl.tensor:
    """Multiply gradients of gated outputs by their gates."""
    return b_o * b_z / (1.0 + tl.exp(-b_z))


@triton.jit
def _decay(rate: tl.tensor, step: tl.tensor, IS_EXACT: tl.constexpr) -> tl.tensor:
    """Compute decays of a token; beside 16-bit gradients two roundings do not count."""
    x = rate * step[:, None]
    return exp2_of_decay(x) if IS_EXACT else tl.exp2(x)


@triton.jit(do_not_specialize=["num_seqs"])
def _segment_gradients_kernel(
    dt: tl.tensor,
    A: tl.tensor,
    C: tl.tensor,
    z: tl.tensor | None,
    dt_bias: tl.tensor | None,
    dout: tl.tensor,
    cu_seqlens: tl.tensor,
    befores: tl.tensor,
    totals: tl.tensor,
    num_seqs: tl.tensor,
    stride_dt: tl.tensor,
    stride_C: tl.tensor,
    stride_z: tl.tensor,
    stride_dout: tl.tensor,
    G: tl.constexpr,
    CHANNELS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEGMENT: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Walk one segment back, which is not the first of its sequence: one program.

    It finds what the segment's own outputs give the state before it, and the sums of its steps.
    """
    BLOCKS: tl.constexpr = (CHANNELS + BLOCK_C - 1) // BLOCK_C
    pid = tl.program_id(0)
    _seq, begin, end, first = tokens_of_block(cu_seqlens, num_seqs, pid // (BLOCKS * G), SEGMENT)
    if (first == begin) | (first >= end):
        return
    last = tl.minimum(first + SEGMENT, end)
    group = pid // BLOCKS % G
    index_c = pid % BLOCKS * BLOCK_C + tl.arange(0, BLOCK_C)
    index_n = tl.arange(0, BLOCK_N)
    mask_c = index_c < CHANNELS
    mask_n = index_n < N
    mask_s = mask_c[:, None] & mask_n[None, :]
    channel = group * CHANNELS + index_c
    tile_s = channel[:, None] * N + index_n[None, :]
    rate = tl.load(A + tile_s, mask=mask_s, other=0.0) * LOG2_E
    if dt_bias is not None:
        bias = tl.load(dt_bias + channel, mask=mask_c, other=0.0)
    IS_EXACT: tl.constexpr = dt.dtype.element_ty == tl.float32
    b_s = tl.zeros([BLOCK_C, BLOCK_N], dtype=tl.float32)
    total = tl.zeros([BLOCK_C], dtype=tl.float32)
    blocks = tl.cdiv(last - first, ROWS)
    for done in range(blocks):
        start = first + (blocks - 1 - done) * ROWS
        rows_dt = fetch_rows(dt + channel, start, last, stride_dt, mask_c, ROWS)
        rows_c = fetch_rows(C + group * N + index_n, start, last, stride_C, mask_n, ROWS)
        rows_o = fetch_rows(dout + channel, start, last, stride_dout, mask_c, ROWS)
        if z is not None:
            rows_z = fetch_rows(z + channel, start, last, stride_z, mask_c, ROWS)
        for at in tl.static_range(ROWS - 1, -1, -1):
            before = rows_dt[at].to(tl.float32)
            if dt_bias is not None:
                before += bias
            step = tl.where(start + at < last, softplus(before), 0.0)
            b_o = rows_o[at].to(tl.float32)
            if z is not None:
                b_o = _gated(b_o, rows_z[at].to(tl.float32))
            b_s += b_o[:, None] * rows_c[at].to(tl.float32)[None, :]
            b_s *= _decay(rate, step, IS_EXACT)
            total += step
    kept = (first // SEGMENT).to(tl.int64) * (G * CHANNELS)
    tl.store(befores + kept * N + tile_s, b_s, mask=mask_s)
    tl.store(totals + kept + channel, total, mask=mask_c)


@triton.jit
def _carry_gradients_kernel(
    A: tl.tensor,
    cu_seqlens: tl.tensor,
    dfinal_state: tl.tensor | None,
    befores: tl.tensor,
    totals: tl.tensor,
    dinitial: tl.tensor | None,
    G: tl.constexpr,
    CHANNELS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEGMENT: tl.constexpr,
) -> None:
    """Carry gradients of states back through the segments of one sequence: one program.

    It puts those before a segment in the place of what its own outputs give them.
    """
    BLOCKS: tl.constexpr = (CHANNELS + BLOCK_C - 1) // BLOCK_C
    pid = tl.program_id(0)
    seq = pid // (BLOCKS * G)
    begin = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    index_c = pid % BLOCKS * BLOCK_C + tl.arange(0, BLOCK_C)
    index_n = tl.arange(0, BLOCK_N)
    mask_c = index_c < CHANNELS
    mask_s = mask_c[:, None] & (index_n < N)[None, :]
    channel = pid // BLOCKS % G * CHANNELS + index_c
    tile_s = channel[:, None] * N + index_n[None, :]
    rate = tl.load(A + tile_s, mask=mask_s, other=0.0) * LOG2_E
    b_s = tl.zeros([BLOCK_C, BLOCK_N], dtype=tl.float32)
    p_seq = seq.to(tl.int64) * (G * CHANNELS * N)
    if dfinal_state is not None:
        b_s += tl.load(dfinal_state + p_seq + tile_s, mask=mask_s, other=0.0)
    first = begin // SEGMENT
    for done in range(tl.cdiv(end - begin, SEGMENT) - 1):
        kept = (first + tl.cdiv(end - begin, SEGMENT) - 1 - done).to(tl.int64) * (G * CHANNELS)
        step = tl.load(totals + kept + channel, mask=mask_c, other=0.0)
        own = tl.load(befores + kept * N + tile_s, mask=mask_s, other=0.0)
        b_s = b_s * exp2_of_decay(rate * step[:, None]) + own
        tl.store(befores + kept * N + tile_s, b_s, mask=mask_s)
    if dinitial is not None:
        tl.store(dinitial + p_seq + tile_s, b_s, mask=mask_s & (begin == end))


@triton.jit(do_not_specialize=["num_seqs", "num_parts"])
def _inputs_kernel(
    x: tl.tensor,
    dt: tl.tensor,
    A: tl.tensor,
    B: tl.tensor,
    C: tl.tensor,
    D: tl.tensor | None,
    z: tl.tensor | None,
    dt_bias: tl.tensor | None,
    dout: tl.tensor,
    initial_state: tl.tensor | None,
    dfinal_state: tl.tensor | None,
    cu_seqlens: tl.tensor,
    ends: tl.tensor,
    befores: tl.tensor,
    kept: tl.tensor,
    dx: tl.tensor,
    ddt: tl.tensor,
    dz: tl.tensor | None,
    dinitial: tl.tensor | None,
    sums_a: tl.tensor,
    sums_d: tl.tensor,
    sums_bias: tl.tensor,
    shares_b: tl.tensor,
    shares_c: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    num_parts: tl.tensor,
    stride_x: tl.tensor,
    stride_dt: tl.tensor,
    stride_B: tl.tensor,
    stride_C: tl.tensor,
    stride_z: tl.tensor,
    stride_dout: tl.tensor,
    G: tl.constexpr,
    CHANNELS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEGMENT: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Compute the gradients of inputs by the segments that begin in SEGMENT tokens: one part.

    So there are no more parts, and sums, where a packing has room for more sequences. Parts are
    tokens by groups by blocks of channels, dealt out to programs. States of ROWS tokens are in
    registers, and ``kept`` [programs, SEGMENT / ROWS, tile] holds those between.
    """
    BLOCKS: tl.constexpr = (CHANNELS + BLOCK_C - 1) // BLOCK_C
    STATES: tl.constexpr = G * CHANNELS * N
    IS_EXACT: tl.constexpr = x.dtype.element_ty == tl.float32
    place_c = tl.arange(0, BLOCK_C)
    index_n = tl.arange(0, BLOCK_N)
    KEPT: tl.constexpr = (SEGMENT + ROWS - 1) // ROWS * (BLOCK_C * BLOCK_N)
    p_kept = kept + tl.program_id(0).to(tl.int64) * KEPT
    p_kept += place_c[:, None] * BLOCK_N + index_n[None, :]
    for pid in range(tl.program_id(0), num_parts, tl.num_programs(0)):
        block = pid // (BLOCKS * G)
        group = pid // BLOCKS % G
        index_c = pid % BLOCKS * BLOCK_C + place_c
        mask_c = index_c < CHANNELS
        mask_n = index_n < N
        mask_s = mask_c[:, None] & mask_n[None, :]
        channel = group * CHANNELS + index_c
        tile_s = channel[:, None] * N + index_n[None, :]
        rate = tl.load(A + tile_s, mask=mask_s, other=0.0) * LOG2_E
        bias = tl.zeros([BLOCK_C], dtype=tl.float32)
        skip = tl.zeros([BLOCK_C], dtype=tl.float32)
        if dt_bias is not None:
            bias += tl.load(dt_bias + channel, mask=mask_c, other=0.0)
        if D is not None:
            skip += tl.load(D + channel, mask=mask_c, other=0.0)
        sum_a = tl.zeros([BLOCK_C, BLOCK_N], dtype=tl.float32)
        sum_d = tl.zeros([BLOCK_C], dtype=tl.float32)
        sum_bias = tl.zeros([BLOCK_C], dtype=tl.float32)
        p_b = B + group * N + index_n
        p_c = C + group * N + index_n

        low = block * SEGMENT
        high = tl.minimum(low + SEGMENT, tl.load(cu_seqlens + num_seqs))
        seq = sequence_of_token(cu_seqlens, num_seqs, low)
        begin = tl.load(cu_seqlens + seq)
        while begin < high:
            end = tl.load(cu_seqlens + seq + 1)
            first = begin + tl.cdiv(tl.maximum(low - begin, 0), SEGMENT) * SEGMENT
            last = tl.where(first < high, tl.minimum(first + SEGMENT, end), first)
            blocks = tl.cdiv(tl.maximum(last - first, 0), ROWS)
            p_seq = seq.to(tl.int64) * STATES + tile_s
            p_end = (first // SEGMENT - 1).to(tl.int64) * STATES + tile_s
            b_s = tl.load(ends + p_end, mask=mask_s & (first > begin) & (first < last), other=0.0)
            if initial_state is not None:
                b_s += tl.load(initial_state + p_seq, mask=mask_s & (first == begin), other=0.0)
            for done in range(blocks - 1):
                start = first + done * ROWS
                rows_x = fetch_rows(x + channel, start, last, stride_x, mask_c, ROWS)
                rows_dt = fetch_rows(dt + channel, start, last, stride_dt, mask_c, ROWS)
                rows_b = fetch_rows(p_b, start, last, stride_B, mask_n, ROWS)
                tl.store(p_kept + done * (BLOCK_C * BLOCK_N), b_s)
                for place in tl.static_range(ROWS):
                    step = softplus(rows_dt[place].to(tl.float32) + bias)
                    b_x = rows_x[place].to(tl.float32)
                    b_b = rows_b[place].to(tl.float32)
                    b_s = b_s * _decay(rate, step, IS_EXACT) + (step * b_x)[:, None] * b_b[None, :]
            tl.debug_barrier()  # states that are kept may be read by other lanes

            p_next = ((first + SEGMENT) // SEGMENT).to(tl.int64) * STATES + tile_s
            carry = tl.load(
                befores + p_next, mask=mask_s & (last < end) & (first < last), other=0.0
            )
            if dfinal_state is not None:
                carry += tl.load(dfinal_state + p_seq, mask=mask_s & (last == end), other=0.0)
            for done in range(blocks):
                start = first + (blocks - 1 - done) * ROWS
                rows_x = fetch_rows(x + channel, start, last, stride_x, mask_c, ROWS)
                rows_dt = fetch_rows(dt + channel, start, last, stride_dt, mask_c, ROWS)
                rows_b = fetch_rows(p_b, start, last, stride_B, mask_n, ROWS)
                rows_c = fetch_rows(p_c, start, last, stride_C, mask_n, ROWS)
                rows_o = fetch_rows(dout + channel, start, last, stride_dout, mask_c, ROWS)
                if z is not None:
                    rows_z = fetch_rows(z + channel, start, last, stride_z, mask_c, ROWS)
                if done > 0:
                    b_s = tl.load(p_kept + (blocks - 1 - done) * (BLOCK_C * BLOCK_N))
                states = (b_s,)
                steps = ()
                for place in tl.static_range(ROWS):
                    step = softplus(rows_dt[place].to(tl.float32) + bias)
                    step = tl.where(start + place < last, step, 0.0)
                    b_x = rows_x[place].to(tl.float32)
                    b_b = rows_b[place].to(tl.float32)
                    b_s = b_s * _decay(rate, step, IS_EXACT) + (step * b_x)[:, None] * b_b[None, :]
                    states = states + (b_s,)  # type: ignore[assignment]  # noqa: RUF005
                    steps = steps + (step,)  # type: ignore[assignment]  # noqa: RUF005
                for at in tl.static_range(ROWS - 1, -1, -1):
                    is_there = start + at < last
                    token = tl.cast(start + at, tl.int64)
                    mask_row, mask_group = mask_c & is_there, mask_n & is_there
                    p_row = token * (G * CHANNELS) + channel
                    step = steps[at]
                    b_x = rows_x[at].to(tl.float32)
                    b_o = rows_o[at].to(tl.float32)
                    before = rows_dt[at].to(tl.float32) + bias
                    b_b = rows_b[at].to(tl.float32)
                    b_c = rows_c[at].to(tl.float32)
                    if z is not None:
                        b_z = rows_z[at].to(tl.float32)
                        gate = 1.0 / (1.0 + tl.exp(-b_z))
                        b_y = tl.sum(states[at + 1] * b_c[None, :], 1) + skip * b_x
                        d_z = b_o * b_y * gate * (1.0 + b_z * (1.0 - gate))
                        tl.store(dz + p_row, d_z.to(x.dtype.element_ty), mask=mask_row)
                        b_o *= b_z * gate
                    d_s = carry + b_o[:, None] * b_c[None, :]
                    carry = d_s * _decay(rate, step, IS_EXACT)
                    by_decay = carry * states[at]
                    sum_a += by_decay * step[:, None]
                    d_added = tl.sum(d_s * b_b[None, :], 1)
                    d_step = d_added * b_x + tl.sum(by_decay * rate, 1) * _LN_2
                    d_dt = tl.where(is_there, d_step / (1.0 + tl.exp(-before)), 0.0)
                    sum_d += b_o * b_x
                    sum_bias += d_dt
                    d_x = d_added * step + skip * b_o
                    tl.store(dx + p_row, d_x.to(x.dtype.element_ty), mask=mask_row)
                    tl.store(ddt + p_row, d_dt.to(x.dtype.element_ty), mask=mask_row)
                    p_share = (pid % BLOCKS * tl.cast(num_tokens, tl.int64) + token) * G + group
                    p_share = p_share * N + index_n
                    share = tl.sum(d_s * (step * b_x)[:, None], 0)
                    tl.store(shares_b + p_share, share, mask=mask_group)
                    share = tl.sum(states[at + 1] * b_o[:, None], 0)
                    tl.store(shares_c + p_share, share, mask=mask_group)
            if dinitial is not None:
                tl.store(dinitial + p_seq, carry, mask=mask_s & (first == begin) & (first < last))
            begin = end
            seq += 1
            tl.debug_barrier()

        p_sum = block.to(tl.int64) * (G * CHANNELS) + channel
        tl.store(sums_a + block.to(tl.int64) * STATES + tile_s, sum_a, mask=mask_s)
        tl.store(sums_d + p_sum, sum_d, mask=mask_c)
        tl.store(sums_bias + p_sum, sum_bias, mask=mask_c)


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def _sum_kernel(
    shares_b: tl.tensor,
    shares_c: tl.tensor,
    cu_seqlens: tl.tensor,
    dB: tl.tensor,
    dC: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    SHARES: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Sum BLOCK numbers of shares [SHARES, T, ROW] over shares; rows of padding are 0."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    size = num_tokens.to(tl.int64) * ROW
    mask = place < tl.load(cu_seqlens + num_seqs).to(tl.int64) * ROW
    sum_b = tl.zeros([BLOCK], dtype=tl.float32)
    sum_c = tl.zeros([BLOCK], dtype=tl.float32)
    for share in range(SHARES):
        sum_b += tl.load(shares_b + share * size + place, mask=mask, other=0.0)
        sum_c += tl.load(shares_c + share * size + place, mask=mask, other=0.0)
    tl.store(dB + place, sum_b.to(dB.dtype.element_ty), mask=place < size)
    tl.store(dC + place, sum_c.to(dC.dtype.element_ty), mask=place < size)
