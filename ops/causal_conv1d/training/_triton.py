"""Implementation "triton" of the backward: gradients of inputs and filters in one walk.

1. ``_inputs_kernel``, blocks of tokens by blocks of channels: gradients of x, and the block's sums
   for the filters. It convolves again.
2. ``_filters_kernel``: sums of the blocks, always in one order, so that two runs have the same
   bits; none is atomic.
3. ``_states_kernel``, only where sequences start from states: gradients of those.

Blocks are of BLOCK_T tokens in a row, whatever sequences these are of: there are no more of them
where a packing has room for more sequences.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.causal_conv1d.training.op import TrainedCausalConv1d
from torch_hybrid.ops.core.autocast import without_autocast
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.ragged import sequences_of_tokens

# Tokens of a program, and how many of them are fetched at once.
_BLOCK_T = 64
_FETCHED = 4


@without_autocast
def causal_conv1d_backward(x: TrainedCausalConv1d) -> tuple[Tensor, ...]:
    """Compute the gradients of x, the filters, the bias and the initial state."""
    num_tokens, channels = x.x.shape
    width = x.weight.shape[1]
    dx = x.x.new_empty(x.x.shape)
    dweight = torch.empty_like(x.weight)
    dbias = x.weight.new_empty(0 if x.bias is None else channels)
    dinitial = x.states(0 if x.initial_state is None else x.num_seqs)
    block_c = min(128, triton.next_power_of_2(channels))
    blocks_c, blocks_t = triton.cdiv(channels, block_c), triton.cdiv(num_tokens, _BLOCK_T)
    sizes = {"C": channels, "W": width, "SILU": x.silu, "BLOCK_C": block_c, "num_warps": 1}
    sums = x.x.new_empty(blocks_t, width + 1, channels, dtype=torch.float32)
    if num_tokens:
        bind(_inputs_kernel, x)[(blocks_t, blocks_c)](
            seqs=sequences_of_tokens(x.cu_seqlens, num_tokens),
            initial=x.initial_state,
            dfinal=x.dfinal_state,
            dx=dx,
            sums=sums,
            **sizes,
            BLOCK_T=_BLOCK_T,
            ROWS=_FETCHED,
            enable_fp_fusion=True,
        )
    _filters_kernel[(width + 1, blocks_c)](
        sums,
        dweight,
        None if x.bias is None else dbias,
        blocks_t,
        C=channels,
        W=width,
        BLOCK_C=block_c,
        num_warps=4,
    )
    if x.initial_state is not None and x.num_seqs:
        bind(_states_kernel, x)[(x.num_seqs, blocks_c)](
            initial=x.initial_state,
            dfinal=x.dfinal_state,
            dinitial=dinitial,
            **sizes,
            enable_fp_fusion=True,
        )
    return dx, dweight, dbias, dinitial


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def _inputs_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor | None,
    seqs: tl.tensor,
    cu_seqlens: tl.tensor,
    initial: tl.tensor | None,
    dout: tl.tensor,
    dfinal: tl.tensor | None,
    dx: tl.tensor,
    sums: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    stride_x: tl.tensor,
    stride_dout: tl.tensor,
    C: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Walk BLOCK_T tokens of BLOCK_C channels, of which ROWS are fetched at once: one program.

    The last W - 1 inputs and the gradients of the last W - 1 inputs, which later tokens add to, are
    in registers. A program walks W - 1 tokens on, whose outputs its last inputs are in, and leaves
    those out of its sums. Padding tokens have dout 0 here.
    """
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = channel < C
    first = tl.program_id(0) * BLOCK_T
    last = tl.minimum(first + BLOCK_T, num_tokens)
    num_real = tl.load(cu_seqlens + num_seqs)
    b_bias, taps = _filter(weight, bias, channel, mask_c, C, W, BLOCK_C)
    zeros = tl.zeros([BLOCK_C], dtype=tl.float32)
    d_bias, d_taps = zeros, (zeros,) * W
    past, waiting = (), (zeros,) * (W - 1)
    for back in tl.static_range(W - 1, 0, -1):
        is_here = mask_c & (first >= back) & (first - back < num_real)
        p_x = x + tl.cast(first - back, tl.int64) * stride_x + channel
        past = past + (tl.load(p_x, mask=is_here, other=0.0).to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    for start in range(first, last + W - 1, ROWS):
        seen, douts = past, ()
        for place in tl.static_range(ROWS):
            token = tl.cast(start + place, tl.int64)
            is_here = mask_c & (start + place < num_real)
            b_x = tl.load(x + token * stride_x + channel, mask=is_here, other=0.0)
            b_dout = tl.load(dout + token * stride_dout + channel, mask=is_here, other=0.0)
            seen = seen + (b_x.to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
            douts = douts + (b_dout.to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
        for place in tl.static_range(ROWS):
            token = start + place
            seq = tl.load(seqs + token, mask=token < num_real, other=0)
            known = tl.minimum(token - tl.load(cu_seqlens + seq), W - 1)  # inputs before it
            state = tl.cast(seq, tl.int64) * (W - 1) * C + channel
            inputs = ()
            y = b_bias
            for tap in tl.static_range(W):
                source = known - (W - 1) + tap
                b_x = tl.where(source >= 0, seen[place + tap], 0.0)
                if initial is not None:
                    p_past = initial + state + (W - 1 + source) * C
                    is_past = mask_c & (source < 0) & (token < num_real)
                    b_x += tl.load(p_past, mask=is_past, other=0.0).to(tl.float32)
                y += b_x * taps[tap]
                inputs = inputs + (b_x,)  # type: ignore[assignment]  # noqa: RUF005
            dy = _before_activation(douts[place], y, SILU)
            own = tl.where(token < last, dy, 0.0)
            d_bias += own
            b_dx = zeros
            if dfinal is not None:
                left = tl.load(cu_seqlens + seq + 1) - token
                p_final = dfinal + state + (W - 1 - left) * C
                is_left = mask_c & (left < W) & (token < num_real)
                b_dx += tl.load(p_final, mask=is_left, other=0.0).to(tl.float32)
            waiting = waiting + (b_dx,)  # noqa: RUF005
            added, grown = (), ()
            for tap in tl.static_range(W):
                is_same = known >= W - 1 - tap
                grown = grown + (waiting[tap] + tl.where(is_same, dy, 0.0) * taps[tap],)  # type: ignore[assignment]  # noqa: RUF005
                added = added + (d_taps[tap] + own * inputs[tap],)  # type: ignore[assignment]  # noqa: RUF005
            d_taps = added
            done = token - (W - 1)
            p_dx = dx + tl.cast(done, tl.int64) * C + channel
            b_dx = grown[0].to(dx.dtype.element_ty)  # type: ignore[misc]
            tl.store(p_dx, b_dx, mask=mask_c & (done >= first) & (done < last))
            waiting = grown[1:]
        past = seen[ROWS:]  # type: ignore[assignment]
    p_sums = sums + tl.program_id(0).to(tl.int64) * (W + 1) * C + channel
    for tap in tl.static_range(W):
        tl.store(p_sums + tap * C, d_taps[tap], mask=mask_c)
    tl.store(p_sums + W * C, d_bias, mask=mask_c)


@triton.jit
def _filters_kernel(
    sums: tl.tensor,
    dweight: tl.tensor,
    dbias: tl.tensor | None,
    num_blocks: tl.tensor,
    C: tl.constexpr,
    W: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """Sum one tap of BLOCK_C channels, or their bias, over all blocks of tokens: one program.

    The grid is taps and the bias, by blocks of channels.
    """
    tap = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = channel < C
    row = tl.arange(0, 16)
    total = tl.zeros([16, BLOCK_C], dtype=tl.float32)
    for base in range(0, num_blocks, 16):
        block = tl.cast(base + row, tl.int64)
        p_sums = sums + (block * (W + 1) + tap)[:, None] * C + channel[None, :]
        mask = (block < num_blocks)[:, None] & mask_c[None, :]
        total += tl.load(p_sums, mask=mask, other=0.0)
    b_sum = tl.sum(total, 0)
    if tap < W:
        tl.store(dweight + channel * W + tap, b_sum.to(dweight.dtype.element_ty), mask=mask_c)
    elif dbias is not None:
        tl.store(dbias + channel, b_sum.to(dbias.dtype.element_ty), mask=mask_c)


@triton.jit
def _states_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor | None,
    cu_seqlens: tl.tensor,
    initial: tl.tensor,
    dout: tl.tensor,
    dfinal: tl.tensor | None,
    dinitial: tl.tensor,
    stride_x: tl.tensor,
    stride_dout: tl.tensor,
    C: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """Compute the gradient of a sequence's initial state, by BLOCK_C channels: one program."""
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = channel < C
    begin = tl.load(cu_seqlens + tl.program_id(0))
    length = tl.load(cu_seqlens + tl.program_id(0) + 1) - begin
    state = tl.program_id(0).to(tl.int64) * (W - 1) * C + channel
    b_bias, taps = _filter(weight, bias, channel, mask_c, C, W, BLOCK_C)
    seen = ()
    for row in tl.static_range(W - 1):
        b_x = tl.load(initial + state + row * C, mask=mask_c, other=0.0)
        seen = seen + (b_x.to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    dys = ()
    for place in tl.static_range(W - 1):
        token = tl.cast(begin + place, tl.int64)
        is_here = mask_c & (place < length)
        b_x = tl.load(x + token * stride_x + channel, mask=is_here, other=0.0)
        seen = seen + (b_x.to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
        y = b_bias
        for tap in tl.static_range(W):
            y += seen[place + tap] * taps[tap]
        b_dout = tl.load(dout + token * stride_dout + channel, mask=is_here, other=0.0)
        dys = dys + (_before_activation(b_dout.to(tl.float32), y, SILU),)  # type: ignore[assignment]  # noqa: RUF005
    for row in tl.static_range(W - 1):
        b_ds = tl.zeros([BLOCK_C], dtype=tl.float32)
        if dfinal is not None:
            # A state that is longer than its sequence keeps its newest rows.
            p_final = dfinal + state + (row - length) * C
            b_ds += tl.load(p_final, mask=mask_c & (row >= length), other=0.0).to(tl.float32)
        for place in tl.static_range(row + 1):
            b_ds += dys[place] * taps[row - place]
        tl.store(dinitial + state + row * C, b_ds.to(dinitial.dtype.element_ty), mask=mask_c)


@triton.jit
def _filter(
    weight: tl.tensor,
    bias: tl.tensor | None,
    channel: tl.tensor,
    mask_c: tl.tensor,
    C: tl.constexpr,
    W: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> tl.tuple:
    """Load the bias, or zeros, and the taps of channels, oldest first."""
    b_bias = tl.zeros([BLOCK_C], dtype=tl.float32)
    if bias is not None:
        b_bias += tl.load(bias + channel, mask=mask_c, other=0.0).to(tl.float32)
    taps = ()
    for tap in tl.static_range(W):
        b_w = tl.load(weight + channel * W + tap, mask=mask_c, other=0.0)
        taps = taps + (b_w.to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    return b_bias, taps


@triton.jit
def _before_activation(dout: tl.tensor, y: tl.tensor, SILU: tl.constexpr) -> tl.tensor:
    """Take a gradient of outputs to one of what ``y`` was before its activation."""
    if SILU:
        gate = 1.0 / (1.0 + tl.exp(-y))
        dout = dout * gate * (1.0 + y * (1.0 - gate))
    return dout
