"""Delta rules' steps in Triton for any number of tokens a sequence, each with a decode step's bits.

A token's outputs, and the states after it, depend only on the tokens before it. Three launches, as
in ``_triton_step.py``. The first prepares every token by itself. In the second, states walk from
token to token, whose inputs come by way of L1. Eight threads sum a row of a state, however many
rows a program has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from torch_hybrid.ops.delta_rule._triton_step import (
    PREPARED_CHANNELS,
    Rule,
    advance_states,
    decay_of,
    launch_norm,
    rows_of_warp,
    unit,
)
from torch_hybrid.ops.delta_rule.op_step import DeltaStep
from torch_hybrid.ops.triton.conv_step import convolve, inputs_before, leave_inputs, taps
from torch_hybrid.ops.triton.devices import PROCESSORS
from torch_hybrid.ops.triton.early import follow
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.ragged import sequence_of_token
from torch_hybrid.ops.triton.state import fetch
from torch_hybrid.ops.triton.state_pieces import PIECE, leave_states, read_states

# Rows of a state that a warp has where a sequence has so many tokens, which wait for one another: a
# vector of each row in a thread.
_FEW_ROWS = 4
_MANY_ROWS = 32
_WALKED_TOKENS = 16
# Tokens whose inputs are on their way to L1, and, where few warps have nobody to wait for them,
# those that are in registers: with decays by channel they take half as many again.
_FETCHED_TOKENS = 16
_LINES = 32  # that a warp fetches at once
_FEW_WARPS = 2 * 4 * PROCESSORS
_LOADED_TOKENS = 4
_LOADED_TOKENS_BY_CHANNEL = 3


def launch_extend(x: DeltaStep, rule: Rule) -> Tensor:
    """Run a step whose sequences have any number of tokens."""
    num_seqs, num_tokens = x.state_indices.shape[0], x.qkv.shape[0]
    _, num_v_heads, head_dim_v, head_dim_k = x.state.shape
    out = torch.empty_like(x.z, memory_format=torch.contiguous_format)
    if num_seqs == 0 or num_tokens == 0:
        return out.zero_()
    num_k_heads = x.widths[0] // head_dim_k
    sizes = {"H": num_k_heads, "HV": num_v_heads, "K": head_dim_k, "V": head_dim_v}
    sizes |= {"BY_CHANNEL": rule.by_channel, "W": x.conv_weight.shape[1]}
    block = triton.next_power_of_2(max(head_dim_k, head_dim_v))
    num_heads = max(1, PREPARED_CHANNELS // block)
    num_blocks = triton.cdiv(2 * num_k_heads + num_v_heads, num_heads)
    num_blocks += 1 + triton.cdiv(x.a.shape[1], num_heads * block)
    width = x.qkv.shape[1] + x.b.shape[1] + x.a.shape[1]
    prepared = x.state.new_empty(num_tokens, width)
    bind(_prepare_token_kernel, x, rule)[(num_blocks * num_tokens,)](
        prepared=prepared,
        **sizes,
        HEADS=num_heads,
        BLOCK=block,
        BLOCK_HEADS=triton.next_power_of_2(num_v_heads),
        SILU=x.activation == "silu",
        num_warps=1,
        enable_fp_fusion=False,
    )
    pieces = triton.cdiv(head_dim_k, PIECE)
    lines = triton.next_power_of_2(3 * pieces + 2)
    num_rows = _rows_of_program(num_seqs, num_tokens, x.state)
    is_few = num_rows <= _FEW_ROWS
    walks = triton.cdiv(head_dim_v, num_rows) * num_v_heads
    leaves = triton.cdiv(x.qkv.shape[1], PREPARED_CHANNELS)
    bind(_walk_tokens_kernel, x)[((walks + leaves) * num_seqs,)](
        prepared=prepared,
        out=out,
        **sizes,
        PIECES=pieces,
        LANES=PIECE,
        ROWS=num_rows,
        CHANNELS=PREPARED_CHANNELS,
        BESIDE=num_rows if is_few else 1,
        LINES=lines,
        TOGETHER=_LINES // lines,
        FETCHED=_FETCHED_TOKENS if is_few else 0,
        AHEAD=_tokens_ahead(walks * num_seqs, rule) if is_few else 1,
        num_warps=max(1, num_rows // rows_of_warp(head_dim_k)),
        enable_fp_fusion=False,
    )
    launch_norm(out, x, rule)
    return out


def _rows_of_program(num_seqs: int, num_tokens: int, state: Tensor) -> int:
    """Choose the rows of a state that a program walks: a decode step's for few tokens, else four.

    Both give the same sums where they were compared, at a K of 128.
    """
    head_dim_v, head_dim_k = state.shape[2:]
    if head_dim_k == 128 and head_dim_v >= _MANY_ROWS and num_tokens < _WALKED_TOKENS * num_seqs:
        return _MANY_ROWS
    few: int = min(triton.next_power_of_2(head_dim_v), _FEW_ROWS)
    return few


def _tokens_ahead(num_warps: int, rule: Rule) -> int:
    """Choose how many tokens' inputs a warp of few rows has in registers."""
    if num_warps > _FEW_WARPS:
        return 1
    return _LOADED_TOKENS_BY_CHANNEL if rule.by_channel else _LOADED_TOKENS


