"""Implementation "triton" of ``ssd_step``: convolve the inputs, walk the states, norm the outputs.

Three launches, each of which begins while the one before it ends, where a GPU can (PDL); see
README.md.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from torch_hybrid.ops.ssd._triton_norm import SILU_AFTER, SILU_BEFORE, launch_norm
from torch_hybrid.ops.ssd._triton_step_open import read_open_chunks
from torch_hybrid.ops.ssd._triton_token import gated, step_size
from torch_hybrid.ops.ssd.op_step_mamba2 import SsdStep, empty_outputs
from torch_hybrid.ops.triton.conv_step import (
    convolve,
    last_inputs,
    leave_channels,
    leave_inputs,
    taps,
)
from torch_hybrid.ops.triton.decays import exp
from torch_hybrid.ops.triton.early import follow
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.open_chunk import close_chunks
from torch_hybrid.ops.triton.state import Tile, zero_rows

# Channels that a program convolves, of two warps: few, so that one sequence fills many processors.
_BLOCK_CHANNELS = 256


def ssd_step(x: SsdStep) -> Tensor:
    """Launch the convolution, the walk over the states and, where there is one, the norm."""
    if x.state_indices.shape[0] == 0:
        return x.xBC.new_zeros(x.xBC.shape[0], x.inner)
    if x.chunk is not None and not len(x.xBC):
        close_chunks(x, x.conv_state)
        return empty_outputs(x)
    mixed = _convolve(x) if x.records is None else _convolve_drafts(x, x.records)
    out = empty_outputs(x)
    if x.chunk is None:
        _walk(x, mixed, out)
    else:
        _read_open_chunks(x, mixed, out)
    if x.z is not None and x.norm_weight is not None:
        launch_norm(
            out,
            x.z,
            x.norm_weight,
            x,
            gated_by=SILU_AFTER if x.norm_before_gate else SILU_BEFORE,
        )
    return out


def _convolve(x: SsdStep) -> Tensor:
    """Convolve the inputs; rows of padding tokens are uninitialised."""
    mixed = torch.empty_like(x.xBC, memory_format=torch.contiguous_format)
    num_channels = x.xBC.shape[1]
    blocks = triton.cdiv(num_channels, _BLOCK_CHANNELS)
    bind(_conv_kernel, x)[(blocks * x.state_indices.shape[0],)](
        weight=x.conv_weight,
        bias=x.conv_bias,
        mixed=mixed,
        BLOCK=_BLOCK_CHANNELS,
        SILU=x.activation == "silu",
        num_warps=2,
    )
    return mixed


def _convolve_drafts(x: SsdStep, records: Tensor) -> Tensor:
    """Convolve the inputs of new tokens and, after them, of each sequence's accepted records.

    Each row also has its raw step sizes, after the channels.
    """
    num_tokens, num_seqs = x.xBC.shape[0], x.state_indices.shape[0]
    num_channels, num_heads = x.xBC.shape[1], x.state.shape[1]
    _, num_drafts, width = records.shape
    blocks = triton.cdiv(num_channels, _BLOCK_CHANNELS) + triton.cdiv(num_heads, _BLOCK_CHANNELS)
    mixed = x.xBC.new_empty(num_tokens + num_seqs * num_drafts, width)
    bind(_verify_conv_kernel, x)[(blocks * num_seqs,)](
        weight=x.conv_weight,
        bias=x.conv_bias,
        mixed=mixed,
        DRAFTS=num_drafts,
        BLOCK=_BLOCK_CHANNELS,
        SILU=x.activation == "silu",
        num_warps=2,
    )
    return mixed


def _walk(x: SsdStep, mixed: Tensor, out: Tensor) -> None:
    """Advance the states by the tokens, and store the outputs, gated unless they are normed
    later."""
    num_seqs, (num_heads, head_dim_v, head_dim_k) = x.state_indices.shape[0], x.state.shape[1:]
    tile = Tile.of(head_dim_v, head_dim_k)
    num_blocks = triton.cdiv(head_dim_v, tile.block_v)
    bind(_walk_kernel, x)[(num_blocks * num_heads * num_seqs,)](
        mixed=mixed,
        z=_gate_of_walk(x),
        out=out,
        G=x.num_k_heads,
        DRAFTS=None if x.records is None else x.records.shape[1],
        BLOCK_K=tile.block_k,
        BLOCK_V=tile.block_v,
        num_warps=1,
        enable_fp_fusion=False,
    )


def _read_open_chunks(x: SsdStep, mixed: Tensor, out: Tensor) -> None:
    """Add the tokens' records to the open chunks, and store the outputs as ``_walk`` does."""
    group_width = x.num_k_heads * x.state.shape[3]
    places = {"VALUES": 0, "KEYS": x.inner, "QUERIES": x.inner + group_width}
    read_open_chunks(x, mixed, out, places, z=_gate_of_walk(x), slopes=None, rounded=out)


