"""How the Triton kernels of mixers' decode steps are tested on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.ops.recurrent_triton import captured, on_device
from tests.ops.step_contract import expect
from tests.ops.step_family import Family


def check(family: Family, case: Any, dtype: torch.dtype) -> None:
    """The kernel on a GPU is as exact as the reference."""
    moved = on_device(family.make_inputs(case, dtype))
    out = family.run(moved, "triton")
    expect(family, case, dtype).check(out.cpu(), on_device(moved, "cpu"))


def check_captured(family: Family) -> None:
    """Three sequences of a bucket of five, replayed with other lengths and slots."""
    first = family.mixed(lengths=(1, 1, 1), num_padding_tokens=2)
    replay = captured(lambda inputs: family.run(inputs, "triton"), first)
    for lengths in [(1, 0, 1), (0, 1, 0)]:
        padding = 5 - sum(lengths)
        case = replace(family.cases["mixed"], lengths=lengths, num_padding_tokens=padding)
        expected = expect(family, case, torch.float32)
        out, moved = replay(expected.inputs)
        expected.check(out.cpu(), on_device(moved, "cpu"))
