"""Places of a transformers model's linear layers in the model that was made of it.

The model is made once more, of weights that are never read. As they are merged, sorted, scaled and
cut, each keeps the names and rows that it came from (``checkpoint/content.py``).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.host.defaults import on_meta
from torch_hybrid.layers.indexed_latent_attention import IndexedLatentAttention
from torch_hybrid.layers.latent_attention import LatentAttention
from torch_hybrid.models.adapt import adapted
from torch_hybrid.models.architecture import Architecture
from torch_hybrid.models.checkpoint.content import Slice, Stored, leaves, narrow, slices
from torch_hybrid.models.checkpoint.files import Checkpoint
from torch_hybrid.models.checkpoint.unread import Unread
from torch_hybrid.models.families import family_of
from torch_hybrid.models.hybrid_model import HybridModel
from torch_hybrid.models.transformers_weights import make_unread


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """Consecutive outputs of a linear layer of ours that come from one layer of transformers.

    Attributes:
        source: name of that layer.
        rows: [n] int64, its output that each of ours comes from.
        factors: [n] float64, the factor on each.
    """

    source: str
    rows: Tensor
    factors: Tensor

    @property
    def width(self) -> int:
        """Number of outputs."""
        return len(self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Places of a model's linear layers.

    Attributes:
        linears: parts of each linear layer of ours, by its path.
        shapes: outputs and inputs of each linear layer of transformers, by its name.
        refused: why a layer of transformers can have no adapter, by its name.
    """

    linears: Mapping[str, tuple[Part, ...]]
    shapes: Mapping[str, tuple[int, int]]
    refused: Mapping[str, str]


def find_places(model: HybridModel) -> Places:
    """Find where the linear layers of transformers are in a model.

    Raises:
        UnsupportedError: a linear layer of ours is not made of whole rows of theirs.
    """
    twin, architecture = _unread_twin(model.hf_model)
    shapes = {
        name: (module.out_features, module.in_features)
        for name, module in twin.named_modules()
        if isinstance(module, nn.Linear)
    }
    made = adapted(twin, architecture)
    names = _paths_of(model)
    read_apart = {
        id(module.kv_b_proj)
        for module in made.modules()
        if isinstance(module, LatentAttention | IndexedLatentAttention)
    }
    linears: dict[str, tuple[Part, ...]] = {}
    refused: dict[str, str] = {}
    for path, module in made.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            if not isinstance(weight.data, Unread) and not isinstance(weight, Unread):
                continue
            sources = {leaf.stored.name for leaf in leaves(weight.content)}
            is_called = type(module) is nn.Linear and name == "weight"
            why = ""
            if not is_called:
                why = f"its weight is part of {path}.{name}"
            elif id(module) in read_apart:
                why = f"{path} multiplies by parts of its weight"
            elif len(names.get(path, ())) != 1:
                why = f"several layers share {path}"
            for source in sources:
                if why:
                    refused[source.removesuffix(".weight")] = why
            if not why:
                linears[path] = _parts(weight)
    return Places(linears=linears, shapes=shapes, refused=refused)


def _paths_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """List, by each path of a module, all paths of that module within decoder layers."""
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(path)
    return {path: tuple(own) for own in paths.values() for path in own}


def _parts(weight: Any) -> tuple[Part, ...]:
    """Find the parts of a linear layer's weight [outputs, inputs], which is unread."""
    first, last = _column(weight, 0), _column(weight, weight.shape[1] - 1)
    is_whole = torch.equal(first.factors, last.factors) and not first.columns.any()
    is_whole &= torch.equal(first.rows, last.rows) and first.names == last.names
    if not is_whole or not bool((last.columns == weight.shape[1] - 1).all()):
        raise UnsupportedError(f"{first.names[0]} is not kept by whole rows")
    cuts = [i for i in range(1, len(first.names)) if first.names[i] != first.names[i - 1]]
    return tuple(
        Part(
            source=first.names[start].removesuffix(".weight"),
            rows=first.rows[start:end],
            factors=first.factors[start:end],
        )
        for start, end in pairwise([0, *cuts, len(first.names)])
    )


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of a weight: the stored tensor of each number, its row and column there, and the
    factor on it."""

    names: list[str]
    rows: Tensor
    columns: Tensor
    factors: Tensor


def _column(weight: Any, column: int) -> _Column:
    """Describe a column of an unread weight [outputs, inputs]."""
    content = narrow(weight.content, 1, column, 1)
    places = torch.arange(weight.shape[0], dtype=torch.int64, device="cpu")
    names = [""] * weight.shape[0]
    source = torch.empty_like(places)
    factors = torch.ones(weight.shape[0], dtype=torch.float64, device="cpu")
    for part, where in slices(content, places[:, None]):
        own = where.flatten()
        numbers = torch.arange(len(own), dtype=torch.int64, device="cpu")
        source[own] = int(part.where.storage_offset()) + numbers * part.where.stride(0)
        for step in part.steps:
            if isinstance(step, Tensor):
                factors[own] *= step.double().flatten()
            elif callable(step):
                raise UnsupportedError(f"{part.stored.name} is computed as it is read")
        for place in own.tolist():
            names[place] = part.stored.name
    depth = weight.shape[1]
    return _Column(names, source // depth, source % depth, factors)


def _unread_twin(model: Any) -> tuple[Any, Architecture]:
    """Make a transformers model like ``model`` with unread weights, named by their own paths."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"
    with on_meta():
        empty = type(model)(config)
    kept = empty.state_dict().keys()
    weights = dict(empty.named_parameters())  # a shared one comes once
    weights |= {name: buffer for name, buffer in empty.named_buffers() if name in kept}
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:  # as in the files of the whole model
        weights = {re.sub(r"^model\.", "model.language_model.", k): v for k, v in weights.items()}
    stored = {name: _stored(name, weight) for name, weight in weights.items()}
    architecture = Architecture.of(config, family_of(config.model_type))
    checkpoint = Checkpoint(folder=Path(), tensors=stored, stamps={})
    host = torch.device("cpu")
    twin = make_unread(checkpoint, architecture, config.dtype or torch.float32, host)
    for path, weight in list(twin.named_parameters(remove_duplicate=False)):
        parent, _, name = path.rpartition(".")
        own = Unread(Slice.whole(_stored(path, weight)), weight.dtype, host)
        twin.get_submodule(parent)._parameters[name] = nn.Parameter(own, requires_grad=False)
    return twin, architecture


def _stored(name: str, weight: Tensor) -> Stored:
    return Stored(name=name, file=Path(), start=0, dtype=weight.dtype, shape=(*weight.shape,))
