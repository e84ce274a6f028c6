"""Adapters of a transformers model in the model that was made of it: sites, and their factors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.layers.adapter_sites import (
    AdapterKinds,
    AdapterSite,
    EmbeddingSite,
    ExpertsSite,
    Factors,
    KeysSite,
    NormSite,
    RouterSite,
    ValuesSite,
)
from torch_hybrid.layers.integers import dtype_of
from torch_hybrid.layers.scaled_linear import ScaledLinear
from torch_hybrid.layers.side_by_side import SideBySide
from torch_hybrid.layers.vocabulary import HeadOverRanks
from torch_hybrid.models.adapter_places import Part, Places, find_places
from torch_hybrid.models.hybrid_model import HybridModel
from torch_hybrid.models.read_adapter import (
    check_saved,
    check_targets,
    factors_of,
    factors_of_experts,
    read_adapter,
)
from torch_hybrid.ranks import SummedLinear, SumOverRanks

Parts = tuple[Part, ...]
Stacks = tuple[Parts, ...]  # of gate if there is one, of up and of down
_PLACES: WeakKeyDictionary[HybridModel, Places] = WeakKeyDictionary()


def adapter_sites(model: HybridModel, kinds: AdapterKinds) -> list[AdapterSite]:
    """List the layers of a model that adapters of these kinds may change.

    Raises:
        UnsupportedError: adapters of this model are not served.
    """
    return [
        *(site for site, _ in _projections(model, kinds)),
        *(site for site, _ in _routers(model, kinds)),
        *(site for site, _ in _experts(model, kinds)),
        *(site for site, _ in _norms(model, kinds)),
    ]


def read_for_sites(
    model: HybridModel, source: Path | nn.Module, max_rank: int, kinds: AdapterKinds
) -> list[list[Factors]]:
    """Read an adapter of at most this rank, for each part of each site.

    Raises:
        ValueError, UnsupportedError: as ``Runner.load_adapter`` does.
    """
    places = _places(model)
    read = read_adapter(source, max_rank, places.stacks)
    where = f"a {type(source).__name__}" if isinstance(source, nn.Module) else source
    check_targets(read.factors, places, where)
    routers = {part.source for parts in places.routers.values() for part in parts}
    of_experts = [*read.experts, *(name for name in read.factors if name in routers)]
    if of_experts and not kinds.experts:
        raise UnsupportedError(
            f"{where} adapts {of_experts[0]}: the runner needs expert_adapters=True"
        )
    norms = _norms(model, kinds)
    shapes: dict[str, tuple[int, ...]] = {
        name: (site.inputs,) for site, names in norms for name in names
    }
    projections = _projections(model, kinds)
    for site, parts in projections:
        if site.is_replaceable:
            shapes[f"{parts[0].source}.weight"] = places.shapes[parts[0].source]
    check_saved(read, shapes, where)
    found = [factors_of(read, parts) for _, parts in (*projections, *_routers(model, kinds))]
    for _, stacks in _experts(model, kinds):
        found.append(factors_of_experts(read, stacks, places.stacks, where, max_rank))
    for _, names in norms:
        weights = [read.saved.get(name) for name in names]
        found.append([None if weight is None else (None, weight) for weight in weights])
    return found


def _head(model: HybridModel) -> Parts:
    """Find the parts of the output head."""
    head = model.head.part if isinstance(model.head, HeadOverRanks) else model.head
    places = _places(model).linears.items()
    return next(parts for paths, parts in places if model.get_submodule(paths[0]) is head)


def _projections(model: HybridModel, kinds: AdapterKinds) -> list[tuple[AdapterSite, Parts]]:
    """List the sites whose outputs low-rank products are added to, and what they are made of."""
    places, head = _places(model), _head(model)
    found: list[tuple[AdapterSite, Parts]] = []
    for paths, parts in places.linears.items():
        for suffix, module, own in _linears(model.get_submodule(paths[0]), parts, paths[0]):
            site = AdapterSite(
                paths=tuple(f"{path}{suffix}" for path in paths),
                inputs=module.in_features,
                widths=tuple(part.width for part in own),
                dtype=dtype_of(module),
                is_replaceable=kinds.saved_modules and own == head,
            )
            found.append((site, own))
    for paths, (part,) in places.latents.items():
        attention: Any = model.get_submodule(paths[0])
        spec, dtype = attention.spec, dtype_of(attention.kv_b_proj)
        rows = torch.arange(part.width, dtype=torch.int64, device="cpu")
        to_keys, to_values = (
            (replace(part, rows=part.rows[own], factors=part.factors[own]),)
            for own in (
                stretch.flatten()
                for stretch in rows.view(spec.num_heads, -1).split([spec.nope_dim, spec.v_dim], 1)
            )
        )
        sizes = {"dtype": dtype, "num_heads": spec.num_heads}
        keys = KeysSite(
            paths=tuple(f"{path}.to_latents" for path in paths),
            inputs=spec.nope_dim,
            widths=(spec.latent_rank,),
            **sizes,
        )
        values = ValuesSite(
            paths=tuple(f"{path}.to_values" for path in paths),
            inputs=spec.latent_rank,
            widths=(spec.v_dim,),
            **sizes,
        )
        found += [(keys, to_keys), (values, to_values)]
    if places.embedding is not None:
        paths, part = places.embedding
        site = EmbeddingSite(
            paths=paths,
            inputs=len(part.columns),
            widths=(part.width,),
            dtype=dtype_of(model.embedding),
        )
        found.append((site, (part,)))
    return found


def _routers(model: HybridModel, kinds: AdapterKinds) -> list[tuple[RouterSite, Parts]]:
    """List the routers whose logits adapters may change, and what their weights are made of."""
    found: list[tuple[RouterSite, Parts]] = []
    for paths, parts in _places(model).routers.items() if kinds.experts else ():
        weight = model.get_submodule(paths[0]).get_parameter("weight")
        site = RouterSite(
            paths=paths,
            inputs=weight.shape[1],
            widths=(weight.shape[0],),
            dtype=torch.promote_types(weight.dtype, torch.float32),
        )
        found.append((site, parts))
    return found


def _experts(model: HybridModel, kinds: AdapterKinds) -> list[tuple[ExpertsSite, Stacks]]:
    """List the mixtures whose experts adapters may change, and what an expert is made of."""
    found: list[tuple[ExpertsSite, Stacks]] = []
    for paths, stacks in _places(model).experts.items() if kinds.experts else ():
        experts: Any = model.get_submodule(paths[0])
        parts = [of_stacks[0] for of_stacks in stacks]
        site = ExpertsSite(
            paths=paths,
            inputs=len(parts[0].columns),
            widths=tuple(part.width for part in parts),
            dtype=experts.dtype,
            num_experts=len(experts.down_proj),
        )
        found.append((site, stacks))
    return found


def _norms(model: HybridModel, kinds: AdapterKinds) -> list[tuple[NormSite, list[str]]]:
    """List the norms whose weights adapters may replace, and the names of the weights."""
    found: list[tuple[NormSite, list[str]]] = []
    for paths, names in _places(model).norms.items() if kinds.saved_modules else ():
        weight = model.get_submodule(paths[0]).get_parameter(next(iter(names)))
        site = NormSite(
            paths=paths,
            inputs=len(weight),
            widths=(len(weight),),
            dtype=weight.dtype,
            names=tuple(names),
        )
        found.append((site, list(names.values())))
    return found


def _places(model: HybridModel) -> Places:
    if model not in _PLACES:
        _PLACES[model] = find_places(model)
    return _PLACES[model]


def _linears(module: Any, parts: Parts, path: str) -> Iterator[tuple[str, Any, Parts]]:
    """List suffix of the path, module and parts of a linear layer; of several layers, of each.

    A layer that sums over ranks is adapted before the sum.
    """
    if isinstance(module, SideBySide):
        sizes: list[Any] = [own.out_features for own in module.parts]
        for i, (own, stretch) in enumerate(zip(module.parts, _cut(parts, sizes), strict=True)):
            yield f".parts.{i}", own, stretch
    elif isinstance(module, SumOverRanks):
        for suffix, own, stretch in _linears(module.part, parts, path):
            yield f".part{suffix}", own, stretch
    elif isinstance(module, nn.Linear | ScaledLinear):
        yield ".product" if isinstance(module, SummedLinear) else "", module, parts
    else:
        raise UnsupportedError(f"adapters are not served: {path} is a {type(module).__name__}")


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
