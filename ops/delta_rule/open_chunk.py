"""Open chunks: how a delta rule's step keeps the tokens since a state was stored.

A slot's state is that after some token; records hold what the tokens since then, the open chunk,
have added to it: a unit key, a corrected value, and a decay. A decode step reads the state and the
records, and adds a record. Only each ``OPEN_TOKENS``-th step stores a state: so a token moves half
the bytes, and a little more.

    S = S_0 D + sum_j u_j (w_j k_j)^T,   D = product of all decays, w_j = product of those after j

A slot's records are one row of float32 numbers ``[R]``, in this order. There is room for one more
than a chunk has, since a step that stores a state writes a record while others are read:

    keys     [H, RING, K]
    values   [HV, BLOCKS, RING, ROWS]   the rows of a state that a program has
    decays   [HV, RING, K]              or [HV, RING], where all channels decay alike
    totals   as decays                  products from the chunk's first token on
    marks    [HV, BLOCKS]               2 RING first + count: the chunk's first record, and how many
"""

from __future__ import annotations

OPEN_TOKENS = 8  # of a chunk, when its state is stored
RING = OPEN_TOKENS + 1
_ROWS = 64  # of a state, which a program has at most
_ALIGNED = 32  # numbers: rows of slots begin at as many


def rows_of_block(head_dim_v: int) -> int:
    """Count the rows of a head's state that one program has: a power of 2."""
    return min(_ROWS, 1 << (head_dim_v - 1).bit_length())


def open_chunk_size(
    num_k_heads: int, num_v_heads: int, head_dim_k: int, head_dim_v: int, *, by_channel: bool
) -> int:
    """Count the numbers R of a slot's records."""
    rows = rows_of_block(head_dim_v)
    num_blocks = -(-head_dim_v // rows)
    of_head = num_blocks * (RING * rows + 1) + 2 * RING * (head_dim_k if by_channel else 1)
    size = num_k_heads * RING * head_dim_k + num_v_heads * of_head
    return -(-size // _ALIGNED) * _ALIGNED
