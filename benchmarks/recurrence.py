"""What the benchmarks of recurrent ops share: the check before a figure, and decode.

Decode: calls take turns on pools of 256 MB in all, as the layers of a model do, so that states come
from memory; the floor is an in-place scale of as many such states, and the op is called as a
compiled graph calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle

import torch
from torch import Tensor

from benchmarks.timing import Clock
from tests.ops.recurrent_contract import Inputs
from torch_hybrid.ops.core.recurrence import CHUNK, DEFAULT_CHUNK_SIZE, RECURRENT

DECODE_BYTES = 256 << 20


def runner(
    op: Callable[..., Tensor], inputs: Inputs, form: str = CHUNK, **options: object
) -> Callable[[], object]:
    """The op on one pool, which moves on at each call, after a check against the torch form."""
    one, other = inputs.copy(), inputs.copy()
    out = op(*one.args(), **one.options(), **options, impl=f"{form}_cpp")
    expected = op(*other.args(), **other.options(), **options, impl=f"{form}_torch")
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(one.state[1:], other.state[1:], rtol=1e-3, atol=1e-3)
    return lambda: op(*inputs.args(), **inputs.options(), **options, impl=f"{form}_cpp")


def decode(name: str, op: Callable[..., Tensor], inputs: Inputs, clock: Clock) -> None:
    """Print the time of one token of each sequence of ``inputs``, and the floor's."""
    runner(op, inputs, RECURRENT)
    options = {**inputs.options(), "chunk_size": DEFAULT_CHUNK_SIZE, "impl": "recurrent_cpp"}
    overload = getattr(torch.ops.torch_hybrid, op.__name__)
    batch, num_pools = len(inputs.q), max(2, DECODE_BYTES // inputs.state.nbytes)
    pools = cycle([inputs.state.clone() for _ in range(num_pools)])
    states = cycle([torch.ones_like(inputs.state[:batch]) for _ in range(num_pools)])
    contestants = {
        "floor": lambda: next(states).mul_(1.0001),
        "cpp": lambda: overload(*replace(inputs, state=next(pools)).args(), **options),
    }
    best = clock.fastest(contestants)
    print(
        f"decode {name}, batch {batch:2}: {best['cpp'] * 1e6:6.0f} us, in-place scale "
        f"{best['floor'] * 1e6:6.0f} us, ratio {best['cpp'] / best['floor']:.2f}"
    )
