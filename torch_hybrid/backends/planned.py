"""What implementations that plan get into a step's plan; see ``ops.planning``."""

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
    """What was planned for layers of one shape, as leaves of the step's plan."""

    tensors: tuple[Tensor, ...]
    values: OnHost

    @property
    def given(self) -> tuple[Tensor, ...]:
        """As the op takes it: the values last, on the host."""
        return (*self.tensors, self.values.value)


register_value(PlannedTensors)


def shape_name(sizes: Mapping[str, int]) -> str:
    """Layers of the same name share what is planned."""
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def planned_for(
    planned: Mapping[str, PlannedTensors], sizes: Mapping[str, int]
) -> tuple[Tensor, ...]:
    """What an op of layers of these sizes is given; found by name only where there are several
    shapes, since a name cannot be made of sizes that are traced as numbers."""
    if len(planned) < 2:
        return next((each.given for each in planned.values()), ())
    return planned[shape_name(sizes)].given


def plan_layers(
    planner: Planner | None, batch: Batch, layers: Mapping[str, Mapping[str, Any]]
) -> dict[str, PlannedTensors]:
    """What the planner makes of a batch for each shape of layers, by its name.

    Args:
        planner: of the implementation that runs; None plans nothing.
        batch: on the host, padded to its bucket.
        layers: what a planner is told of the layers of one shape.
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
