"""gated_pooling: its declaration and the list of its implementations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from torch_hybrid.ops.core.capability import FLOATS_AND_FLOAT64
from torch_hybrid.ops.core.declare import Cpp, Dense, Index, Pool, Rows, StatefulOp, define, like
from torch_hybrid.ops.implementations import INVARIANT, in_cpp, in_torch, in_triton

_PACKAGE = "torch_hybrid.ops.gated_pooling"

IMPLEMENTATIONS = {
    "cpp": in_cpp(f"{_PACKAGE}._cpu.cpp:gated_pooling", features=INVARIANT),
    "triton": in_triton(
        f"{_PACKAGE}._triton:gated_pooling", limits={"block_size": 64}, features=INVARIANT
    ),
    "torch": in_torch(f"{_PACKAGE}._torch:gated_pooling", dtypes=FLOATS_AND_FLOAT64),
}


@dataclass(slots=True, repr=False, eq=False)
class GatedPooling(StatefulOp):
    """Mean of the keys of each block of tokens that is now complete, channel by channel, with the
    softmax of their gates for weights.

    A sequence's tokens are cut into blocks of B. With i from 0 to B - 1 over the tokens of a
    block, ``out = sum_i softmax_i(gate_i + bias_i) * key_i`` in float32. N sequences, their T new
    tokens packed; S slots, of which 0 is nobody's.

    Args:
        keys: [T, D] float dtype; rows may lie any distance apart, one row is contiguous.
        gates: [T, D], as keys.
        bias: [B, D] in the keys' dtype, contiguous.
        state: [S, B - 1, 2, D] in the keys' dtype, contiguous: key and gate of the tokens of a
            block that is not complete, by their places in it. **Mutated**: slot
            ``state_indices[n]`` receives those of sequence n; where it has no such tokens, and in
            rows of others, it stays as it is.
        seq_lens: [N] int32, total length of each sequence, new tokens included.
        initial_indices: [N] int32 slot that has what each sequence left of its last block; 0:
            zeros.
        state_indices: [N] int32 slot that receives what each sequence leaves, distinct except for
            0: that is not stored.

    Returns:
        [T, D] in the keys' dtype: the key of the block that a token is the last of, and 0 for other
        tokens.

    The pooled keys of GLM-5.3's indexer.
    """

    keys: Annotated[Tensor, Rows("D")]
    gates: Annotated[Tensor, Rows("D")]
    bias: Annotated[Tensor, Dense("B", "D")]
    state: Annotated[Tensor, Pool("B - 1", "2", "D")]
    cu_seqlens: Annotated[Tensor, Index("N + 1")]
    seq_lens: Annotated[Tensor, Index("N")]
    initial_indices: Annotated[Tensor, Index("N")]
    state_indices: Annotated[Tensor, Index("N", counts=True)]

    def check_indices(self) -> None:
        """Raise ValueError unless all sequences are among the tokens, as long as these at least,
        and their slots in the pool."""
        StatefulOp.check_indices(self)
        num_new = self.cu_seqlens.diff().tolist()
        for n, (new, length) in enumerate(zip(num_new, self.seq_lens.tolist(), strict=True)):
            if length < new:
                raise ValueError(
                    f"seq_lens[{n}] must be at least its {new} new tokens, got {length}"
                )


gated_pooling = define(
    GatedPooling,
    IMPLEMENTATIONS,
    returns=like("keys"),
    limited={"block_size": "B"},
    cpp=Cpp("D=dim B=block_size"),
)
