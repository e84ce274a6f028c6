"""Open chunks: how a recurrence's step keeps the tokens since a state was stored.

A slot's state is that after some token; records hold what the tokens since then, the open chunk,
have added to it: a key, a value, and a decay. A decode step reads the state and the records, and
adds a record. Only each ``OPEN_TOKENS``-th step stores a state: so a token moves half the bytes,
and a little more.

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

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Self

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import NO_FEATURES
from torch_hybrid.ops.core.declare import Pool
from torch_hybrid.ops.step_implementations import OPEN
from torch_hybrid.ops.verify import StepOp

OPEN_TOKENS = 8  # of a chunk, when its state is stored
RING = OPEN_TOKENS + 1
_LEAST_WIDTH = 128  # of a row, for the rows of a block
_ALIGNED = 32  # numbers: rows of slots begin at as many


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLayout:
    """Layout of a rule's records.

    Attributes:
        numbers: numbers of a state that a program of two warps has, as measured.
        by_channel: whether each channel of K has its own decay.
    """

    numbers: int
    by_channel: bool = False

    def rows(self, head_dim_v: int, head_dim_k: int) -> int:
        """Count the rows of a head's state that one program has: a power of 2."""
        width = max(_LEAST_WIDTH, 1 << (head_dim_k - 1).bit_length())
        return min(max(1, self.numbers // width), 1 << (head_dim_v - 1).bit_length())

    def size(self, num_k_heads: int, state_shape: tuple[int, ...]) -> int:
        """Count the numbers R of a slot's records; a state has the shape [HV, V, K]."""
        num_v_heads, head_dim_v, head_dim_k = state_shape
        rows = self.rows(head_dim_v, head_dim_k)
        num_blocks = -(-head_dim_v // rows)
        num_decays = head_dim_k if self.by_channel else 1
        of_head = num_blocks * (RING * rows + 1) + 2 * RING * num_decays
        size = num_k_heads * RING * head_dim_k + num_v_heads * of_head
        return -(-size // _ALIGNED) * _ALIGNED


# Of states that a token corrects by what it reads there, and of those that it adds to.
CORRECTED = ChunkLayout(numbers=8192)
CORRECTED_BY_CHANNEL = ChunkLayout(numbers=8192, by_channel=True)
ADDED = ChunkLayout(numbers=4096)


@dataclass(slots=True, repr=False, eq=False)
class OpenStep(StepOp):
    """Step of a recurrence that may keep a chunk of each sequence open: base of its ops.

    An op has a pool of states [S, HV, V, K], and says how many heads of keys there are.

    Args:
        chunk: [S, R] float32 records of tokens since states were stored, R as ``layout.size``
            says; None stores states in each call. **Mutated**: slots ``state_indices``. A slot's
            state is then that of ``state`` and its records together. Not with drafts. A call with
            no token at all (T = 0) closes chunks: those slots of all pools receive what sequences
            start from, and have no records, as other ops read them.

    Attributes:
        per_token: fields with a row for each token; they may be None.
        layout: of ``chunk``.
    """

    per_token: ClassVar[tuple[str, ...]]
    layout: ClassVar[ChunkLayout]

    chunk: Annotated[Tensor | None, Pool("R_", dtype=torch.float32)] = field(
        default=None, kw_only=True
    )

    @property
    def num_k_heads(self) -> int:
        """Heads of keys, each of which heads of values share."""
        raise NotImplementedError

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Heads HV of values, and the sizes V and K of one head's state."""
        num_v_heads, head_dim_v, head_dim_k = getattr(self, self.pool_name).shape[1:]
        return num_v_heads, head_dim_v, head_dim_k

    @property
    def chunk_width(self) -> int:
        """Numbers R of a slot's records."""
        return self.layout.size(self.num_k_heads, self.state_shape)

    def check_ndims(self, **ndims: int) -> None:
        """Raise ValueError for the first of these fields with another number of dimensions."""
        for name, ndim in ndims.items():
            if (x := getattr(self, name)).ndim != ndim:
                raise ValueError(f"{name} must have {ndim} dimensions, got {list(x.shape)}")

    def features(self) -> frozenset[str]:
        """List what an implementation must have, for drafts and for open chunks."""
        return StepOp.features(self) | (NO_FEATURES if self.chunk is None else OPEN)

    def check(self) -> None:
        """Raise ValueError for records without counts, and for a chunk of another size or in a step
        that verifies drafts."""
        StepOp.check(self)
        if self.chunk is None:
            return
        if self.records is not None:
            raise ValueError("chunk must be None in a step that verifies drafts, got a tensor")
        if (width := self.chunk.shape[1]) != self.chunk_width:
            raise ValueError(f"chunk must have {self.chunk_width} numbers a slot, got {width}")

    def without_tokens(self) -> Self:
        """Give the same step of no token at all: with ``chunk``, it closes chunks."""
        rows = {name: getattr(self, name) for name in self.per_token}
        none: dict[str, Any] = {name: x[:0] for name, x in rows.items() if x is not None}
        none["cu_seqlens"] = torch.zeros_like(self.cu_seqlens)
        return replace(self, **none)
