# mypy: disable-error-code="untyped-decorator"
"""Walks of the gated rule's backward on Hopper, in Gluon: a warp that copies, beside walkers.

A group of four warps has 64 rows of V of a state, or of its gradient, in registers. All that it
multiplies with comes by TMA, STAGES chunks ahead; what it leaves goes by TMA while it multiplies.
A chunk's products depend on each other, so that a walk takes as long as its chunks one by one.
With 32 heads one sequence keeps half an H200 busy. So the walk back begins beside the walk
forwards, which it does not depend on (PDL): a backward of 8192 tokens takes 652 us instead of 827.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from torch_hybrid.ops.delta_rule._hopper import CHUNK, HEAD_DIM_K, ROWS_OF_V
from torch_hybrid.ops.triton.hopper import COPIED, ROWS, clear_rows, new_barriers, products_layout

_C: gl.constexpr = gl.constexpr(CHUNK)
_D: gl.constexpr = gl.constexpr(HEAD_DIM_K)  # dims of keys, and of values
_V: gl.constexpr = gl.constexpr(ROWS_OF_V)
_S: gl.constexpr = gl.constexpr(products_layout(HEAD_DIM_K))
_P: gl.constexpr = gl.constexpr(products_layout(CHUNK))
_LEFT: gl.constexpr = gl.constexpr(gl.DotOperandLayout(0, products_layout(CHUNK), 2))
_COLUMNS: gl.constexpr = gl.constexpr(gl.SliceLayout(0, products_layout(CHUNK)))
# Vectors of a chunk: decays since its start, beta, decays until its end, and that of all of it.
_SINCE: gl.constexpr = gl.constexpr(0)
_BETA: gl.constexpr = gl.constexpr(1)
_UNTIL: gl.constexpr = gl.constexpr(2)
_WHOLE: gl.constexpr = gl.constexpr(3)
_VECTORS: gl.constexpr = gl.constexpr(4)
_VECTOR: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_COPIED_VECTOR: gl.constexpr = gl.constexpr(gl.BlockedLayout([2], [32], [1], [0]))
# Arrivals at a stage that is full: each thread's copies, and the bytes that TMA announced.
_ARRIVALS: gl.constexpr = gl.constexpr(33)
# Registers of a thread of the warps beside the first four, which have what is left.
_WALKING: gl.constexpr = gl.constexpr(240)
_COPYING: gl.constexpr = gl.constexpr(32)


@gluon.jit(do_not_specialize=["num_tokens"])
def hopper_states_kernel(
    box_k: tma.tensor_descriptor,
    box_v: tma.tensor_descriptor,
    box_solve: tma.tensor_descriptor,
    box_states: tma.tensor_descriptor,
    box_errors: tma.tensor_descriptor,
    decays: gl.tensor,
    beta: gl.tensor,
    errors: gl.tensor,
    initial_state: gl.tensor | None,
    cu_seqlens: gl.tensor,
    num_tokens: gl.tensor,
    stride_beta: gl.tensor,
    H: gl.constexpr,
    HV: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Walk a sequence's chunks with GROUPS times 64 rows of a head's state: one program.

    The grid is sequences by value heads by rows of V. Tensors are those of
    ``_triton_walks._states_kernel``.
    """
    gdc_launch_dependents()
    place = _place(cu_seqlens, HV, GROUPS)
    b_k = gl.allocate_shared_memory(gl.bfloat16, [STAGES, _C, _D], ROWS)
    b_v = gl.allocate_shared_memory(gl.bfloat16, [STAGES * GROUPS, _C, _V], ROWS)
    b_solve = gl.allocate_shared_memory(gl.bfloat16, [STAGES, _C, _C], ROWS)
    b_vectors = gl.allocate_shared_memory(gl.float32, [STAGES * _VECTORS, _C], _VECTOR)
    b_state = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, _V, _D], ROWS)
    b_errors = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, _C, _V], ROWS)
    full = new_barriers(STAGES, _ARRIVALS)
    empty = new_barriers(STAGES, GROUPS)
    fence_async_shared()
    ring = ((b_k,), b_v, (b_solve,), b_vectors, full, empty)
    left = (b_state, b_errors)
    out = (box_states, box_errors, errors)
    boxes = ((box_k,), box_v, (box_solve,))
    gates = (decays, beta, num_tokens, stride_beta)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (
                    _walk_states,
                    (initial_state, out, left, ring, place, num_tokens, 0, HV, 1, STAGES),
                ),
                (_copy, (boxes, gates, ring, place, H, HV, 1, STAGES, False)),
            ],
            [1],
            [_COPYING],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _walk_states,
                    (initial_state, out, left, ring, place, num_tokens, 0, HV, 2, STAGES),
                ),
                (
                    _walk_states,
                    (initial_state, out, left, ring, place, num_tokens, 1, HV, 2, STAGES),
                ),
                (_copy, (boxes, gates, ring, place, H, HV, 2, STAGES, False)),
            ],
            [4, 1],
            [_WALKING, _COPYING],
        )


