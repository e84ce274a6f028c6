"""Implementations that plan: schedules made on the host, from lengths, before a step runs.

    lengths (host)  --planner-->  Planned  --a step's plan-->  the op's argument ``planned``

A planner is pure: equal lengths give equal schedules, and a launcher reads no length on the host. A
planner makes two kinds of things:

- Tensors are copied to the device with the rest of the step's plan, into one storage for a bucket.
- Host values are read when the op is launched: sizes of grids, and where in a tensor a part begins.

A compiled graph holds neither: the values go in as a tensor that stays on the host. A captured
graph holds the values of its capture, so they are part of its key. A planner therefore derives them
from shapes as far as it can, or lets them be few.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """All that a planner is told of a step: tensors on the host, padded to the step's bucket.

    Null sequences are empty; tokens from ``cu_seqlens[N]`` up to ``num_tokens`` are padding.
    """

    cu_seqlens: Tensor  # [N + 1] int32
    seq_lens: Tensor  # [N] int32
    page_table: Tensor  # [N, max_pages] int32
    initial_indices: Tensor  # [N] int32, recurrent slots that are read; 0: none is
    state_indices: Tensor  # [N] int32, recurrent slots that are written; 0: none is
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Schedule that a planner makes for one step.

    Attributes:
        tensors: on the host; each has a shape that follows from the shapes of the lengths.
        values: always as many.
    """

    tensors: tuple[Tensor, ...]
    values: tuple[int, ...]


# Takes the lengths, and by name what the layers that it plans for have in common.
Planner = Callable[..., Planned]
