"""lora: its declaration and the list of its implementations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from torch_hybrid.ops.core.capability import FLOATS_AND_FLOAT64
from torch_hybrid.ops.core.declare import Cpp, Dense, Index, Op, Rows, define, made
from torch_hybrid.ops.implementations import INVARIANT, in_cpp, in_torch, in_triton

_PACKAGE = "torch_hybrid.ops.lora"

IMPLEMENTATIONS = {
    "cpp": in_cpp(f"{_PACKAGE}._cpu.cpp:lora", features=INVARIANT),
    "triton": in_triton(f"{_PACKAGE}._triton:lora", features=INVARIANT),
    "torch": in_torch(f"{_PACKAGE}._torch:lora", dtypes=FLOATS_AND_FLOAT64, cuda_graph=True),
}


@dataclass(slots=True, repr=False, eq=False)
class Lora(Op):
    """Outputs of a linear layer, with the low-rank product of each row's own adapter added.

    The layer may be several layers side by side, its parts. Part p has the columns from
    ``starts[p]`` to ``starts[p + 1]``, and an adapter may have factors of its own for each. With
    the adapter s of row t (``slots[t] - 1``), a column c of part p, and sums over ranks
    r < ``ranks[s, p]``::

        out[t, c] = base[t, c] + sum_r b[s, r, c] (sum_i a[s, p, r, i] x[t, i])

    Both sums are float32, of float64 tensors float64. The result is rounded once.

    Args:
        base: [T, N] float, the layer's outputs without adapters; rows may lie any distance apart.
        x: [T, K] the layer's inputs, in base's dtype; rows may lie any distance apart.
        a: [S, P, R, K] first factors of S adapters, in base's dtype.
        b: [S, R, N] second factors, transposed and scaled, in base's dtype.
        ranks: [S, P] int32 ranks of the adapters' factors, at most R. What lies past them is not
            read.
        starts: [P + 1] int32 first column of each part, from 0 to N.
        slots: [T] int32 adapter of each row, from 1; 0: the row has none.

    Returns:
        [T, N] in base's dtype. A row without an adapter, or with one of rank 0, has base's bits.
        But with "torch" a row has the bits that it has alone.

    Low-rank adaptation (arXiv 2106.09685), as multi-tenant servers compute it (arXiv 2310.18547).
    """

    base: Annotated[Tensor, Rows("N")]
    x: Annotated[Tensor, Rows("K")]
    a: Annotated[Tensor, Dense("S", "P", "R", "K")]
    b: Annotated[Tensor, Dense("S", "R", "N")]
    ranks: Annotated[Tensor, Index("S", "P")]
    starts: Annotated[Tensor, Index("P + 1")]
    slots: Annotated[Tensor, Index("T")]

    def check_indices(self) -> None:
        """Raise ValueError unless slots, ranks and columns are within the factors."""
        num_slots, _, rank, _ = self.a.shape
        for name, values, most in (("slots", self.slots, num_slots), ("ranks", self.ranks, rank)):
            if values.numel() and (int(values.min()) < 0 or int(values.max()) > most):
                raise ValueError(
                    f"{name} must be within 0 and {most}, got {int(values.min())} to "
                    f"{int(values.max())}"
                )
        starts, width = self.starts.tolist(), self.base.shape[1]
        if starts[0] != 0 or starts[-1] != width or starts != sorted(starts):
            raise ValueError(f"starts must ascend from 0 to {width}, got {starts}")

    def empty(self) -> Tensor:
        """Make the result, not filled yet."""
        return self.base.new_empty(self.base.shape)


lora = define(
    Lora,
    IMPLEMENTATIONS,
    returns=made(Lora.empty),
    floats=frozenset(),
    flops="2 * T * R * (P * K + N)",
    cpp=Cpp("T N K S P R"),
)
