"""Recurrences of a few state numbers a channel against the memory.

    python -m benchmarks.channel_recurrences [--only OP ...] [--threads N] [--seconds S]

The floor of a shape is an in-place scale of as many bytes as the op must read and write: its rows
and outputs, states twice. Contestants take turns and the fastest run of each counts. Each shape is
first compared with the definition. Layers are the widest among the op's cases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import Clock, clock_arguments, clock_of
from tests.ops.declared import RecurrentInputs
from tests.ops.registered import channel_recurrences, public_ops

SHAPES = {
    "decode batch 1": (1,),
    "decode batch 8": (1,) * 8,
    "decode batch 32": (1,) * 32,
    "prefill 512": (512,),
    "prefill 2048": (2048,),
}


class Recurrence:
    """An op with its cases and its definition."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cases: Any = import_module(f"tests.ops.{name}.cases")
        reference = import_module(f"torch_hybrid.ops.{name}.reference")
        self.define: Callable[[Any], Tensor] = vars(reference)[f"{name}_reference"]

    def inputs(self, lengths: tuple[int, ...], dtype: torch.dtype, case: str = "") -> Any:
        """Inputs of a layer's width."""
        cases = self.cases.CASES
        layer = cases[case] if case else [*cases.values()][-1]
        return self.cases.make_inputs(replace(layer, lengths=lengths, num_padding_tokens=0), dtype)

    def runner(self, inputs: RecurrentInputs, impl: str) -> Callable[[], Tensor]:
        op = public_ops()[self.name]
        return lambda: op(*inputs.args(), impl=impl)

    def check(self, inputs: Any) -> None:
        one, other = inputs.copy(), inputs.copy()
        torch.testing.assert_close(self.runner(one, "cpp")(), self.define(other))
        torch.testing.assert_close(one.state[1:], other.state[1:])

    def errors(self, length: int) -> dict[str, float]:
        """The largest error of each against the definition in float64."""
        inputs = self.inputs((length,), torch.float32, "mixed")
        exact = self.define(inputs.exact())
        outs = {name: self.runner(inputs.copy(), name)() for name in ("cpp", "torch")}
        outs["reference"] = self.define(inputs.copy())
        return {name: (out.double() - exact).abs().max().item() for name, out in outs.items()}


def num_bytes(inputs: Any) -> int:
    """Bytes of rows, of outputs like the first of them, and of states that are read and written."""
    rows = [*inputs.tokens(slice(None)).values()]
    return sum(x.nbytes for x in [*rows, rows[0]]) + 2 * inputs.state[inputs.state_indices].nbytes


def time_shapes(recurrence: Recurrence, dtype: torch.dtype, clock: Clock) -> None:
    for name, lengths in SHAPES.items():
        inputs = recurrence.inputs(lengths, dtype)
        inputs.state.nan_to_num_()
        recurrence.check(inputs)
        memory = torch.ones(num_bytes(inputs) // 8)
        contestants = {
            "floor": lambda memory=memory: memory.mul_(1.0001),
            "cpp": recurrence.runner(inputs, "cpp"),
        }
        best = clock.fastest(contestants)
        # By itself, for its temporaries would push what the others use out of the caches.
        best |= clock.fastest({"torch": recurrence.runner(inputs, "torch")})
        print(
            f"{recurrence.name} {str(dtype)[6:]:8} {name:15}: {best['cpp'] * 1e6:7.0f} us, "
            f"in-place scale {best['floor'] * 1e6:6.0f} us, "
            f"ratio {best['cpp'] / best['floor']:5.2f}, torch form {best['torch'] * 1e6:8.0f} us"
        )


def main() -> None:
    parser = clock_arguments(__doc__.splitlines()[0])
    known = channel_recurrences()
    parser.add_argument("--only", nargs="+", choices=known, default=known)
    options = parser.parse_args()
    clock = clock_of(options)
    for recurrence in map(Recurrence, options.only):
        for length in (128, 512, 2048):
            found = recurrence.errors(length).items()
            shown = ", ".join(f"{name} {error:.1e}" for name, error in found)
            print(f"{recurrence.name}, largest error of {length} tokens: {shown}")
        for dtype in (torch.float32, torch.bfloat16):
            time_shapes(recurrence, dtype, clock)


if __name__ == "__main__":
    main()
