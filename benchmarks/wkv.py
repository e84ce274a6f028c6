"""RWKV's weighted average of past values against the memory.

    python -m benchmarks.wkv [--threads N] [--seconds S] [--cpu-time]

The floor of a shape is an in-place scale of as many bytes as the op must read and write: keys,
values and outputs, states twice. Contestants take turns and the fastest run of each counts. Each
shape is first compared with the definition.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.timing import clock_arguments, clock_of
from tests.ops.wkv.cases import Case, Inputs, make_inputs
from torch_hybrid.ops.wkv import wkv
from torch_hybrid.ops.wkv.reference import wkv_reference

NUM_CHANNELS = 2048  # of RWKV-4-1B5
SHAPES = {
    "decode batch 1": (1,),
    "decode batch 8": (1,) * 8,
    "decode batch 32": (1,) * 32,
    "prefill 512": (512,),
    "prefill 2048": (2048,),
}


def num_bytes(inputs: Inputs) -> int:
    of_tokens = 3 * inputs.k.numel() * inputs.k.element_size()
    return of_tokens + 2 * inputs.state[inputs.state_indices].nbytes


def runner(inputs: Inputs, impl: str) -> Callable[[], Tensor]:
    return lambda: wkv(*inputs.args(), impl=impl)


def check(inputs: Inputs) -> None:
    one, other = inputs.copy(), inputs.copy()
    torch.testing.assert_close(runner(one, "cpp")(), wkv_reference(other))
    torch.testing.assert_close(one.state[1:], other.state[1:])


def errors(length: int) -> dict[str, float]:
    """The largest error of each against the definition in float64."""
    inputs = make_inputs(Case(lengths=(length,), num_channels=256))
    exact = wkv_reference(inputs.exact())
    outs = {name: runner(inputs.copy(), name)() for name in ("cpp", "torch")}
    outs["reference"] = wkv_reference(inputs.copy())
    return {name: (out.double() - exact).abs().max().item() for name, out in outs.items()}


def main() -> None:
    clock = clock_of(clock_arguments(__doc__.splitlines()[0]).parse_args())
    for length in (128, 512, 2048):
        shown = ", ".join(f"{name} {error:.1e}" for name, error in errors(length).items())
        print(f"largest error of {length} tokens: {shown}")
    for dtype in (torch.float32, torch.bfloat16):
        for name, lengths in SHAPES.items():
            inputs = make_inputs(Case(lengths=lengths, num_channels=NUM_CHANNELS), dtype)
            inputs.state.nan_to_num_()
            check(inputs)
            memory = torch.ones(num_bytes(inputs) // 8)
            contestants = {
                "floor": lambda memory=memory: memory.mul_(1.0001),
                "cpp": runner(inputs, "cpp"),
            }
            best = clock.fastest(contestants)
            # By itself, for its temporaries would push what the others use out of the caches.
            best |= clock.fastest({"torch": runner(inputs, "torch")})
            print(
                f"{str(dtype)[6:]:8} {name:15}: {best['cpp'] * 1e6:7.0f} us, in-place scale "
                f"{best['floor'] * 1e6:6.0f} us, ratio {best['cpp'] / best['floor']:5.2f}, "
                f"torch form {best['torch'] * 1e6:8.0f} us"
            )


if __name__ == "__main__":
    main()
