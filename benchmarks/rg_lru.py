"""The real-gated linear recurrent unit against the memory.

    python -m benchmarks.rg_lru [--threads N] [--seconds S] [--cpu-time]

The floor of a shape is an in-place scale of as many bytes as the op must read and write: inputs,
gates and outputs, states twice. Contestants take turns and the fastest run of each counts. Each
shape is first compared with the torch form.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.timing import clock_arguments, clock_of
from tests.ops.rg_lru.cases import Case, Inputs, make_inputs
from torch_hybrid.ops.rg_lru import rg_lru

HEADS = {"num_heads": 10, "head_dim": 256}  # of RecurrentGemma-2B
SHAPES = {
    "decode batch 1": (1,),
    "decode batch 8": (1,) * 8,
    "decode batch 32": (1,) * 32,
    "prefill 512": (512,),
    "prefill 2048": (2048,),
}


def num_bytes(inputs: Inputs) -> int:
    of_tokens = (2 * inputs.x.numel() + inputs.gates.numel()) * inputs.x.element_size()
    return of_tokens + 2 * inputs.state[inputs.state_indices].nbytes


def runner(inputs: Inputs, impl: str) -> Callable[[], object]:
    return lambda: rg_lru(*inputs.args(), impl=impl)


def check(inputs: Inputs) -> None:
    one, other = inputs.copy(), inputs.copy()
    torch.testing.assert_close(runner(one, "cpp")(), runner(other, "torch")())
    torch.testing.assert_close(one.state[1:], other.state[1:])


def main() -> None:
    clock = clock_of(clock_arguments(__doc__.splitlines()[0]).parse_args())
    for dtype in (torch.float32, torch.bfloat16):
        for name, lengths in SHAPES.items():
            inputs = make_inputs(Case(lengths=lengths, **HEADS), dtype)
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