@gluon.jit(do_not_specialize=["num_tokens", "num_seqs"])
def hopper_gradients_kernel(
    box_q: tma.tensor_descriptor,
    box_k: tma.tensor_descriptor,
    box_do: tma.tensor_descriptor,
    box_solve: tma.tensor_descriptor,
    box_attend: tma.tensor_descriptor,
    box_dstates: tma.tensor_descriptor,
    box_derrors: tma.tensor_descriptor,
    box_dv: tma.tensor_descriptor,
    decays: gl.tensor,
    beta: gl.tensor,
    derrors: gl.tensor,
    dfinal_state: gl.tensor | None,
    dinitial: gl.tensor | None,
    dq: gl.tensor,
    dk: gl.tensor,
    dv: gl.tensor,
    dg: gl.tensor,
    dbeta: gl.tensor,
    cu_seqlens: gl.tensor,
    scale: gl.tensor,
    num_tokens: gl.tensor,
    num_seqs: gl.tensor,
    stride_beta: gl.tensor,
    H: gl.constexpr,
    HV: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Walk a sequence's chunks backwards with GROUPS times 64 rows of a state's gradient.

    The grid is sequences by value heads by rows of V. Tensors are those of
    ``_triton_walks._gradients_kernel``.
    """
    place = _place(cu_seqlens, HV, GROUPS)
    b_q = gl.allocate_shared_memory(gl.bfloat16, [STAGES, _C, _D], ROWS)
    b_k = gl.allocate_shared_memory(gl.bfloat16, [STAGES, _C, _D], ROWS)
    b_do = gl.allocate_shared_memory(gl.bfloat16, [STAGES * GROUPS, _C, _V], ROWS)
    b_solve = gl.allocate_shared_memory(gl.bfloat16, [STAGES, _C, _C], ROWS)
    b_attend = gl.allocate_shared_memory(gl.bfloat16, [STAGES, _C, _C], ROWS)
    b_vectors = gl.allocate_shared_memory(gl.float32, [STAGES * _VECTORS, _C], _VECTOR)
    b_state = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, _V, _D], ROWS)
    b_derrors = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, _C, _V], ROWS)
    b_dv = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, _C, _V], ROWS)
    full = new_barriers(STAGES, _ARRIVALS)
    empty = new_barriers(STAGES, GROUPS)
    fence_async_shared()
    ring = ((b_k, b_q), b_do, (b_solve, b_attend), b_vectors, full, empty)
    left = (b_state, b_derrors, b_dv)
    out = (box_dstates, box_derrors, derrors, box_dv, dv)
    boxes = ((box_k, box_q), box_do, (box_solve, box_attend))
    gates = (decays, beta, num_tokens, stride_beta)
    given = (dfinal_state, dinitial, scale)

    seq, head_v, first_row, _, _ = place
    padding = (gl.load(cu_seqlens + num_seqs) + seq, num_tokens, num_seqs)
    _zero_rows(dv, padding, head_v * _D + first_row, _V * GROUPS, HV * _D)
    if first_row == 0:
        head_k = head_v // (HV // H)
        _zero_rows(dq, padding, head_k * _D, _D, H * _D)
        _zero_rows(dk, padding, head_k * _D, _D, H * _D)
        _zero_rows(dg, padding, head_v, 1, HV)
        _zero_rows(dbeta, padding, head_v, 1, HV)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_walk_gradients, (given, out, left, ring, place, num_tokens, 0, HV, 1, STAGES)),
                (_copy, (boxes, gates, ring, place, H, HV, 1, STAGES, True)),
            ],
            [1],
            [_COPYING],
        )
    else:
        gl.warp_specialize(
            [
                (_walk_gradients, (given, out, left, ring, place, num_tokens, 0, HV, 2, STAGES)),
                (_walk_gradients, (given, out, left, ring, place, num_tokens, 1, HV, 2, STAGES)),
                (_copy, (boxes, gates, ring, place, H, HV, 2, STAGES, True)),
            ],
            [4, 1],
            [_WALKING, _COPYING],
        )


@gluon.jit
def _place(cu_seqlens: gl.tensor, HV: gl.constexpr, GROUPS: gl.constexpr) -> gl.tuple:
    """Return a program's sequence, value head, and first row of V; where its tokens begin, and how
    many they are."""
    NUM_BLOCKS: gl.constexpr = _D // (_V * GROUPS)
    seq = gl.program_id(0) // (NUM_BLOCKS * HV)
    head_v = gl.program_id(0) // NUM_BLOCKS % HV
    first_row = gl.program_id(0) % NUM_BLOCKS * (_V * GROUPS)
    begin = gl.load(cu_seqlens + seq)
    return (seq, head_v, first_row, begin, gl.load(cu_seqlens + seq + 1) - begin)


@gluon.jit
def _copy(
    boxes: gl.tuple,
    gates: gl.tuple,
    ring: gl.tuple,
    place: gl.tuple,
    H: gl.constexpr,
    HV: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    BACKWARDS: gl.constexpr,
) -> None:
    """Fetch each chunk as soon as there is a stage for it."""
    of_keys, box_v, of_squares = boxes
    decays, beta, num_tokens, stride_beta = gates
    keys, b_v, squares, b_vectors, full, empty = ring
    _, head_v, first_row, begin, num_new = place
    head_k = head_v // (HV // H)
    NUM: gl.constexpr = 2 if BACKWARDS else 1  # tiles of keys, and squares
    BYTES: gl.constexpr = 2 * (NUM * _C * _D + GROUPS * _C * _V + NUM * _C * _C)
    index = gl.arange(0, _C, _COPIED_VECTOR)
    num_chunks = (num_new + _C - 1) // _C
    for step in range(num_chunks):
        chunk = num_chunks - 1 - step if BACKWARDS else step
        stage = step % STAGES
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), (step // STAGES) & 1 ^ 1)
        mbarrier.expect(bar, BYTES)
        token = begin + chunk * _C
        for i in gl.static_range(NUM):
            own = keys[i].index(stage)
            tma.async_copy_global_to_shared(of_keys[i], [token, head_k * _D], bar, own)
        for group in gl.static_range(GROUPS):
            own = b_v.index(stage * GROUPS + group)
            column = head_v * _D + first_row + group * _V
            tma.async_copy_global_to_shared(box_v, [token, column], bar, own)
        for i in gl.static_range(NUM):
            own = squares[i].index(stage)
            tma.async_copy_global_to_shared(of_squares[i], [token, head_v * _C], bar, own)
        left = num_new - chunk * _C
        row = (token + index).to(gl.int64)
        p_since = decays + row * HV + head_v
        last = (token + gl.minimum(left, _C) - 1).to(gl.int64)
        p_whole = decays + (last * HV + head_v) + index * 0
        vectors = stage * _VECTORS
        # Rows past the end of the sequence are 0.
        own = b_vectors.index(vectors + _SINCE)
        async_copy.async_copy_global_to_shared(own, p_since, index < left)
        own = b_vectors.index(vectors + _BETA)
        p_beta = beta + row * stride_beta + head_v
        async_copy.async_copy_global_to_shared(own, p_beta, index < left)
        own = b_vectors.index(vectors + _UNTIL)
        p_until = p_since + num_tokens.to(gl.int64) * HV
        async_copy.async_copy_global_to_shared(own, p_until, index < left)
        own = b_vectors.index(vectors + _WHOLE)
        async_copy.async_copy_global_to_shared(own, p_whole, index < _C)
        async_copy.mbarrier_arrive(bar, increment_count=False)


@gluon.jit
def _walk_states(
    initial_state: gl.tensor | None,
    out: gl.tuple,
    own: gl.tuple,
    ring: gl.tuple,
    place: gl.tuple,
    num_tokens: gl.tensor,
    GROUP: gl.constexpr,
    HV: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Walk the chunks with 64 rows of V of the state."""
    box_states, box_errors, errors = out
    b_state, b_errors = own[0].index(GROUP), own[1].index(GROUP)
    of_keys, b_v, squares, b_vectors, full, empty = ring
    b_k, b_solve = of_keys[0], squares[0]
    seq, head_v, first_row, begin, num_new = place
    first_row += GROUP * _V
    b_s, before = _given_state(initial_state, seq, head_v, first_row, num_tokens, HV)
    zeros = gl.zeros([_V, _C], gl.float32, _P)
    num_chunks = (num_new + _C - 1) // _C
    if num_chunks > 0:
        mbarrier.wait(full.index(0), 0)
    for chunk in range(num_chunks):
        stage = chunk % STAGES
        keys, values, solve = (
            b_k.index(stage),
            b_v.index(stage * GROUPS + GROUP),
            b_solve.index(stage),
        )
        token, left = begin + chunk * _C, num_new - chunk * _C
        if left < _C:
            clear_rows(keys, left, COPIED)
            clear_rows(values, left, COPIED)
            clear_rows(solve, left, COPIED)
            fence_async_shared()
        rounded = b_s.to(gl.bfloat16)
        halves = gl.convert_layout(rounded, _LEFT)
        x = warpgroup_mma(halves, keys.permute((1, 0)), zeros, use_acc=False, is_async=True)
        # A chunk stores a state and errors: what the chunk before stored last may be on its way.
        tma.store_wait(1)
        b_state.store(rounded)
        fence_async_shared()
        place_s = gl.where(chunk == 0, before, token // _C)
        if place_s >= 0:  # TMA does not store before the first row
            row = (place_s * HV + head_v) * _D + first_row
            tma.async_copy_shared_to_global(box_states, [row, 0], b_state)
        wanted = values.permute((1, 0)).load(_P).to(gl.float32)
        since = b_vectors.index(stage * _VECTORS + _SINCE).load(_COLUMNS)
        b_beta = b_vectors.index(stage * _VECTORS + _BETA).load(_COLUMNS)
        x, halves, wanted, since, b_beta = warpgroup_mma_wait(
            0, deps=[x, halves, wanted, since, b_beta]
        )
        x = wanted - x * since[None, :]
        halves = gl.convert_layout((x * b_beta[None, :]).to(gl.bfloat16), _LEFT)
        y = warpgroup_mma(halves, solve.permute((1, 0)), zeros, use_acc=False, is_async=True)
        b_s *= b_vectors.index(stage * _VECTORS + _WHOLE).load(gl.SliceLayout(1, _S))[:, None]
        until = b_vectors.index(stage * _VECTORS + _UNTIL).load(_COLUMNS)
        y, halves, b_s, until = warpgroup_mma_wait(0, deps=[y, halves, b_s, until])
        x -= y
        halves = gl.convert_layout((x * (b_beta * until)[None, :]).to(gl.bfloat16), _LEFT)
        b_s = warpgroup_mma(halves, keys, b_s, is_async=True)
        tma.store_wait(1)
        _store(box_errors, errors, x, b_errors, token, left, head_v, first_row, HV)
        step = chunk + 1
        mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1, pred=step < num_chunks)
        b_s, halves = warpgroup_mma_wait(0, deps=[b_s, halves])
        mbarrier.arrive(empty.index(stage), count=1)
    tma.store_wait(0)


@gluon.jit
def _walk_gradients(
    given: gl.tuple,
    out: gl.tuple,
    own: gl.tuple,
    ring: gl.tuple,
    place: gl.tuple,
    num_tokens: gl.tensor,
    GROUP: gl.constexpr,
    HV: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Walk the chunks backwards with 64 rows of V of a state's gradient."""
    dfinal_state, dinitial, scale = given
    box_dstates, box_derrors, derrors, box_dv, dv = out
    b_state, b_derrors, b_dv = own[0].index(GROUP), own[1].index(GROUP), own[2].index(GROUP)
    of_keys, b_do, squares, b_vectors, full, empty = ring
    b_k, b_q, b_solve, b_attend = of_keys[0], of_keys[1], squares[0], squares[1]
    seq, head_v, first_row, begin, num_new = place
    first_row += GROUP * _V
    b_s, behind = _given_state(dfinal_state, seq, head_v, first_row, num_tokens, HV)
    zeros = gl.zeros([_V, _C], gl.float32, _P)
    num_chunks = (num_new + _C - 1) // _C
    if num_chunks > 0:
        mbarrier.wait(full.index(0), 0)
    for turn in range(num_chunks):
        chunk = num_chunks - 1 - turn
        stage = turn % STAGES
        keys, queries, values = (
            b_k.index(stage),
            b_q.index(stage),
            b_do.index(stage * GROUPS + GROUP),
        )
        solve, attend = b_solve.index(stage), b_attend.index(stage)
        token, left = begin + chunk * _C, num_new - chunk * _C
        if left < _C:
            clear_rows(keys, left, COPIED)
            clear_rows(queries, left, COPIED)
            clear_rows(values, left, COPIED)
            clear_rows(solve, left, COPIED)
            clear_rows(attend, left, COPIED)
            fence_async_shared()
        rounded = b_s.to(gl.bfloat16)
        halves = gl.convert_layout(rounded, _LEFT)
        x = warpgroup_mma(halves, keys.permute((1, 0)), zeros, use_acc=False, is_async=True)
        y = warpgroup_mma(values.permute((1, 0)), attend, zeros, use_acc=False, is_async=True)
        # A chunk stores three tiles: the two that were stored last may be on their way.
        tma.store_wait(2)
        b_state.store(rounded)
        fence_async_shared()
        place_s = gl.where(turn == 0, behind, token // _C + 1)
        if place_s >= 0:
            row = (place_s * HV + head_v) * _D + first_row
            tma.async_copy_shared_to_global(box_dstates, [row, 0], b_state)
        vectors = stage * _VECTORS
        until = b_vectors.index(vectors + _UNTIL).load(_COLUMNS)
        x, halves, until = warpgroup_mma_wait(1, deps=[x, halves, until])
        x *= until[None, :]
        by_q = b_vectors.index(vectors + _SINCE).load(_COLUMNS) * scale
        by_q = values.permute((1, 0)).load(_P).to(gl.float32) * by_q[None, :]
        by_q = gl.convert_layout(by_q.to(gl.bfloat16), _LEFT)
        y, x, by_q = warpgroup_mma_wait(0, deps=[y, x, by_q])
        x += y
        b_beta = b_vectors.index(vectors + _BETA).load(_COLUMNS)
        halves = gl.convert_layout((x * b_beta[None, :]).to(gl.bfloat16), _LEFT)
        y = warpgroup_mma(halves, solve, zeros, use_acc=False, is_async=True)
        b_s *= b_vectors.index(vectors + _WHOLE).load(gl.SliceLayout(1, _S))[:, None]
        b_s = warpgroup_mma(by_q, queries, b_s, is_async=True)
        y, halves = warpgroup_mma_wait(1, deps=[y, halves])
        x -= y
        # Read again: vectors would take registers that the state needs.
        since = b_vectors.index(vectors + _SINCE).load(_COLUMNS)
        b_beta = b_vectors.index(vectors + _BETA).load(_COLUMNS)
        halves = gl.convert_layout((x * (-b_beta * since)[None, :]).to(gl.bfloat16), _LEFT)
        b_s = warpgroup_mma(halves, keys, b_s, is_async=True)
        tma.store_wait(2)
        _store(box_derrors, derrors, x, b_derrors, token, left, head_v, first_row, HV)
        tma.store_wait(2)
        b_beta = b_vectors.index(vectors + _BETA).load(_COLUMNS)
        _store(box_dv, dv, x * b_beta[None, :], b_dv, token, left, head_v, first_row, HV)
        step = turn + 1
        mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1, pred=step < num_chunks)
        b_s, halves, by_q = warpgroup_mma_wait(0, deps=[b_s, halves, by_q])
        mbarrier.arrive(empty.index(stage), count=1)
    if dinitial is not None:
        gl.store(dinitial + _tile(seq, head_v, first_row, HV), b_s)
    tma.store_wait(0)
    gdc_wait()  # what waits for this launch waits for that of the states too


@gluon.jit
def _given_state(
    given: gl.tensor | None,
    seq: gl.tensor,
    head_v: gl.tensor,
    first_row: gl.tensor,
    num_tokens: gl.tensor,
    HV: gl.constexpr,
) -> gl.tuple:
    """Load 64 rows of the state that a sequence is given, or zeros, and return its place: -1 for
    none."""
    b_s = gl.zeros([_V, _D], gl.float32, _S)
    place = -1
    if given is not None:
        b_s += gl.load(given + _tile(seq, head_v, first_row, HV))
        place = (num_tokens + _C - 1) // _C + seq
    return b_s, place


@gluon.jit
def _tile(seq: gl.tensor, head_v: gl.tensor, first_row: gl.tensor, HV: gl.constexpr) -> gl.tensor:
    """Return where 64 rows of a state lie among [N, HV, V, K]."""
    row = first_row + gl.arange(0, _V, gl.SliceLayout(1, _S))
    tile = row[:, None] * _D + gl.arange(0, _D, gl.SliceLayout(0, _S))[None, :]
    return (seq.to(gl.int64) * HV + head_v) * (_D * _D) + tile


@gluon.jit
def _store(
    box: tma.tensor_descriptor,
    out: gl.tensor,
    x: gl.tensor,
    b_out: gl.shared_memory_descriptor,
    token: gl.tensor,
    left: gl.tensor,
    head_v: gl.tensor,
    first_row: gl.tensor,
    HV: gl.constexpr,
) -> None:
    """Write rows [V, C] of a chunk, of which ``left`` tokens are the sequence's."""
    b_out.permute((1, 0)).store(x.to(gl.bfloat16))
    if left >= _C:
        fence_async_shared()
        tma.async_copy_shared_to_global(box, [token, head_v * _D + first_row], b_out)
    else:
        index = gl.arange(0, _C, gl.SliceLayout(1, COPIED))
        column = gl.arange(0, _V, gl.SliceLayout(0, COPIED))
        p_out = out + (token.to(gl.int64) * HV + head_v) * _D + first_row
        tile = index[:, None] * (HV * _D) + column[None, :]
        gl.store(p_out + tile, b_out.load(COPIED), mask=(index < left)[:, None])


@gluon.jit
def _zero_rows(
    out: gl.tensor,
    padding: gl.tuple,
    column: gl.tensor,
    COLUMNS: gl.constexpr,
    WIDTH: gl.constexpr,
) -> None:
    """Put columns of rows past the last sequence to 0; rows are dealt out to sequences in turn."""
    first, num_tokens, num_seqs = padding
    index = gl.arange(0, _D, gl.BlockedLayout([1], [32], [4], [0]))
    zeros = gl.zeros_like(index).to(out.dtype.element_ty)
    p_out = out + first.to(gl.int64) * WIDTH + column + index
    for _ in range(first, num_tokens, num_seqs):
        gl.store(p_out, zeros, mask=index < COLUMNS)
        p_out += num_seqs.to(gl.int64) * WIDTH
