"""Decode steps of the delta rules' mixers as one op, against their parts and the memory.

    python -m benchmarks.delta_steps [--threads N] [--seconds S] [--cpu-time]

Parts are the C++ ops that a step stands in for, with what Inductor makes of the gates and the norm
between them. Either runs in a compiled function of several layers, as in a step, since the call of
such a function costs as much as a layer; times are a layer's. The floor is an in-place scale of as
many states. Calls take turns on pools of 256 MB in all, so that states come from memory; the
fastest run of each counts. The op's result is compared with that of its parts first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from benchmarks.recurrence import DECODE_BYTES
from benchmarks.timing import Clock, clock_arguments, clock_of
from tests.ops.delta_rule import step_gated_cases as gated
from tests.ops.delta_rule import step_kimi_cases as kimi
from tests.ops.delta_rule.step_cases import Inputs
from tests.ops.delta_rule.step_family import Family
from tests.ops.delta_rule.step_gated_cases import FAMILY as GATED
from tests.ops.delta_rule.step_kimi_cases import FAMILY as KIMI

BATCHES = (1, 2, 8, 32)
HEADS = 16
LAYERS = 8
DIMS = {"k_dim": 128, "v_dim": 128}


def inputs_of(family: Family, batch: int, dtype: torch.dtype) -> Inputs:
    """Every sequence continues a state."""
    lengths = (1,) * batch
    if family is KIMI:
        case = kimi.case(*lengths, num_heads=HEADS, **DIMS)
    else:
        case = gated.case(lengths=lengths, num_k_heads=HEADS // 2, num_v_heads=HEADS, **DIMS)
    inputs = family.make_inputs(case, dtype)
    pools = {name: getattr(inputs, name).nan_to_num() for name in ("conv_state", "state")}
    return replace(inputs, initial_indices=inputs.state_indices, **pools)


def compare(family: Family, inputs: Inputs, clock: Clock) -> None:
    """Print the times of one layer's step of ``inputs``."""

    @partial(torch.compile, fullgraph=True, dynamic=False)
    def whole(layers: Sequence[Inputs]) -> list[Tensor]:
        return [family.run(each, "cpp") for each in layers]

    @partial(torch.compile, fullgraph=True, dynamic=False)
    def parts(layers: Sequence[Inputs]) -> list[Tensor]:
        return [family.by_parts(each, "cpp") for each in layers]

    def layers() -> list[Inputs]:
        return [inputs.copy() for _ in range(LAYERS)]

    with torch.inference_mode():
        torch.testing.assert_close(whole(layers()), parts(layers()))
        num_turns = max(2, DECODE_BYTES // (LAYERS * inputs.state.nbytes))
        turns = cycle([layers() for _ in range(num_turns)])
        batch = len(inputs.qkv)
        contestants = {
            "op": lambda: whole(next(turns)),
            "parts": lambda: parts(next(turns)),
            "floor": lambda: [each.state[:batch].mul_(1.0) for each in next(turns)],
        }
        seconds = clock.fastest(contestants)
    best = {name: 1e6 * each / LAYERS for name, each in seconds.items()}
    what = f"{family.op.__name__}, {str(inputs.qkv.dtype)[6:]}, batch {batch:2}"
    print(
        f"{what}: {best['op']:6.0f} us, parts {best['parts']:6.0f} us, ratio "
        f"{best['parts'] / best['op']:.2f}, in-place scale {best['floor']:6.0f} us",
        flush=True,
    )


def main() -> None:
    """Both rules in both dtypes."""
    clock = clock_of(clock_arguments(__doc__.splitlines()[0]).parse_args())
    for family in (GATED, KIMI):
        for dtype in (torch.float32, torch.bfloat16):
            for batch in BATCHES:
                torch._dynamo.reset()
                compare(family, inputs_of(family, batch, dtype), clock)


if __name__ == "__main__":
    main()
