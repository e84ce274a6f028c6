"""The selective scan against the memory (decode) and against its layer's projections (prefill).

    python -m benchmarks.selective_scan [--threads N] [--seconds S] [--cpu-time]

Decode is that of benchmarks/recurrence.py. Prefill: the time is compared with that of the layer's
four projections, and said for each vector of 16 states and token. Contestants take turns and the
fastest run of each counts. Each shape is first compared with the torch form.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.recurrence import decode, runner
from benchmarks.timing import Clock, clock_arguments, clock_of
from tests.ops.selective_scan.cases import Case, Inputs, make_inputs
from torch_hybrid.ops.selective_scan import selective_scan

CHANNELS = {"mamba 1536": 1536, "mamba 2048": 2048}  # of models half as wide


def layer_inputs(channels: int, lengths: tuple[int, ...], dtype: torch.dtype) -> Inputs:
    inputs = make_inputs(Case(lengths=lengths, channels=channels, bias="own"), dtype)
    inputs.initial_indices.copy_(inputs.state_indices)
    inputs.state.nan_to_num_()
    return inputs


def projections(channels: int, num_tokens: int, dtype: torch.dtype) -> Callable[[], object]:
    dim, rank = channels // 2, channels // 32
    widths = {"in": (dim, 2 * channels), "x": (channels, rank + 32), "dt": (rank, channels)}
    widths["out"] = (channels, dim)
    pairs = [
        (torch.randn(num_tokens, inputs, dtype=dtype), torch.randn(outputs, inputs, dtype=dtype))
        for inputs, outputs in widths.values()
    ]
    return lambda: [torch.nn.functional.linear(x, weight) for x, weight in pairs]


def prefill(dtype: torch.dtype, clock: Clock) -> None:
    for name, channels in CHANNELS.items():
        for num_tokens in (512, 2048):
            inputs = layer_inputs(channels, (num_tokens,), dtype)
            contestants = {
                "scan": runner(selective_scan, inputs),
                "projections": projections(channels, num_tokens, dtype),
            }
            best = clock.fastest(contestants)
            time_ = best["scan"]
            print(
                f"prefill {num_tokens:4} {str(dtype)[6:]:8} {name}: {time_ * 1e3:6.2f} ms, "
                f"{time_ * 1e9 / num_tokens / channels:.1f} ns a vector, "
                f"{time_ / best['projections']:.2f} of the projections"
            )


def main() -> None:
    clock = clock_of(clock_arguments(__doc__.splitlines()[0]).parse_args())
    for name, channels in CHANNELS.items():
        for batch in (1, 8, 32):
            inputs = layer_inputs(channels, (1,) * batch, torch.float32)
            decode(name, selective_scan, inputs, clock)
    for dtype in (torch.float32, torch.bfloat16):
        prefill(dtype, clock)


if __name__ == "__main__":
    main()