def _gate_of_walk(x: SsdStep) -> Tensor | None:
    """Return the gate, unless a norm stands between."""
    return x.z if x.norm_weight is None else None


@triton.jit
def _conv_kernel(
    xBC: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor | None,
    conv_state: tl.tensor,
    cu_seqlens: tl.tensor,
    initial_indices: tl.tensor,
    state_indices: tl.tensor,
    mixed: tl.tensor,
    stride_xBC: tl.tensor,
    C: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    SILU: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Convolve BLOCK channels of one sequence's token.

    Grid: blocks of channels times sequences. Tile: BLOCK channels in two warps. No other program
    reads or writes their state, so it moves in place.
    """
    follow(EARLY)
    if EARLY:
        gdc_launch_dependents()
    blocks: tl.constexpr = (C + BLOCK - 1) // BLOCK
    seq = tl.program_id(0) // blocks
    channel = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = channel < C
    begin = tl.load(cu_seqlens + seq)
    if begin < tl.load(cu_seqlens + seq + 1):
        initial = tl.load(initial_indices + seq).to(tl.int64)
        slot = tl.load(state_indices + seq).to(tl.int64)
        token = begin.to(tl.int64)
        b_x = tl.load(xBC + token * stride_xBC + channel, mask=mask, other=0.0)
        p_old = conv_state + initial * (W - 1) * C + channel
        past = last_inputs(p_old, mask & (initial != 0), C, W)
        b_y = convolve(past, b_x, taps(weight, bias, channel, mask, W), W, SILU)
        tl.store(mixed + token * C + channel, b_y.to(mixed.dtype.element_ty), mask=mask)
        p_new = conv_state + slot * (W - 1) * C + channel
        leave_inputs(p_new, past[1:] + (b_x,), mask & (slot != 0), C, W)  # noqa: RUF005


# A state is to have the same bits with drafts and without: nothing is fused in these but what is
# written as ``fma``, as the compiler would choose by what stands beside.
@triton.jit
def _next_state(
    b_s: tl.tensor, b_x: tl.tensor, b_b: tl.tensor, step: tl.tensor, decay: tl.tensor
) -> tl.tensor:
    """Advance rows of a head's state by one token."""
    return tl.fma((b_x * step)[:, None], b_b[None, :], b_s * decay)


@triton.jit
def _read(
    b_s: tl.tensor,
    b_x: tl.tensor,
    b_c: tl.tensor,
    skip: tl.tensor,
    b_z: tl.tensor | None,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Multiply rows of a head's state by C and add D x; round, and gate if there is a gate."""
    return gated(tl.fma(b_x, skip, tl.sum(b_s * b_c[None, :], 1)).to(dtype), b_z)


@triton.jit(do_not_specialize=["num_tokens"])
def _verify_conv_kernel(
    xBC: tl.tensor,
    dt: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor | None,
    conv_state: tl.tensor,
    cu_seqlens: tl.tensor,
    initial_indices: tl.tensor,
    state_indices: tl.tensor,
    accepted: tl.tensor,
    records: tl.tensor,
    mixed: tl.tensor,
    num_tokens: tl.tensor,
    stride_xBC: tl.tensor,
    stride_dt: tl.tensor,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SILU: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Convolve BLOCK channels of all tokens of one sequence, or copy raw step sizes of BLOCK heads.

    Grid: (blocks of channels, blocks of heads) times sequences. No other program reads or writes
    them in the convolution's state and in records. Step sizes are copied because programs of a
    head's rows read them later, when its records may be others.
    """
    follow(EARLY)
    if EARLY:
        gdc_launch_dependents()
    R: tl.constexpr = C + H
    of_channels: tl.constexpr = (C + BLOCK - 1) // BLOCK
    blocks: tl.constexpr = of_channels + (H + BLOCK - 1) // BLOCK
    seq = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    begin = tl.load(cu_seqlens + seq)
    num_new = tl.load(cu_seqlens + seq + 1) - begin
    num_replayed = tl.load(accepted + seq)
    initial = tl.load(initial_indices + seq).to(tl.int64)
    slot = tl.load(state_indices + seq).to(tl.int64)
    token = begin.to(tl.int64)
    p_replayed = records + initial * DRAFTS * R
    p_drafts = records + slot * DRAFTS * R
    p_mixed = mixed + token * R
    p_before = mixed + (num_tokens.to(tl.int64) + seq * DRAFTS) * R
    if block < of_channels:
        channel = block * BLOCK + tl.arange(0, BLOCK)
        mask = channel < C
        known = initial != 0
        p_old = conv_state + initial * (W - 1) * C + channel
        p_x = xBC + token * stride_xBC + channel
        tap = taps(weight, bias, channel, mask, W)
        past = last_inputs(p_old, mask & known, C, W)
        for i in range(num_replayed + num_new):
            is_new = i >= num_replayed
            place = i - num_replayed
            p_i = tl.where(is_new, p_x + place * stride_xBC, p_replayed + i * R + channel)
            b_x = tl.load(p_i, mask=mask, other=0.0)
            b_y = convolve(past, b_x, tap, W, SILU).to(mixed.dtype.element_ty)
            p_y = tl.where(is_new, p_mixed + place * R, p_before + i * R)
            tl.store(p_y + channel, b_y, mask=mask)
            past = past[1:] + (b_x,)  # noqa: RUF005
        if (slot != 0) & (num_new + num_replayed > 0):
            leave_channels(
                p_old,
                p_replayed + channel,
                p_x,
                conv_state + slot * (W - 1) * C + channel,
                p_drafts + channel,
                known,
                num_replayed,
                num_new,
                stride_xBC,
                mask,
                C,
                R,
                W,
            )
    else:
        head = (block - of_channels) * BLOCK + tl.arange(0, BLOCK)
        mask = head < H
        for i in range(num_replayed):
            b_dt = tl.load(p_replayed + i * R + C + head, mask=mask)
            tl.store(p_before + i * R + C + head, b_dt, mask=mask)
        tl.debug_barrier()  # all threads of this program have read what is left anew here
        for i in range(num_new):
            b_dt = tl.load(dt + (token + i) * stride_dt + head, mask=mask)
            tl.store(p_mixed + i * R + C + head, b_dt, mask=mask)
            is_draft = (i > 0) & (slot != 0)
            tl.store(p_drafts + (i - 1) * R + C + head, b_dt, mask=mask & is_draft)


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def _walk_kernel(
    mixed: tl.tensor,
    z: tl.tensor | None,
    dt: tl.tensor,
    A_log: tl.tensor,
    dt_bias: tl.tensor,
    D: tl.tensor,
    state: tl.tensor,
    cu_seqlens: tl.tensor,
    initial_indices: tl.tensor,
    state_indices: tl.tensor,
    accepted: tl.tensor | None,
    out: tl.tensor,
    dt_min: tl.tensor,
    dt_max: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    stride_z: tl.tensor,
    stride_dt: tl.tensor,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    DRAFTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Walk BLOCK_V rows of one head's state of one sequence through its tokens.

    Grid: blocks of rows times heads times sequences. Registers: one warp holds the rows, all of K.
    Memory: a state is loaded once, and stored after the first new token; accepted records come
    first.

    In decode steps (DRAFTS is None) a sequence has at most one token, whose step size comes from
    ``dt``. There the state, the step and the gate are loaded before the convolution has ended.
    Every program waits for it, also one without a token: the launch after this one then comes after
    both.
    """
    if EARLY:
        gdc_launch_dependents()
    C: tl.constexpr = H * V + 2 * G * K
    R: tl.constexpr = C if DRAFTS is None else C + H
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    seq = pid // (blocks * H)
    head = pid // blocks % H
    index_k = tl.arange(0, BLOCK_K)
    index_v = pid % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k = index_k < K
    mask_v = index_v < V
    mask_s = mask_v[:, None] & mask_k[None, :]

    begin = tl.load(cu_seqlens + seq)
    num_new = tl.load(cu_seqlens + seq + 1) - begin
    num_walked = num_new
    if DRAFTS is not None:
        num_replayed = tl.load(accepted + seq)
        num_walked += num_replayed
    if num_walked > 0:
        initial = tl.load(initial_indices + seq).to(tl.int64)
        slot = tl.load(state_indices + seq).to(tl.int64)
        token = begin.to(tl.int64)
        channel_x = head * V + index_v
        channel_b = H * V + head // (H // G) * K + index_k
        if DRAFTS is None:
            x_dt = tl.load(dt + token * stride_dt + head).to(tl.float32)
        bias = tl.load(dt_bias + head).to(tl.float32)
        rate = tl.load(A_log + head).to(tl.float32)
        skip = tl.load(D + head).to(tl.float32)
        b_z = None
        if DRAFTS is None and z is not None:
            b_z = tl.load(z + token * stride_z + channel_x, mask=mask_v, other=0.0).to(tl.float32)
        tile_s = head * V * K + index_v[:, None] * K + index_k[None, :]
        p_s = state + initial * H * V * K + tile_s
        b_s = tl.load(p_s, mask=mask_s & (initial != 0), other=0.0)

        if DRAFTS is None:
            step = step_size(x_dt + bias, dt_min, dt_max)
            decay = exp(-exp(rate) * step)
            if EARLY:
                gdc_wait()
            p_x = mixed + token * R
            b_x = tl.load(p_x + channel_x, mask=mask_v, other=0.0).to(tl.float32)
            b_b = tl.load(p_x + channel_b, mask=mask_k, other=0.0).to(tl.float32)
            b_c = tl.load(p_x + G * K + channel_b, mask=mask_k, other=0.0).to(tl.float32)
            b_s = _next_state(b_s, b_x, b_b, step, decay)
            tl.store(state + slot * H * V * K + tile_s, b_s, mask=mask_s & (slot != 0))
            b_o = _read(b_s, b_x, b_c, skip, b_z, out.dtype.element_ty)
            tl.store(out + token * H * V + channel_x, b_o, mask=mask_v)
        else:
            last_certain = num_replayed + tl.minimum(num_new, 1) - 1
            p_mixed = mixed + token * R
            p_before = mixed + (num_tokens.to(tl.int64) + seq * DRAFTS) * R
            if EARLY:
                gdc_wait()
            for i in range(num_walked):
                is_new = i >= num_replayed
                place = i - num_replayed
                p_x = tl.where(is_new, p_mixed + place * R, p_before + i * R)
                b_x = tl.load(p_x + channel_x, mask=mask_v, other=0.0).to(tl.float32)
                b_b = tl.load(p_x + channel_b, mask=mask_k, other=0.0).to(tl.float32)
                x_dt = tl.load(p_x + C + head).to(tl.float32) + bias
                step = step_size(x_dt, dt_min, dt_max)
                b_s = _next_state(b_s, b_x, b_b, step, exp(-exp(rate) * step))
                if i == last_certain:
                    tl.store(state + slot * H * V * K + tile_s, b_s, mask=mask_s & (slot != 0))
                if is_new:
                    b_c = tl.load(p_x + G * K + channel_b, mask=mask_k, other=0.0).to(tl.float32)
                    b_g = None
                    if z is not None:
                        p_z = z + (token + place) * stride_z + channel_x
                        b_g = tl.load(p_z, mask=mask_v, other=0.0).to(tl.float32)
                    b_o = _read(b_s, b_x, b_c, skip, b_g, out.dtype.element_ty)
                    tl.store(out + (token + place) * H * V + channel_x, b_o, mask=mask_v)

    if EARLY:
        gdc_wait()
    # The rows past the last sequence are dealt out to the sequences in turn.
    padding = tl.load(cu_seqlens + num_seqs) + seq
    zero_rows(out, padding, num_tokens, num_seqs, head, index_v, mask_v, H, V)
