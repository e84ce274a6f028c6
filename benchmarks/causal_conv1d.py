"""The causal convolution against the memory.

    python -m benchmarks.causal_conv1d [--threads N] [--seconds S] [--cpu-time]

The floor of a shape is an in-place scale of as many bytes as the op must read and write: inputs
and outputs, states twice, filters. Contestants take turns and the fastest run of each counts.
Each shape is first compared with the torch form.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.timing import clock_arguments, clock_of
from tests.ops.causal_conv1d.cases import Case, Inputs, make_inputs
from torch_hybrid.ops.causal_conv1d import causal_conv1d

CHANNELS = 8192  # of Qwen3-Next: 2 * 16 * 128 of q and k, 32 * 128 of v
SHAPES = {
    "decode batch 1": (1,),
    "decode batch 8": (1,) * 8,
    "decode batch 32": (1,) * 32,
    "prefill 512": (512,),
    "prefill 2048": (2048,),
}


def num_bytes(inputs: Inputs) -> int:
    states = inputs.conv_state[inputs.state_indices]
    num_elements = 2 * inputs.x.numel() + 2 * states.numel() + inputs.weight.numel()
    return num_elements * inputs.x.element_size()


def runner(inputs: Inputs, impl: str) -> Callable[[], object]:
    return lambda: causal_conv1d(*inputs.args(), activation=inputs.activation, impl=impl)


def check(inputs: Inputs) -> None:
    one, other = inputs.fresh(), inputs.fresh()
    torch.testing.assert_close(runner(one, "cpp")(), runner(other, "torch")())
    torch.testing.assert_close(one.conv_state[1:], other.conv_state[1:], rtol=0, atol=0)


def main() -> None:
    clock = clock_of(clock_arguments(__doc__.splitlines()[0]).parse_args())
    for dtype in (torch.float32, torch.bfloat16):
        for name, lengths in SHAPES.items():
            inputs = make_inputs(Case(lengths=lengths, channels=CHANNELS), dtype)
            inputs.conv_state.nan_to_num_()
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
