"""select_blocks: its declaration and the list of its implementations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import FLOATS_AND_FLOAT64
from torch_hybrid.ops.core.declare import Cpp, Dense, Index, Pool, Rows, define, made
from torch_hybrid.ops.core.page_bounds import PagedOp
from torch_hybrid.ops.implementations import INVARIANT, in_cpp, in_torch, in_triton, invariant

_PACKAGE = "torch_hybrid.ops.select_blocks"

_TRITON = in_triton(f"{_PACKAGE}._triton:select_blocks", limits={"index_dim": 256})
IMPLEMENTATIONS = {
    "cpp": in_cpp(
        f"{_PACKAGE}._cpu.cpp:select_blocks", multiples={"index_dim": 16}, features=INVARIANT
    ),
    "triton": _TRITON,
    "triton_invariant": invariant(_TRITON),
    "torch": in_torch(f"{_PACKAGE}._torch:select_blocks", dtypes=FLOATS_AND_FLOAT64),
}


@dataclass(slots=True, repr=False, eq=False)
class SelectBlocks(PagedOp):
    """Best blocks of each query, chosen after the keys of blocks that are now complete are written.

    A sequence's tokens are cut into blocks of ``block_size``. A query at position p may choose
    among the ``(p + 1) // block_size`` blocks that end at p or before; block b has the score
    ``sum_h weights[h] * relu(q[h] . key_b)`` in float32. Of equal scores the earlier block is
    taken. N sequences, their T new tokens packed, H index heads, P pages of ``page_size /
    block_size`` blocks each. Page 0 is null: it is neither read nor written. Tokens from
    ``cu_seqlens[N]`` on are padding.

    Args:
        q: [T, H, D] index queries, float32, bfloat16 or float16; D contiguous.
        keys: [T, D] in q's dtype: the key of the block that a token is the last of. Those of
            other tokens are not read.
        weights: [T, H] float32, or None: all are 1.
        block_keys: [P, page_size / block_size, D] in q's dtype, contiguous. **Mutated**: the rows
            of the blocks that the new tokens complete.
        block_size: tokens in a block; it divides a page.
        top_k: most blocks that a query takes.

    Returns:
        [T, top_k] int32, the chosen blocks of each query by number, rising; -1 where there are
        fewer, and in rows of padding tokens.

    It is the token indexer of Qwen4-Exp: one key for each block, the mean of its tokens' keys. It
    is that of GLM-5.3 too: ``weights``, and keys that are pooled by gates.
    """

    q: Annotated[Tensor, Rows("H", "D", last_dim=True)]
    keys: Annotated[Tensor, Rows("D", last_dim=True)]
    weights: Annotated[Tensor | None, Dense("T", "H", dtype="work")]
    block_keys: Annotated[Tensor, Pool("B", "D")]
    cu_seqlens: Annotated[Tensor, Index("N + 1")]
    seq_lens: Annotated[Tensor, Index("N")]
    page_table: Annotated[Tensor, Index("N", "M", counts=True, last_dim=True)]
    slot_mapping: Annotated[Tensor, Index("T")]
    block_size: int = field(kw_only=True)
    top_k: int = field(kw_only=True)

    def check(self) -> None:
        """Raise ValueError unless blocks have tokens, and queries take some."""
        if self.block_size < 1 or self.top_k < 1:
            raise ValueError(
                f"block_size and top_k must be at least 1, got {self.block_size} and {self.top_k}"
            )

    def check_indices(self) -> None:
        """Raise ValueError unless all sequences are among the tokens, and in pages of the pool."""
        self.check_pages(
            num_pages=self.block_keys.shape[0], page_size=self.block_keys.shape[1] * self.block_size
        )

    def new_chosen(self) -> Tensor:
        """Make an empty result."""
        return self.q.new_empty((self.q.shape[0], self.top_k), dtype=torch.int32)


select_blocks = define(
    SelectBlocks,
    IMPLEMENTATIONS,
    returns=made(SelectBlocks.new_chosen),
    limited={"index_dim": "D"},
    names_ndim=True,
    flops="2 * T * H * D * M * B",
    cpp=Cpp(
        "S=num_pages H=num_heads D=index_dim",
        {
            "page_size": "x.block_keys.shape[1] * x.block_size",
            "key_token": "x.keys.stride(0)",
        },
    ),
)
