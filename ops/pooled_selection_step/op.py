"""pooled_selection_step: its declaration and the list of its implementations.

Pooling and selection of a decode step in one op: each by itself takes little, and costs as much
again to be called.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from torch_hybrid.ops.composed import COMPOSED, Parts
from torch_hybrid.ops.conv_step import check_lengths
from torch_hybrid.ops.core.capability import FLOATS_AND_FLOAT64
from torch_hybrid.ops.core.declare import TRACED, Dense, Index, Pool, Rows, StatefulOp, define, made
from torch_hybrid.ops.core.page_bounds import PagedOp
from torch_hybrid.ops.gated_pooling.op import GatedPooling
from torch_hybrid.ops.implementations import HALVES, in_torch, in_triton
from torch_hybrid.ops.select_blocks.op import SelectBlocks
from torch_hybrid.ops.step_implementations import EXTEND, composed_of

_PACKAGE = "torch_hybrid.ops.pooled_selection_step"

IMPLEMENTATIONS = {
    "triton": in_triton(
        f"{_PACKAGE}._triton:pooled_selection_step",
        dtypes=HALVES,  # float32's products are no tensor core's, and take a register an element
        limits={"block_size": 64, "index_dim": 128, "num_index_heads": 64},
    ),
    COMPOSED: composed_of(f"{_PACKAGE}._composed:pooled_selection_step"),
    "torch": in_torch(f"{_PACKAGE}._torch:pooled_selection_step", dtypes=FLOATS_AND_FLOAT64),
}


@dataclass(slots=True, repr=False, eq=False)
class PooledSelectionStep(StatefulOp, PagedOp):
    """Best blocks of each query, chosen after the key of a block that is now complete is pooled.

    For sequences of one new token or none it is ``gated_pooling``, and ``select_blocks`` with the
    keys that it makes. N sequences, T tokens, H index heads, blocks of B tokens, P pages of
    ``page_size / B`` blocks each, S slots. Page 0 and slot 0 are nobody's.

    Args:
        q: [T, H, D] index queries, float32, bfloat16 or float16; D contiguous.
        keys: [T, D] of tokens, in q's dtype; rows may lie any distance apart, one row is
            contiguous.
        gates: [T, D], as keys.
        bias: [B, D] of gates, by place in a block; q's dtype, contiguous.
        weights: [T, H] float32, or None: all are 1.
        state: [S, B - 1, 2, D] in q's dtype, contiguous: key and gate of the tokens of a block that
            is not complete. **Mutated** at ``state_indices``, as in ``gated_pooling``.
        block_keys: [P, page_size / B, D] in q's dtype, contiguous. **Mutated**: the rows of the
            blocks that the new tokens complete.
        cu_seqlens: [N + 1] int32, offsets of each sequence's token, from 0: each has one, or none.
            Tokens from ``cu_seqlens[N]`` on are padding.
        seq_lens: [N] int32, total length of each sequence, the new token included.
        initial_indices: [N] int32 slot that has what each sequence left of its last block; 0:
            zeros.
        state_indices: [N] int32 slot that receives what each sequence leaves, distinct except for
            0: that is not stored.
        top_k: most blocks that a query takes.
        impl: name in IMPLEMENTATIONS. "composed" takes sequences of several tokens too.
        parts: of the implementation "composed"; None leaves the choice to it.

    Returns:
        [T, top_k] int32, the chosen blocks of each query by number, rising; -1 where there are
        fewer, and in rows of padding tokens.

    Raises:
        ValueError: a shape, dtype, layout or option is wrong. Or, where reading it is free (on a
            CPU), an index is outside its pool or a sequence has several tokens.

    The indexer of GLM-5.3 in decode.
    """

    q: Annotated[Tensor, Rows("H", "D", last_dim=True)]
    keys: Annotated[Tensor, Rows("D", last_dim=True)]
    gates: Annotated[Tensor, Rows("D", last_dim=True)]
    bias: Annotated[Tensor, Dense("B", "D")]
    weights: Annotated[Tensor | None, Dense("T", "H", dtype="work")]
    state: Annotated[Tensor, Pool("B - 1", "2", "D")]
    block_keys: Annotated[Tensor, Pool("K", "D", size="P")]
    cu_seqlens: Annotated[Tensor, Index("N + 1")]
    seq_lens: Annotated[Tensor, Index("N")]
    page_table: Annotated[Tensor, Index("N", "M", counts=True, last_dim=True)]
    slot_mapping: Annotated[Tensor, Index("T")]
    initial_indices: Annotated[Tensor, Index("N")]
    state_indices: Annotated[Tensor, Index("N")]
    top_k: int = field(kw_only=True)
    parts: Annotated[Parts | None, TRACED] = field(default=None, kw_only=True)

    def check(self) -> None:
        """Raise ValueError unless queries take blocks."""
        if self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")

    def check_indices(self) -> None:
        """Raise ValueError unless all sequences are among the tokens, of one or none, and in pages
        and slots of the pools."""
        self.check_pages(
            num_pages=self.block_keys.shape[0],
            page_size=self.block_keys.shape[1] * self.bias.shape[0],
        )
        StatefulOp.check_indices(self)
        if not self.implementations[self.impl].capability.features >= EXTEND:
            check_lengths(self.cu_seqlens)

    def pooling(self) -> GatedPooling:
        """Make the first part: keys of blocks."""
        return GatedPooling(
            self.keys,
            self.gates,
            self.bias,
            self.state,
            self.cu_seqlens,
            self.seq_lens,
            self.initial_indices,
            self.state_indices,
            impl=self.impl,
        )

    def selection(self, pooled: Tensor, impl: str | None = None) -> SelectBlocks:
        """Make the second part, of the keys that the first one pooled."""
        return SelectBlocks(
            self.q,
            pooled,
            self.weights,
            self.block_keys,
            self.cu_seqlens,
            self.seq_lens,
            self.page_table,
            self.slot_mapping,
            block_size=self.bias.shape[0],
            top_k=self.top_k,
            impl=impl or self.impl,
        )

    def new_chosen(self) -> Tensor:
        """Make an empty result."""
        return self.q.new_empty((self.q.shape[0], self.top_k), dtype=torch.int32)


pooled_selection_step = define(
    PooledSelectionStep,
    IMPLEMENTATIONS,
    returns=made(PooledSelectionStep.new_chosen),
    limited={"block_size": "B", "index_dim": "D", "num_index_heads": "H"},
    names_ndim=True,
    flops="2 * T * H * D * M * K",
)
