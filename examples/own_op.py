"""An op of your own, declared once: its fields are its arguments.

From the fields follow the schema that says what is mutated, the checks, the fake that the compiler
traces, and a function with your docstring. ``check`` and ``check_indices`` refuse what no kind of
field can; further implementations are further entries of ``define``.
"""

import inspect
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor
from torch.export import Dim

from torch_hybrid.ops.core.capability import Capability, Implementation
from torch_hybrid.ops.core.declare import Dense, Index, Pool, Rows, StatefulOp, define, like


@dataclass(slots=True)
class DecayingSum(StatefulOp):
    """Sum of the rows of each sequence up to and with each one, earlier ones decayed.

    Args:
        x: rows [T, D] of all sequences, one after the other.
        decay: factor [D] of what is there, for each row.
        state: slots [S, D]; mutated. Slot 0 is zeros at a start, and stores nothing.
        cu_seqlens: where sequences begin and end in x [N + 1].
        initial_indices: slots [N] that sequences go on from.
        state_indices: slots [N] that they write.
        scale: factor of the result.

    Returns:
        [T, D]; 0 in rows of no sequence.
    """

    x: Annotated[Tensor, Rows("D")]
    decay: Annotated[Tensor, Dense("D")]
    state: Annotated[Tensor, Pool("D", dtype=torch.float32)]
    cu_seqlens: Annotated[Tensor, Index("N + 1")]
    initial_indices: Annotated[Tensor, Index("N")]
    state_indices: Annotated[Tensor, Index("N", counts=True)]
    scale: float = field(default=1.0, kw_only=True)


def in_torch(x: DecayingSum) -> Tensor:
    """Compute the op, one row after the other."""
    out = torch.zeros_like(x.x)
    ends = x.cu_seqlens.tolist()
    for n, (start, slot) in enumerate(zip(x.initial_indices, x.state_indices, strict=True)):
        total = x.state[start] * (start > 0)
        for row in range(ends[n], ends[n + 1]):
            total = total * x.decay + x.x[row]
            out[row] = total * x.scale
        if slot and ends[n] < ends[n + 1]:
            x.state[slot] = total
    return out


CPU = Capability(
    devices=frozenset({"cpu"}), dtypes=frozenset({torch.float32}), available=lambda: None
)
decaying_sum = define(
    DecayingSum,
    {"torch": Implementation(capability=CPU, launcher=in_torch)},
    returns=like("x"),
)


class Layer(torch.nn.Module):
    """Use of the op in a model."""

    def forward(self, *given: Tensor) -> Tensor:
        """Sum, then square."""
        return decaying_sum(*given, scale=0.5, impl="torch") ** 2


def arguments(*lengths: int) -> tuple[Tensor, ...]:
    """Make inputs of sequences that begin, and one that goes on from slot 1."""
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    slots = torch.arange(1, len(lengths) + 1).int()
    starts = slots * (slots == 1)
    return torch.randn(int(ends[-1]), 8), torch.rand(8), torch.ones(9, 8), ends, starts, slots


def main() -> None:
    """Print what follows from the fields, and run the op eagerly, compiled and exported."""
    print(torch.ops.torch_hybrid.decaying_sum.default._schema)
    print(f"decaying_sum{inspect.signature(decaying_sum)}: {inspect.getdoc(decaying_sum)}")
    try:
        decaying_sum(torch.ones(3, 8), torch.ones(7), *arguments(3)[2:], impl="torch")
    except ValueError as error:
        print(f"refused: {error}")

    given = arguments(3, 4)
    torch.library.opcheck(
        torch.ops.torch_hybrid.decaying_sum.default, given, {"scale": 0.5, "impl": "torch"}
    )
    compiled = torch.compile(Layer(), fullgraph=True, dynamic=True)
    free = tuple(dict.fromkeys(range(x.ndim), Dim.AUTO) for x in given)
    exported = torch.export.export(Layer(), given, dynamic_shapes={"given": free}).module()
    for lengths in ((3, 4), (5, 2, 6)):
        given = arguments(*lengths)
        results = []
        for run in (Layer(), compiled, exported):
            own = [x.clone() for x in given]
            results.append((run(*own), own[2]))
        for result in results[1:]:
            torch.testing.assert_close(result, results[0])
    print("compiled and exported agree with eager, results and states")


if __name__ == "__main__":
    main()
