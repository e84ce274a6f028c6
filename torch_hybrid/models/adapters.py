"""Adapters of a transformers model in the model that was made of it: sites, and their factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.layers.adapted import AdapterSite, Factors
from torch_hybrid.layers.integers import dtype_of
from torch_hybrid.layers.scaled_linear import ScaledLinear
from torch_hybrid.layers.side_by_side import SideBySide
from torch_hybrid.models.adapter_places import Part, Places, find_places
from torch_hybrid.models.hybrid_model import HybridModel
from torch_hybrid.models.read_adapter import check_targets, factors_of, read_adapter

Parts = tuple[Part, ...]
_PLACES: WeakKeyDictionary[HybridModel, Places] = WeakKeyDictionary()


def adapter_sites(model: HybridModel) -> list[AdapterSite]:
    """List the linear layers of a model that adapters may change.

    Raises:
        UnsupportedError: adapters of this model are not served.
    """
    return [
        AdapterSite(
            path=path,
            inputs=module.in_features,
            widths=tuple(part.width for part in parts),
            dtype=dtype_of(module),
        )
        for path, module, parts in _sites(model)
    ]


def read_for_sites(
    model: HybridModel, source: Path | nn.Module, max_rank: int
) -> list[list[Factors]]:
    """Read an adapter of at most this rank, for each part of each site.

    Raises:
        ValueError, UnsupportedError: as ``Runner.load_adapter`` does.
    """
    places = _places(model)
    read = read_adapter(source, max_rank)
    where = f"a {type(source).__name__}" if isinstance(source, nn.Module) else source
    check_targets(read, places, where)
    return [factors_of(read, parts) for _, _, parts in _sites(model)]


def _places(model: HybridModel) -> Places:
    if model.ranks is not None:
        raise UnsupportedError("adapters of a model that several ranks share are not served")
    if model not in _PLACES:
        _PLACES[model] = find_places(model)
    return _PLACES[model]


def _sites(model: HybridModel) -> list[tuple[str, Any, Parts]]:
    """List path, module and parts of each linear layer; one of several layers has a site each."""
    found: list[tuple[str, Any, Parts]] = []
    for path, parts in _places(model).linears.items():
        module: Any = model.get_submodule(path)
        if isinstance(module, SideBySide):
            sizes: list[Any] = [own.out_features for own in module.parts]
            names = [f"{path}.parts.{i}" for i in range(len(sizes))]
            found += zip(names, module.parts, _cut(parts, sizes), strict=True)
        elif isinstance(module, nn.Linear | ScaledLinear):
            found.append((path, module, parts))
        else:
            raise UnsupportedError(f"adapters are not served: {path} is a {type(module).__name__}")
    return found


def _cut(parts: Parts, sizes: Sequence[int]) -> list[Parts]:
    """Cut parts at the ends of stretches of these sizes, which add up to all."""
    rows = [(part, place) for part in parts for place in range(part.width)]
    cut: list[Parts] = []
    for size in sizes:
        own, rows = rows[:size], rows[size:]
        stretch: list[Part] = []
        for part in dict.fromkeys(part for part, _ in own):
            places = [place for each, place in own if each is part]
            kept = torch.tensor(places, dtype=torch.int64, device="cpu")
            stretch.append(replace(part, rows=part.rows[kept], factors=part.factors[kept]))
        cut.append(tuple(stretch))
    return cut
