"""Planned tensors: schedules of ops as a part of a step's plan; see ``ops.core.planning``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_hybrid.batch import Batch
from torch_hybrid.ops.core.planning import Lengths, Planner
from torch_hybrid.pytrees import OnHost, register_value


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTensors:
    """Schedule for layers of one shape, as leaves of the step's plan."""

    tensors: tuple[Tensor, ...]
    values: OnHost

    @property
    def given(self) -> tuple[Tensor, ...]:
        """Tensors as the op takes them, the host values last."""
        return (*self.tensors, self.values.value)


register_value(PlannedTensors)


def shape_name(sizes: Mapping[str, int]) -> str:
    """Name a shape by its sizes: layers whose shapes have one name share planned tensors."""
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def planned_for(
    planned: Mapping[str, PlannedTensors], sizes: Mapping[str, int]
) -> tuple[Tensor, ...]:
    """Find the planned tensors for an op of layers of these sizes.

    A single shape needs no name: no name can be made of traced sizes, which may be symbols.
    """
    if len(planned) < 2:
        return next((each.given for each in planned.values()), ())
    return planned[shape_name(sizes)].given


def plan_layers(
    planner: Planner | None, batch: Batch, layers: Mapping[str, Mapping[str, Any]]
) -> dict[str, PlannedTensors]:
    """Plan a batch for each shape of layers: planned tensors by the shape's name.

    Args:
        planner: planner of the chosen implementation; None plans nothing.
        batch: batch on the host, padded to its bucket.
        layers: what the planner is told about layers of one shape, by the shape's name.
    """
    if planner is None:
        return {}
    lengths = Lengths(
        cu_seqlens=batch.cu_seqlens,
        seq_lens=batch.seq_lens,
        page_table=batch.page_table,
        initial_indices=batch.initial_indices,
        state_indices=batch.state_indices,
        num_tokens=batch.num_tokens,
    )
    made = {name: planner(lengths, **facts) for name, facts in layers.items()}
    return {
        name: PlannedTensors(
            tensors=planned.tensors,
            values=OnHost(torch.tensor(planned.values, dtype=torch.int64, device="cpu")),
        )
        for name, planned in made.items()
    }
