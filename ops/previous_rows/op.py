"""previous_rows: its declaration and the list of its implementations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import FLOATS_AND_FLOAT64
from torch_hybrid.ops.core.declare import Cpp, Dense, Index, Pool, StatefulOp, define, like
from torch_hybrid.ops.implementations import in_cpp, in_torch

_PACKAGE = "torch_hybrid.ops.previous_rows"

IMPLEMENTATIONS = {
    "cpp": in_cpp(f"{_PACKAGE}._cpu.cpp:previous_rows", dtypes=FLOATS_AND_FLOAT64),
    "torch": in_torch(
        f"{_PACKAGE}._torch:previous_rows", dtypes=FLOATS_AND_FLOAT64, cuda_graph=True
    ),
}


@dataclass(slots=True, repr=False, eq=False)
class PreviousRows(StatefulOp):
    """Rows before those of tokens, of this step or an earlier one; the last rows are kept.

    A slot keeps R of each: those of the sequence's token p at p modulo R, until the token at p + R
    comes. So tokens that turn out not to count are rolled back by the sequence's length alone.

    Args:
        x: [T, D] float dtype, a row for each new token of N sequences, packed.
        tokens: [T] int64, the tokens themselves.
        kept: [S, R, D] in the dtype of x, by slot. **Mutated** at ``state_indices``.
        kept_tokens: [S, R] int64, by slot. **Mutated** there too.
        cu_seqlens: [N + 1] int32 offsets of the sequences in T, from 0. Tokens from
            ``cu_seqlens[N]`` on are padding.
        seq_lens: [N] int32 total lengths, the new tokens included.
        initial_indices: [N] int32 slot that each sequence goes on from; 0: it begins, after zeros.
        state_indices: [N] int32 slot that keeps a sequence's rows, distinct except for 0: those are
            not kept. Where it is another than the initial one, the row before the new ones is
            copied to it, also for a sequence without new tokens.

    Returns:
        [T, D]; rows of padding tokens are 0.
    """

    pool_name: ClassVar[str] = "kept"

    x: Annotated[Tensor, Dense("T", "D")]
    tokens: Annotated[Tensor, Dense("T", dtype=torch.int64)]
    kept: Annotated[Tensor, Pool("R", "D")]
    kept_tokens: Annotated[Tensor, Pool("R", dtype=torch.int64)]
    cu_seqlens: Annotated[Tensor, Index("N + 1")]
    seq_lens: Annotated[Tensor, Index("N")]
    initial_indices: Annotated[Tensor, Index("N")]
    state_indices: Annotated[Tensor, Index("N", counts=True)]

    def check_form(self) -> None:
        """Raise ValueError unless there are rows of floats, and slots of several."""
        x, kept = self.x, self.kept
        if x.ndim != 2 or not x.is_floating_point():
            raise ValueError(f"x must be [T, D] of a float dtype, got {x.dtype} {list(x.shape)}")
        if kept.ndim != 3:
            raise ValueError(f"kept must be [S, R, D], got {list(kept.shape)}")

    def check_indices(self) -> None:
        """Raise ValueError unless all sequences are among the tokens, their slots in the pool, and
        their lengths those of their new tokens at least."""
        StatefulOp.check_indices(self)
        lengths = self.cu_seqlens.diff().tolist()
        for n, (total, new) in enumerate(zip(self.seq_lens.tolist(), lengths, strict=True)):
            if total < new:
                raise ValueError(f"seq_lens must be at least {new} for sequence {n}, got {total}")


previous_rows = define(
    PreviousRows,
    IMPLEMENTATIONS,
    returns=like("x"),
    cpp=Cpp("R=num_kept", {"row_bytes": "x.x.shape[1] * x.x.element_size()"}),
)
