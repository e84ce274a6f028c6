"""Experts that a checkpoint has one by one, stacked before transformers' loader sees them.

The loader looks up every name, and copies a converter for it. With a tensor for each expert, that
takes as long as reading their bytes. Names of experts differ by a number alone, so the loader is
handed one stack of all experts under the name of the first.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import (
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from torch_hybrid.models.checkpoint.files import Checkpoint

_OF_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")


class _Stacked(MergeModulelist):  # type: ignore[misc]
    """The merge of experts, for tensors that may already be a stack of all experts."""

    def convert(self, input_dict: dict[str, list[Tensor]], *args: Any, **options: Any) -> Any:
        given = {
            pattern: tensors[0] if len(tensors) == 1 else tensors
            for pattern, tensors in input_dict.items()
        }
        return super().convert(given, *args, **options)


def stack_experts(
    tensors: Mapping[str, Tensor], mapping: Sequence[WeightConverter | WeightRenaming]
) -> dict[str, Tensor]:
    """Stack the tensors of experts that a converter would stack first, where they have one dtype.

    Args:
        tensors: tensors of a checkpoint, by name.
        mapping: transformers' entries from these names to the model's. Converters are changed to
            expect stacks, so the mapping is of use for this load alone.

    Returns:
        All tensors by name, each stack under the name of its first expert.
    """
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    merging = {
        pattern: converter
        for converter in converters
        if type(converter.operations[0]) is MergeModulelist
        for pattern in converter.source_patterns
    }
    stacked = dict(tensors)
    for of_kind in _names_by_kind(tensors).values():
        experts = [of_kind[expert] for expert in sorted(of_kind)]
        _, pattern = rename_source_key(experts[0], renamings, converters)
        converter = merging.get(pattern)
        if converter and len({tensors[name].dtype for name in experts}) == 1:
            dim = converter.operations[0].dim
            stacked[experts[0]] = torch.stack([stacked.pop(name) for name in experts], dim)
            converter.operations[0] = _Stacked(dim)
    return stacked


def check_experts(checkpoint: Checkpoint) -> None:
    """Raise ValueError, with their names, for experts' tensors that are missing or differ in shape.

    After they are stacked, a single expert has no name to report."""
    names_by_kind = _names_by_kind(checkpoint.tensors)
    counts: Mapping[str, set[int]] = defaultdict(set)
    for (mixture, _), of_kind in names_by_kind.items():
        counts[mixture].update(of_kind)
    for (mixture, weight), of_kind in names_by_kind.items():
        given = {expert: checkpoint.tensors[name].shape for expert, name in of_kind.items()}
        if missing := counts[mixture] - given.keys():
            names = [f"{mixture}.{expert}.{weight}" for expert in sorted(missing)]
            raise ValueError(checkpoint.lacks(names))
        first = next(iter(given.values()))
        if others := {expert: shape for expert, shape in given.items() if shape != first}:
            names = [f"{mixture}.{expert}.{weight} {[*shape]}" for expert, shape in others.items()]
            raise ValueError(
                f"the checkpoint {checkpoint.folder} has mismatched keys: {names}, "
                f"where the other experts have {[*first]}"
            )


def _names_by_kind(names: Iterable[str]) -> Mapping[tuple[str, str], dict[int, str]]:
    """Group the names of experts' tensors by mixture and weight, then by the expert's number."""
    found: Mapping[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for name in names:
        if match := _OF_EXPERT.fullmatch(name):
            mixture, expert, weight = match.groups()
            found[mixture, weight][int(expert)] = name
    return found
