"""The gated delta rule against the memory (decode) and against a matrix product (prefill).

    python -m benchmarks.gated_delta_rule [--threads N] [--seconds S] [--cpu-time]

Decode: the floor is an in-place scale of as many bytes as there are states. Prefill: the rate
counts the products of the chunk form, and is compared with that of a 2048^3 product. Contestants
take turns and the fastest run of each counts. Each shape is first compared with the torch form.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping

import torch

from tests.ops.delta_rule_cases import Case, Inputs
from tests.ops.gated_delta_rule.cases import make_inputs
from torch_hybrid.ops.gated_delta_rule import chunk_gated_delta_rule, recurrent_gated_delta_rule
from torch_hybrid.ops.recurrence import CHUNK_SIZES

MATRIX = 2048
HEADS = ((16, 16), (16, 32))


def fastest(
    contestants: Mapping[str, Callable[[], object]], seconds: float, cpu_time: bool
) -> dict[str, float]:
    """Seconds of the fastest run of each; with ``cpu_time``, of all processors together."""
    now = time.process_time if cpu_time else time.perf_counter
    best = dict.fromkeys(contestants, float("inf"))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, run in contestants.items():
            start = now()
            run()
            best[name] = min(best[name], now() - start)
    return best


def model_inputs(
    lengths: tuple[int, ...], num_k_heads: int, num_v_heads: int, dtype: torch.dtype
) -> Inputs:
    """One layer of Qwen3-Next (16 and 32 heads) or with as many key heads as value heads."""
    case = Case(
        lengths=lengths, num_k_heads=num_k_heads, num_v_heads=num_v_heads, k_dim=128, v_dim=128
    )
    inputs = make_inputs(case, dtype)
    inputs.has_initial_state.fill_(True)
    inputs.state.nan_to_num_()
    return inputs


def runner(
    op: Callable[..., torch.Tensor], inputs: Inputs, **options: object
) -> Callable[[], object]:
    """The op on one pool, which moves on at each call, after a check against the torch form."""
    one, other = inputs.copy(), inputs.copy()
    out = op(*one.args(), **one.options(), **options, impl="cpp")
    expected = op(*other.args(), **other.options(), **options, impl="torch")
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=1e-3)
    torch.testing.assert_close(one.state[1:], other.state[1:], rtol=1e-3, atol=1e-3)
    return lambda: op(*inputs.args(), **inputs.options(), **options, impl="cpp")


def decode(seconds: float, cpu_time: bool) -> None:
    for batch in (1, 8, 32):
        inputs = model_inputs((1,) * batch, 16, 16, torch.float32)
        states = torch.ones(batch, *inputs.state.shape[1:])
        contestants = {
            "floor": lambda states=states: states.mul_(1.0001),
            "cpp": runner(recurrent_gated_delta_rule, inputs),
        }
        best = fastest(contestants, seconds, cpu_time)
        print(
            f"decode batch {batch:2}: {best['cpp'] * 1e6:6.0f} us, in-place scale "
            f"{best['floor'] * 1e6:6.0f} us, ratio {best['cpp'] / best['floor']:.2f}"
        )


def chunk_flops(num_tokens: int, num_heads: int, chunk: int, k_dim: int, v_dim: int) -> float:
    """As counted for the chunk form with both triangular products in full."""
    per_chunk = 6 * chunk * k_dim * v_dim + 2 * chunk**2 * (3 * k_dim + 2 * v_dim)
    return num_heads * num_tokens / chunk * (per_chunk + 2 / 3 * chunk**3)


def prefill(seconds: float, cpu_time: bool, num_tokens: int = 2048) -> None:
    a = torch.randn(MATRIX, MATRIX)
    for dtype in (torch.float32, torch.bfloat16):
        for num_k_heads, num_v_heads in HEADS:
            inputs = model_inputs((num_tokens,), num_k_heads, num_v_heads, dtype)
            contestants: dict[str, Callable[[], object]] = {
                str(size): runner(chunk_gated_delta_rule, inputs, chunk_size=size)
                for size in CHUNK_SIZES
            }
            best = fastest({**contestants, "matrix": lambda: a @ a}, seconds, cpu_time)
            rate = 2 * MATRIX**3 / best["matrix"]
            for size in CHUNK_SIZES:
                flops = chunk_flops(num_tokens, num_v_heads, size, 128, 128)
                time_ = best[str(size)]
                print(
                    f"prefill {num_tokens} {str(dtype)[6:]:8} heads {num_k_heads}/{num_v_heads} "
                    f"chunk {size:3}: {time_ * 1e3:6.1f} ms, {flops / time_ / 1e9:4.0f} GFLOP/s, "
                    f"{flops / time_ / rate:.2f} of a matrix product ({rate / 1e9:.0f})"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=3.0, help="for each shape")
    parser.add_argument("--cpu-time", action="store_true", help="for a machine that others use")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    decode(args.seconds, args.cpu_time)
    prefill(args.seconds, args.cpu_time)


if __name__ == "__main__":
    main()
