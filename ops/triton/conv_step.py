"""The causal convolution of one token: a channel's last inputs, its filter, and its result.

And what a step that verifies drafts leaves of a sequence's inputs.

The inputs before the token are a state ``[S, W - 1, C]``, oldest first, which moves up by one in
place. Who stores a channel's must know that all who read them have.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def last_inputs(p_state: tl.tensor, mask: tl.tensor, C: tl.constexpr, W: tl.constexpr) -> tl.tuple:
    """Load the W - 1 rows of channels in a convolution's state, oldest first; masked channels are
    0."""
    rows = ()
    for row in tl.static_range(W - 1):
        b_x = tl.load(p_state + row * C, mask=mask, other=0.0)
        rows = rows + (b_x,)  # type: ignore[assignment]  # noqa: RUF005
    return rows


@triton.jit
def inputs_before(
    p_x: tl.tensor,
    stride: tl.tensor,
    p_state: tl.tensor,
    place: tl.tensor,
    known: tl.tensor,
    mask: tl.tensor,
    C: tl.constexpr,
    W: tl.constexpr,
) -> tl.tuple:
    """Load the W - 1 rows of channels before token ``place`` of a sequence, which lies at ``p_x``.

    Rows before the sequence's first token come from the convolution's state; 0 unless ``known``.
    """
    rows = ()
    for row in tl.static_range(W - 1):
        i = place - (W - 1) + row
        p_row = tl.where(i < 0, p_state + (W - 1 + i) * C, p_x - (W - 1 - row) * stride)
        b_x = tl.load(p_row, mask=mask & (known | (i >= 0)), other=0.0)
        rows = rows + (b_x,)  # type: ignore[assignment]  # noqa: RUF005
    return rows


@triton.jit
def leave_inputs(
    p_state: tl.tensor, rows: tl.tuple, mask: tl.tensor, C: tl.constexpr, W: tl.constexpr
) -> None:
    """Store the rows of a convolution's state."""
    for row in tl.static_range(W - 1):
        tl.store(p_state + row * C, rows[row], mask=mask)


@triton.jit
def taps(
    weight: tl.tensor,
    bias: tl.tensor | None,
    channel: tl.tensor,
    mask: tl.tensor,
    W: tl.constexpr,
) -> tl.tuple:
    """Load the W filter taps of channels, oldest first, and after them the biases (0 if there are
    none)."""
    taps = ()
    for tap in tl.static_range(W):
        b_w = tl.load(weight + channel * W + tap, mask=mask, other=0.0)
        taps = taps + (b_w,)  # type: ignore[assignment]  # noqa: RUF005
    if bias is not None:
        b_bias = tl.load(bias + channel, mask=mask, other=0.0)
        return taps + (b_bias,)  # noqa: RUF005
    return taps + (tl.zeros_like(taps[0]),)  # type: ignore[misc]  # noqa: RUF005


@triton.jit
def convolve(
    past: tl.tuple, b_x: tl.tensor, taps: tl.tuple, W: tl.constexpr, SILU: tl.constexpr
) -> tl.tensor:
    """Convolve one token's channels and activate them, in float32, rounded to the input's dtype."""
    b_y = taps[W].to(tl.float32)
    for tap in tl.static_range(W - 1):
        b_y = tl.fma(past[tap].to(tl.float32), taps[tap].to(tl.float32), b_y)
    b_y = tl.fma(b_x.to(tl.float32), taps[W - 1].to(tl.float32), b_y)
    if SILU:
        b_y = b_y / (1.0 + tl.exp(-b_y))
    return b_y.to(b_x.dtype).to(tl.float32)


@triton.jit
def leave_channels(
    p_old: tl.tensor,
    p_replayed: tl.tensor,
    p_new: tl.tensor,
    p_left: tl.tensor,
    p_drafts: tl.tensor,
    known: tl.tensor,
    num_replayed: tl.tensor,
    num_new: tl.tensor,
    stride_new: tl.tensor,
    mask: tl.tensor,
    C: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
) -> None:
    """Store a sequence's last committed inputs, and records of its drafts.

    Its inputs are, in this order:

    - the state at ``p_old``, zeros unless ``known``;
    - the accepted records at ``p_replayed``, rows R apart;
    - the tokens at ``p_new``: a committed one, and drafts.

    No other program may read or write these channels.
    """
    first = num_replayed + tl.minimum(num_new, 1) - (W - 1)
    rows = ()
    for row in tl.static_range(W - 1):
        i = first + row
        p_row = tl.where(i < num_replayed, p_replayed + i * R, p_new)
        p_row = tl.where(i < 0, p_old + (W - 1 + i) * C, p_row)
        b_x = tl.load(p_row, mask=mask & (known | (i >= 0)), other=0.0)
        rows = rows + (b_x,)  # type: ignore[assignment]  # noqa: RUF005
    tl.debug_barrier()  # all threads of this program have read what is left anew here
    leave_inputs(p_left, rows, mask, C, W)
    for i in range(1, num_new):
        tl.store(p_drafts + (i - 1) * R, tl.load(p_new + i * stride_new, mask=mask), mask=mask)
