"""ngram_embedding: its declaration and the list of its implementations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import FLOATS_AND_FLOAT64
from torch_hybrid.ops.core.declare import Cpp, Dense, Index, Pool, StatefulOp, define, made
from torch_hybrid.ops.implementations import INVARIANT, in_cpp, in_torch, in_triton

_PACKAGE = "torch_hybrid.ops.ngram_embedding"

IMPLEMENTATIONS = {
    "cpp": in_cpp(
        f"{_PACKAGE}._cpu.cpp:ngram_embedding", dtypes=FLOATS_AND_FLOAT64, features=INVARIANT
    ),
    "triton": in_triton(f"{_PACKAGE}._triton:ngram_embedding", features=INVARIANT),
    "torch": in_torch(f"{_PACKAGE}._torch:ngram_embedding", dtypes=FLOATS_AND_FLOAT64),
}


@dataclass(slots=True, repr=False, eq=False)
class NgramEmbedding(StatefulOp):
    """Rows of a table that hashes of each token's n-grams name, one after the other.

    For every m from 2 to n, the m tokens that end at token t are hashed to ``h = xor_i
    multipliers[i] * token[t - i]``. Each of the E heads of that order reads row ``offset + h mod
    size``. An n-gram does not reach across ``eos``: from the nearest eos before t backwards,
    and before the start of a sequence, ``eos`` stands in the place of tokens.

    Args:
        tokens: [T] int64, the new tokens of N sequences, packed.
        table: [R, D] float dtype, contiguous; on the tokens' device, or in pinned memory of the
            host.
        multipliers: [n] int64, of the tokens 0, 1, ... back; n from 2 on.
        head_sizes: [(n - 1) * E] int64, positive; the heads of order 2 first.
        head_offsets: the same, where a head's rows begin.
        history: [S, n - 1] int64, the last tokens of each sequence, oldest first. **Mutated**: slot
            ``state_indices[i]`` receives those of sequence i; no other slot is written.
        initial_indices: [N] int32 slot that each sequence goes on from; 0: it begins.
        state_indices: [N] int32 slot that receives the last tokens of each sequence, distinct
            except for 0: these are not stored.
        eos: the token that ends a text.

    Returns:
        [T, (n - 1) * E * D] in the table's dtype; rows of padding tokens are 0.

    The per-layer embeddings of Qwen4-Exp.
    """

    pool_name: ClassVar[str] = "history"

    tokens: Annotated[Tensor, Dense("T", dtype=torch.int64)]
    table: Annotated[Tensor, Dense("R", "D")]
    multipliers: Annotated[Tensor, Dense("order", dtype=torch.int64)]
    head_sizes: Annotated[Tensor, Dense("H", dtype=torch.int64)]
    head_offsets: Annotated[Tensor, Dense("H", dtype=torch.int64)]
    history: Annotated[Tensor, Pool("order - 1", dtype=torch.int64)]
    cu_seqlens: Annotated[Tensor, Index("N + 1")]
    initial_indices: Annotated[Tensor, Index("N")]
    state_indices: Annotated[Tensor, Index("N", counts=True)]
    eos: int = field(kw_only=True)

    def check_form(self) -> None:
        """Raise ValueError unless the table has rows of floats."""
        table = self.table
        if table.ndim != 2 or not table.is_floating_point():
            raise ValueError(
                f"table must be [rows, dim] of a float dtype, got {table.dtype} {list(table.shape)}"
            )

    def check(self) -> None:
        """Raise ValueError unless each order of n-grams has as many heads."""
        order, num_heads = len(self.multipliers), len(self.head_sizes)
        if order < 2 or num_heads % (order - 1):
            raise ValueError(
                f"heads must be as many for each of the {order - 1} orders of n-grams, at least "
                f"one of them, got {num_heads}"
            )

    def check_indices(self) -> None:
        """Raise ValueError unless all heads are within the table, all sequences among the tokens
        and their slots in the pool."""
        firsts = self.head_offsets.tolist()
        for head, (size, first) in enumerate(zip(self.head_sizes.tolist(), firsts, strict=True)):
            if size < 1 or first < 0 or first + size > len(self.table):
                raise ValueError(
                    f"head {head} must have rows within the {len(self.table)} of the table, got "
                    f"{size} from {first} on"
                )
        StatefulOp.check_indices(self)

    def empty(self) -> Tensor:
        """Make the result, not filled yet."""
        shape = (self.tokens.shape[0], self.head_sizes.shape[0] * self.table.shape[1])
        return self.tokens.new_empty(shape, dtype=self.table.dtype)


ngram_embedding = define(
    NgramEmbedding,
    IMPLEMENTATIONS,
    returns=made(NgramEmbedding.empty),
    cpp=Cpp(
        "R=num_rows H=num_heads",
        {
            "row_bytes": "x.table.shape[1] * x.table.element_size()",
            "num_back": "x.history.shape[1]",
        },
    ),
)
