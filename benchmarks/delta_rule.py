"""A delta rule against the memory (decode) and against matrix products (prefill).

Decode: calls take turns on pools of 256 MB in all, as the layers of a model do, so that states come
from memory; the floor is an in-place scale of as many such states, and the op is called as a
compiled graph calls it. Prefill: the rate counts the products of the chunk form, and is compared
with that of a 2048^3 product. Contestants take turns and the fastest run of each counts. Each shape
is first compared with the torch form.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import cycle

import torch
from torch import Tensor

from benchmarks.timing import fastest
from tests.ops.delta_rule_cases import Case, Inputs
from torch_hybrid.ops.recurrence import CHUNK_SIZES

MATRIX = 2048
DECODE_BYTES = 256 << 20
HEAD_DIM = 128

Contestants = Mapping[str, Callable[[], object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A delta rule's ops, its inputs, and the heads (of keys, of values) of its models' layers.

    ``rivals`` makes more contestants of a prefill, by the name to print, for heads and tokens.
    """

    recurrent: Callable[..., Tensor]
    chunk: Callable[..., Tensor]
    make_inputs: Callable[[Case, torch.dtype], Inputs]
    heads: tuple[tuple[int, int], ...]
    num_tokens: tuple[int, ...] = (2048,)
    rivals: Callable[[int, int, torch.dtype], Contestants] = field(default=lambda *_: {})

    def inputs(
        self, lengths: tuple[int, ...], heads: tuple[int, int], dtype: torch.dtype
    ) -> Inputs:
        """One layer's inputs, every sequence continuing a state."""
        case = Case(
            lengths=lengths,
            num_k_heads=heads[0],
            num_v_heads=heads[1],
            k_dim=HEAD_DIM,
            v_dim=HEAD_DIM,
        )
        inputs = self.make_inputs(case, dtype)
        inputs.has_initial_state.fill_(True)
        inputs.state.nan_to_num_()
        return inputs


def runner(op: Callable[..., Tensor], inputs: Inputs, **options: object) -> Callable[[], object]:
    """The op on one pool, which moves on at each call, after a check against the torch form."""
    one, other = inputs.copy(), inputs.copy()
    out = op(*one.args(), **one.options(), **options, impl="cpp")
    expected = op(*other.args(), **other.options(), **options, impl="torch")
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=1e-3)
    torch.testing.assert_close(one.state[1:], other.state[1:], rtol=1e-3, atol=1e-3)
    return lambda: op(*inputs.args(), **inputs.options(), **options, impl="cpp")


def decode(rule: Rule, seconds: float, cpu_time: bool) -> None:
    overload = getattr(torch.ops.torch_hybrid, rule.recurrent.__name__)
    for batch in (1, 2, 4, 8, 16, 32):
        inputs = rule.inputs((1,) * batch, rule.heads[0], torch.float32)
        runner(rule.recurrent, inputs)
        num_pools = max(2, DECODE_BYTES // inputs.state.nbytes)
        pools = cycle([inputs.state.clone() for _ in range(num_pools)])
        states = cycle([torch.ones_like(inputs.state[:batch]) for _ in range(num_pools)])
        contestants = {
            "floor": lambda states=states: next(states).mul_(1.0001),
            "cpp": lambda inputs=inputs, pools=pools: overload(
                *replace(inputs, state=next(pools)).args(), **inputs.options(), impl="cpp"
            ),
        }
        best = fastest(contestants, seconds, cpu_time)
        print(
            f"decode batch {batch:2}: {best['cpp'] * 1e6:6.0f} us, in-place scale "
            f"{best['floor'] * 1e6:6.0f} us, ratio {best['cpp'] / best['floor']:.2f}"
        )


def chunk_flops(num_tokens: int, num_heads: int, chunk: int) -> float:
    """As counted for the chunk form with both triangular products in full."""
    per_chunk = 6 * chunk * HEAD_DIM**2 + 2 * chunk**2 * 5 * HEAD_DIM
    return num_heads * num_tokens / chunk * (per_chunk + 2 / 3 * chunk**3)


def prefill(
    rule: Rule, heads: tuple[int, int], num_tokens: int, dtype: torch.dtype, **clock: float | bool
) -> None:
    a = torch.randn(MATRIX, MATRIX)
    inputs = rule.inputs((num_tokens,), heads, dtype)
    rivals = rule.rivals(heads[1], num_tokens, dtype)
    chunks = {str(size): runner(rule.chunk, inputs, chunk_size=size) for size in CHUNK_SIZES}
    best = fastest({**chunks, **rivals, "matrix": lambda: a @ a}, **clock)
    rate = 2 * MATRIX**3 / best["matrix"]
    print(
        f"prefill {num_tokens} {str(dtype)[6:]} heads {heads[0]}/{heads[1]}, matrix product "
        f"{rate / 1e9:.0f} GFLOP/s",
        *(f", {name} {best[name] * 1e3:.1f} ms" for name in rivals),
        sep="",
    )
    for size in CHUNK_SIZES:
        flops, time = chunk_flops(num_tokens, heads[1], size), best[str(size)]
        print(
            f"    chunk {size:3}: {time * 1e3:6.1f} ms, {flops / time / 1e9:4.0f} GFLOP/s, "
            f"{flops / time / rate:.2f} of a matrix product",
            *(f", {time / best[name]:.2f} of {name}" for name in rivals),
            sep="",
        )


def main(rule: Rule, description: str) -> None:
    """The command line of a rule's benchmark."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=3.0, help="for each shape")
    parser.add_argument("--cpu-time", action="store_true", help="for a machine that others use")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = {"seconds": args.seconds, "cpu_time": args.cpu_time}
    decode(rule, **clock)
    for dtype in (torch.float32, torch.bfloat16):
        for heads in rule.heads:
            for num_tokens in rule.num_tokens:
                prefill(rule, heads, num_tokens, dtype, **clock)
