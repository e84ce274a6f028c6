"""States of a head in pieces of a few columns, and vectors that are read from them, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

# Columns of a piece of a state, which stand side by side in a warp: eight threads hold a row.
PIECE = 32


@triton.jit
def pieces_of_row(
    p_row: tl.tensor, K: tl.constexpr, LANES: tl.constexpr, PIECES: tl.constexpr
) -> tl.tuple:
    """Load a vector along K in pieces of LANES, as the states are held."""
    lane = tl.arange(0, LANES)
    pieces = ()
    for piece in tl.static_range(PIECES):
        index = piece * LANES + lane
        b_x = tl.load(p_row + index, mask=index < K, other=0.0).to(tl.float32)[None, :]
        pieces = pieces + (b_x,)  # type: ignore[assignment]  # noqa: RUF005
    return pieces


@triton.jit
def load_states(
    p_state: tl.tensor,
    mask: tl.tensor,
    K: tl.constexpr,
    LANES: tl.constexpr,
    PIECES: tl.constexpr,
    PASSING: tl.constexpr,
) -> tl.tuple:
    """Load rows of a head's state; ``PASSING`` says what the caches do with them."""
    lane = tl.arange(0, LANES)
    states = ()
    for piece in tl.static_range(PIECES):
        inside = mask[:, None] & (piece * LANES + lane < K)[None, :]
        b_s = tl.load(p_state + piece * LANES, mask=inside, other=0.0, eviction_policy=PASSING)
        states = states + (b_s,)  # type: ignore[assignment]  # noqa: RUF005
    return states


@triton.jit
def read_states(states: tl.tuple, parts: tl.tuple, PIECES: tl.constexpr) -> tl.tensor:
    """Multiply rows of a head's state by a vector, both in pieces."""
    read = tl.zeros_like(states[0])
    for piece in tl.static_range(PIECES):
        read = tl.fma(states[piece], tl.broadcast_to(parts[piece], read.shape), read)
    return tl.sum(read, 1)


@triton.jit
def leave_states(
    p_left: tl.tensor,
    states: tl.tuple,
    mask: tl.tensor,
    K: tl.constexpr,
    LANES: tl.constexpr,
    PIECES: tl.constexpr,
    PASSING: tl.constexpr,
) -> None:
    """Store rows of a head's state."""
    lane = tl.arange(0, LANES)
    for piece in tl.static_range(PIECES):
        inside = mask[:, None] & (piece * LANES + lane < K)[None, :]
        tl.store(p_left + piece * LANES, states[piece], mask=inside, eviction_policy=PASSING)
