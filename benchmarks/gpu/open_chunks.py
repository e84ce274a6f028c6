"""A contestant of decode steps: the same step by open chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from benchmarks.gpu.case import Contestant, Turns
from torch_hybrid.ops.open_chunk import OPEN_TOKENS, OpenStep


def open_chunks(op: Callable[..., Tensor], value: Callable[[Any, str], OpenStep]) -> Contestant:
    """Make the contestant of an op, whose arguments ``value`` makes of inputs and a name."""
    return partial(_opened, op, value)


def _opened(
    op: Callable[..., Tensor], value: Callable[[Any, str], OpenStep], inputs: Sequence[Any]
) -> Turns:
    """Let each turn's chunks stand at another token."""
    calls: list[Any] = []
    for turn, each in enumerate(inputs):
        step = value(each, "triton")
        chunk = step.state.new_zeros(len(step.state), step.chunk_width)
        calls.append(partial(op, replace(step, chunk=chunk)))
        for _ in range(turn % OPEN_TOKENS):
            calls[-1]()
    return Turns(calls=calls)
