# mypy: disable-error-code="untyped-decorator"
"""The causal convolution of one token: a channel's last inputs, its filter, and its result.

The inputs before the token are a state ``[S, W - 1, C]``, oldest first, which moves up by one in
place. Who stores a channel's must know that all who read them have.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def last_inputs(p_state: tl.tensor, mask: tl.tensor, C: tl.constexpr, W: tl.constexpr) -> tl.tuple:
    """The W - 1 rows of channels in a convolution's state, oldest first; zeros where masked."""
    rows = ()
    for row in tl.static_range(W - 1):
        b_x = tl.load(p_state + row * C, mask=mask, other=0.0)
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
    """The filters of channels, tap by tap, and after them their biases."""
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
    """The convolution and activation of one token, rounded to the dtype of its input."""
    b_y = taps[W].to(tl.float32)
    for tap in tl.static_range(W - 1):
        b_y += past[tap].to(tl.float32) * taps[tap].to(tl.float32)
    b_y += b_x.to(tl.float32) * taps[W - 1].to(tl.float32)
    if SILU:
        b_y = b_y / (1.0 + tl.exp(-b_y))
    return b_y.to(b_x.dtype).to(tl.float32)