@triton.jit(do_not_specialize=["num_seqs"])
def _prepare_token_kernel(
    qkv: tl.tensor,
    b: tl.tensor,
    a: tl.tensor,
    conv_weight: tl.tensor,
    conv_bias: tl.tensor | None,
    A_log: tl.tensor,
    dt_bias: tl.tensor,
    conv_state: tl.tensor,
    cu_seqlens: tl.tensor,
    initial_indices: tl.tensor,
    prepared: tl.tensor,
    scale: tl.tensor,
    beta_scale: tl.tensor,
    lower_bound: tl.tensor | None,
    num_seqs: tl.tensor,
    stride_qkv: tl.tensor,
    stride_b: tl.tensor,
    stride_a: tl.tensor,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    W: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    SILU: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Prepare HEADS heads of q, k and v of one token, all its step sizes, or some of its decays.

    Grid: (blocks of heads, one for step sizes, blocks of decays) times tokens. Tile: one warp with
    HEADS rows of BLOCK channels. The convolution's state is only read.
    """
    follow(EARLY)
    if EARLY:
        gdc_launch_dependents()
    C: tl.constexpr = 2 * H * K + HV * V
    DECAYS: tl.constexpr = HV * K if BY_CHANNEL else HV
    R: tl.constexpr = C + HV + DECAYS
    OF_HEADS: tl.constexpr = (2 * H + HV + HEADS - 1) // HEADS
    BLOCKS: tl.constexpr = OF_HEADS + 1 + (DECAYS + HEADS * BLOCK - 1) // (HEADS * BLOCK)
    block = tl.program_id(0) % BLOCKS
    token = tl.program_id(0) // BLOCKS
    seq = sequence_of_token(cu_seqlens, num_seqs, token)
    if seq < num_seqs:
        place = token - tl.load(cu_seqlens + seq)
        row = token.to(tl.int64)
        p_prepared = prepared + row * R
        if block < OF_HEADS:
            head = block * HEADS + tl.arange(0, HEADS)
            index = tl.arange(0, BLOCK)
            is_key = head < 2 * H
            first = tl.where(is_key, head * K, 2 * H * K + (head - 2 * H) * V)
            channel = first[:, None] + index[None, :]
            mask = index[None, :] < tl.where(is_key, K, V)[:, None]
            mask &= (head < 2 * H + HV)[:, None]
            initial = tl.load(initial_indices + seq).to(tl.int64)
            p_x = qkv + row * stride_qkv + channel
            past = inputs_before(
                p_x,
                stride_qkv,
                conv_state + initial * (W - 1) * C + channel,
                place,
                initial != 0,
                mask,
                C,
                W,
            )
            tap = taps(conv_weight, conv_bias, channel, mask, W)
            b_y = convolve(past, tl.load(p_x, mask=mask, other=0.0), tap, W, SILU)
            factor = tl.where(head < H, scale, 1.0)
            b_y = tl.where(is_key[:, None], unit(b_y, factor), b_y)
            tl.store(p_prepared + channel, b_y, mask=mask)
        elif block == OF_HEADS:
            index_b = tl.arange(0, BLOCK_HEADS)
            mask_b = index_b < HV
            b_b = tl.load(b + row * stride_b + index_b, mask=mask_b, other=0.0).to(tl.float32)
            tl.store(p_prepared + C + index_b, beta_scale / (1.0 + tl.exp(-b_b)), mask=mask_b)
        else:
            index_a = (block - OF_HEADS - 1) * HEADS * BLOCK + tl.arange(0, HEADS * BLOCK)
            mask_a = index_a < DECAYS
            b_a = tl.load(a + row * stride_a + index_a, mask=mask_a, other=0.0).to(tl.float32)
            b_a += tl.load(dt_bias + index_a, mask=mask_a, other=0.0).to(tl.float32)
            b_A = tl.load(A_log + index_a // (DECAYS // HV), mask=mask_a, other=0.0)
            b_decay = decay_of(b_a, b_A.to(tl.float32), lower_bound)
            tl.store(p_prepared + C + HV + index_a, b_decay, mask=mask_a)


@triton.jit
def _columns(
    line: tl.tensor,
    head: tl.tensor,
    first_v: tl.tensor,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    LANES: tl.constexpr,
    PIECES: tl.constexpr,
) -> tl.tensor:
    """Tell where in a prepared row the inputs of a head lie, by line of memory: pieces of k, of q
    and of decays, rows of v, and the step size."""
    C: tl.constexpr = 2 * H * K + HV * V
    head_k = head // (HV // H)
    piece = line % PIECES * LANES
    column = tl.where(line == 3 * PIECES, 2 * H * K + head * V + first_v, C + head)
    decay = C + HV + (head * K + piece if BY_CHANNEL else head)
    column = tl.where(line < 3 * PIECES, decay, column)
    column = tl.where(line < 2 * PIECES, head_k * K + piece, column)
    return tl.where(line < PIECES, (H + head_k) * K + piece, column)


@triton.jit
def _pieces(
    p_row: tl.tensor,
    K: tl.constexpr,
    LANES: tl.constexpr,
    PIECES: tl.constexpr,
    BESIDE: tl.constexpr,
) -> tl.tuple:
    """Load a vector along K in pieces of LANES, as the states are held.

    With BESIDE rows, each thread loads what its rows need itself, and exchanges nothing.
    """
    index = tl.arange(0, LANES)[None, :] + tl.zeros([BESIDE, 1], dtype=tl.int32)
    pieces = ()
    for piece in tl.static_range(PIECES):
        b_x = tl.load(p_row + piece * LANES + index, mask=piece * LANES + index < K, other=0.0)
        pieces = pieces + (b_x,)  # type: ignore[assignment]  # noqa: RUF005
    return pieces


@triton.jit
def _inputs_of_token(
    p_row: tl.tensor,
    head: tl.tensor,
    index_v: tl.tensor,
    mask: tl.tensor,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    LANES: tl.constexpr,
    PIECES: tl.constexpr,
    BESIDE: tl.constexpr,
) -> tl.tuple:
    """Load one head's prepared k, q, rows of v, step size and decays of one token."""
    C: tl.constexpr = 2 * H * K + HV * V
    head_k = head // (HV // H)
    k = _pieces(p_row + (H + head_k) * K, K, LANES, PIECES, BESIDE)
    q = _pieces(p_row + head_k * K, K, LANES, PIECES, BESIDE)
    b_v = tl.load(p_row + 2 * H * K + head * V + index_v, mask=mask, other=0.0)
    beta = tl.load(p_row + C + head)
    if BY_CHANNEL:
        decays = _pieces(p_row + C + HV + head * K, K, LANES, PIECES, BESIDE)
    else:
        decays = (tl.load(p_row + C + HV + head),)
    return k, q, b_v, beta, decays


@triton.jit
def _walk_token(
    states: tl.tuple, inputs: tl.tuple, p_out: tl.tensor, mask: tl.tensor, PIECES: tl.constexpr
) -> tl.tuple:
    """Advance the rows by one token, and store what is read from them."""
    k, q, b_v, beta, decays = inputs
    states = advance_states(states, k, b_v, beta, decays, PIECES)
    tl.store(p_out, read_states(states, q, PIECES).to(p_out.dtype.element_ty), mask=mask)
    return states


@triton.jit
def _walk_tokens_kernel(
    prepared: tl.tensor,
    qkv: tl.tensor,
    conv_state: tl.tensor,
    state: tl.tensor,
    cu_seqlens: tl.tensor,
    initial_indices: tl.tensor,
    state_indices: tl.tensor,
    out: tl.tensor,
    stride_qkv: tl.tensor,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    W: tl.constexpr,
    PIECES: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BESIDE: tl.constexpr,
    LINES: tl.constexpr,
    TOGETHER: tl.constexpr,
    FETCHED: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Walk ROWS rows of one head's state of one sequence through its tokens, or store its
    convolution's state.

    Grid: (V / ROWS times heads, and blocks of CHANNELS channels) times sequences. Registers: the
    rows, in PIECES pieces of LANES columns. Pipeline: inputs are loaded AHEAD tokens before their
    turn, and their LINES of memory are fetched FETCHED tokens before, of TOGETHER tokens at once.
    Programs of channels store the convolution's last inputs, once the launch before has read the
    old ones.
    """
    if EARLY:
        gdc_launch_dependents()
    C: tl.constexpr = 2 * H * K + HV * V
    R: tl.constexpr = C + HV + (HV * K if BY_CHANNEL else HV)
    BLOCKS: tl.constexpr = (V + ROWS - 1) // ROWS
    PARTS: tl.constexpr = BLOCKS * HV + (C + CHANNELS - 1) // CHANNELS
    seq = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    begin = tl.load(cu_seqlens + seq)
    num_new = tl.load(cu_seqlens + seq + 1) - begin
    begin = begin.to(tl.int64)
    if num_new > 0:
        initial = tl.load(initial_indices + seq).to(tl.int64)
        slot = tl.load(state_indices + seq).to(tl.int64)
        if part < BLOCKS * HV:
            head = part // BLOCKS
            index_v = part % BLOCKS * ROWS + tl.arange(0, ROWS)
            mask = index_v < V
            lane = tl.arange(0, LANES)
            # Of constants and the thread alone, so that all its rows lie at constant distances.
            tile = index_v[:, None] * K + lane[None, :]
            p_state = state + (initial * HV + head) * V * K + tile
            states = ()
            for piece in tl.static_range(PIECES):
                inside = mask[:, None] & (piece * LANES + lane < K)[None, :]
                b_s = tl.load(p_state + piece * LANES, mask=inside & (initial != 0), other=0.0)
                states = states + (b_s,)  # type: ignore[assignment]  # noqa: RUF005
            p_out = out + (begin * HV + head) * V + index_v
            p_rows = prepared + begin * R

            if EARLY:
                gdc_wait()
            line = tl.arange(0, LINES * TOGETHER)
            column = _columns(
                line % LINES, head, part % BLOCKS * ROWS, H, HV, K, V, BY_CHANNEL, LANES, PIECES
            )
            for i in tl.static_range(0, FETCHED, TOGETHER):
                token = tl.minimum(num_new - 1, i + line // LINES)
                fetch(p_rows + token.to(tl.int64) * R + column)
            loaded = ()
            for i in tl.static_range(AHEAD):
                p_row = p_rows + tl.minimum(num_new - 1, i) * R
                inputs = _inputs_of_token(
                    p_row, head, index_v, mask, H, HV, K, V, BY_CHANNEL, LANES, PIECES, BESIDE
                )
                loaded = loaded + (inputs,)  # type: ignore[assignment]  # noqa: RUF005
            whole = num_new // AHEAD * AHEAD
            for first in range(0, whole, AHEAD):
                for i in tl.static_range(AHEAD):
                    if FETCHED > 0 and (first + i) % TOGETHER == 0:
                        token = tl.minimum(num_new - 1, first + i + FETCHED + line // LINES)
                        fetch(p_rows + token.to(tl.int64) * R + column)
                    p_row = p_rows + tl.minimum(num_new - 1, first + i + AHEAD).to(tl.int64) * R
                    inputs = _inputs_of_token(
                        p_row, head, index_v, mask, H, HV, K, V, BY_CHANNEL, LANES, PIECES, BESIDE
                    )
                    states = _walk_token(
                        states,
                        loaded[0],  # type: ignore[misc]
                        p_out,
                        mask,
                        PIECES,
                    )
                    loaded = loaded[1:] + (inputs,)  # type: ignore[assignment]  # noqa: RUF005
                    p_out += HV * V
            for i in tl.static_range(AHEAD - 1):
                if whole + i < num_new:
                    states = _walk_token(states, loaded[i], p_out, mask, PIECES)
                    p_out += HV * V
            p_left = state + (slot * HV + head) * V * K + tile
            leave_states(p_left, states, mask & (slot != 0), K, LANES, PIECES, "")
        else:
            channel = (part - BLOCKS * HV) * CHANNELS + tl.arange(0, CHANNELS)
            mask_c = channel < C
            p_old = conv_state + initial * (W - 1) * C + channel
            if EARLY:
                gdc_wait()
            rows = inputs_before(
                qkv + (begin + num_new) * stride_qkv + channel,
                stride_qkv,
                p_old,
                num_new,
                initial != 0,
                mask_c,
                C,
                W,
            )
            tl.debug_barrier()  # all threads of this program have read what is left anew here
            p_inputs = conv_state + slot * (W - 1) * C + channel
            leave_inputs(p_inputs, rows, mask_c & (slot != 0), C, W)
    elif EARLY:
        gdc_wait()
