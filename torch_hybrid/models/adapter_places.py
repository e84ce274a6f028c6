"""Places of a transformers model's linear layers, embedding and norms in the model made of it.

The model is made once more, of weights that are never read. As they are merged, sorted, scaled and
cut, each keeps the names and rows that it came from (``checkpoint/content.py``).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.host.defaults import on_meta
from torch_hybrid.layers.expert_parallel import ExpertParallel, TokensOfRank
from torch_hybrid.layers.fused_experts import FusedExperts
from torch_hybrid.layers.indexed_latent_attention import IndexedLatentAttention
from torch_hybrid.layers.latent_attention import LatentAttention
from torch_hybrid.layers.vocabulary import EmbeddingOverRanks
from torch_hybrid.models.adapt import adapted
from torch_hybrid.models.architecture import Architecture
from torch_hybrid.models.checkpoint.content import (
    Content,
    Slice,
    Stored,
    leaves,
    name_of,
    narrow,
    reshape,
    slices,
)
from torch_hybrid.models.checkpoint.files import Checkpoint
from torch_hybrid.models.checkpoint.unread import Unread
from torch_hybrid.models.families import architecture_of
from torch_hybrid.models.hybrid_model import HybridModel
from torch_hybrid.models.shard import cut
from torch_hybrid.models.transformers_weights import make_unread
from torch_hybrid.ranks import SummedLinear

Paths = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """Consecutive outputs of a linear layer of ours that come from one layer of transformers.

    Attributes:
        source: name of that layer.
        rows: [n] int64, its output that each of ours comes from.
        factors: [n] float64, the factor on each.
        columns: [m] int64, its input that each of ours comes from.
    """

    source: str
    rows: Tensor
    factors: Tensor
    columns: Tensor

    @classmethod
    def whole(cls, source: str, num_rows: int, num_columns: int) -> Part:
        """Take all of a layer of transformers."""
        return cls(
            source=source,
            rows=torch.arange(num_rows, dtype=torch.int64, device="cpu"),
            factors=torch.ones(num_rows, dtype=torch.float64, device="cpu"),
            columns=torch.arange(num_columns, dtype=torch.int64, device="cpu"),
        )

    @property
    def width(self) -> int:
        """Number of outputs."""
        return len(self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Places of a model's layers, each by its paths in the model.

    Attributes:
        linears: parts of each linear layer of ours.
        latents: part of ``kv_b_proj`` of each latent attention.
        norms: weights of each norm of rows as wide as the model: those of transformers, by name.
        routers: part of each router's weight.
        experts: parts of an expert of each mixture: gate if there is one, up, down; each of one or
            more stacks of transformers, whose experts follow one another.
        embedding: paths of the embedding, and the whole of transformers'; None: it is scaled.
        shapes: outputs and inputs of each linear layer and router of transformers, and width and
            number of tokens of each embedding, by its name.
        stacks: shape of each weight of experts of transformers, [E, outputs, inputs], by its name,
            in the order in which its module has them.
        refused: why a layer of transformers can have no adapter, by its name.
    """

    linears: Mapping[Paths, tuple[Part, ...]]
    latents: Mapping[Paths, tuple[Part, ...]]
    norms: Mapping[Paths, Mapping[str, str]]
    routers: Mapping[Paths, tuple[Part, ...]]
    experts: Mapping[Paths, tuple[tuple[Part, ...], ...]]
    embedding: tuple[Paths, Part] | None
    stacks: Mapping[str, tuple[int, ...]]
    shapes: Mapping[str, tuple[int, int]]
    refused: Mapping[str, str]


def find_places(model: HybridModel) -> Places:
    """Find where the linear layers, the embedding and the norms of transformers are in a model.

    Raises:
        UnsupportedError: a linear layer of ours is not made of whole rows of theirs.
    """
    twin, architecture = _unread_twin(model.hf_model)
    shapes = {
        name: (module.out_features, module.in_features)
        for name, module in twin.named_modules()
        if isinstance(module, nn.Linear)
    } | {
        name: (module.embedding_dim, module.num_embeddings)
        for name, module in twin.named_modules()
        if isinstance(module, nn.Embedding)
    }
    stacked = {name: (*own.shape,) for name, own in twin.named_parameters() if own.ndim == 3}
    made = adapted(twin, architecture)
    if model.ranks is not None:
        is_sent = any(isinstance(module, TokensOfRank) for module in model.modules())
        cut(made, model.ranks, "all_to_all" if is_sent else "tensor")
    paths = _paths_of(made)
    attentions = {
        module.kv_b_proj: paths[module]
        for module in made.modules()
        if isinstance(module, LatentAttention | IndexedLatentAttention)
    }
    embedding = made.embedding
    table = embedding.part if isinstance(embedding, EmbeddingOverRanks) else embedding
    linears: dict[Paths, tuple[Part, ...]] = {}
    latents: dict[Paths, tuple[Part, ...]] = {}
    norms: dict[Paths, dict[str, str]] = {}
    routers: dict[Paths, tuple[Part, ...]] = {}
    experts: dict[Paths, tuple[tuple[Part, ...], ...]] = {}
    sent = {each.experts for each in made.modules() if isinstance(each, ExpertParallel)}
    of_tokens: tuple[Paths, Part] | None = None
    refused: dict[str, str] = {}
    for module, own in paths.items():
        found = {name: weight for name, weight in module.named_parameters(recurse=False)}
        weights = {name: weight for name, weight in found.items() if isinstance(weight, Unread)}
        if _is_router(module):
            routers[own] = [part] = _parts(weights.pop("weight").content)
            shapes[part.source] = part.width, len(part.columns)
        if module in attentions:
            latents[attentions[module]] = _parts(weights["weight"].content)
        elif type(module) in (nn.Linear, SummedLinear):
            linears[own] = _parts(weights["weight"].content)
        elif isinstance(module, FusedExperts) and module not in sent:
            experts[own] = _parts_of_experts(module, stacked)
        elif isinstance(module, nn.Embedding) and module is table and not _steps(weights["weight"]):
            source = name_of(weights["weight"].content).removesuffix(".weight")
            of_tokens = paths[embedding], Part.whole(source, *shapes[source])
        elif _is_norm(module, weights, made.embed_dim):
            norms[own] = {name: name_of(weight.content) for name, weight in weights.items()}
        else:
            for name, weight in weights.items():
                for leaf in leaves(weight.content):
                    source = leaf.stored.name.removesuffix(".weight")
                    refused[source] = f"its weight is part of {own[0]}.{name}"
    sources = {part.source for each in experts.values() for parts in each for part in parts}
    return Places(
        linears=linears,
        latents=latents,
        norms=norms,
        routers=routers,
        experts=experts,
        stacks={name: shape for name, shape in stacked.items() if name in sources},
        embedding=of_tokens,
        shapes=shapes,
        refused=refused,
    )


def _paths_of(model: nn.Module) -> dict[nn.Module, Paths]:
    """List all paths of each module: several layers may share it."""
    paths: dict[nn.Module, Paths] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths[module] = (*paths.get(module, ()), path)
    return paths


def _is_norm(module: nn.Module, weights: Mapping[str, Any], width: int) -> bool:
    """Tell whether a module has nothing but a weight for each number of a row, as it is stored.

    Torch's own norms take one weight for all rows.
    """
    return (
        bool(weights)
        and not module._modules
        and "Norm" in type(module).__name__
        and not isinstance(module, nn.LayerNorm | nn.RMSNorm)
        and all(weight.shape == (width,) and not _steps(weight) for weight in weights.values())
    )


def _steps(weight: Any) -> bool:
    """Tell whether the values of an unread weight are others than those that are stored."""
    return any(leaf.steps for leaf in leaves(weight.content))


def _is_router(module: nn.Module) -> bool:
    """Tell whether a module chooses experts by the product of its only matrix."""
    weight = module._parameters.get("weight")
    return "Router" in type(module).__name__ and weight is not None and weight.ndim == 2


def _parts_of_experts(
    module: FusedExperts, stacked: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[Part, ...], ...]:
    """Find gate, up and down in the stacks of transformers, whose experts keep their order.

    A stack has gate above up, or each of them has its own.
    """
    found: list[tuple[Part, ...]] = []
    for weight, num_parts in ((module.gate_up_proj, 1 + module.has_gate), (module.down_proj, 1)):
        content = cast(Any, weight).content
        stacks: list[list[Part]] = []
        begin = 0
        while begin < len(weight):
            whole = _parts_of_expert(content, begin)
            num_experts, outputs, _ = stacked[whole[0].source]
            last = _parts_of_expert(content, begin + num_experts - 1)
            for part, other in zip(whole, last, strict=True):
                if not torch.equal(other.rows, part.rows + (num_experts - 1) * outputs):
                    raise UnsupportedError(f"experts of {part.source} are not kept in their order")
            cuts = [rows for part in whole for rows in part.rows.chunk(num_parts // len(whole))]
            owners = whole * (num_parts // len(whole))
            stacks.append(
                [
                    replace(part, rows=rows, factors=torch.ones_like(rows, dtype=torch.float64))
                    for part, rows in zip(owners, cuts, strict=True)
                ]
            )
            begin += num_experts
        found += zip(*stacks, strict=True)
    return tuple(found)


def _parts_of_expert(content: Content, expert: int) -> tuple[Part, ...]:
    """Find the parts of one expert of a stack."""
    return _parts(reshape(narrow(content, 0, expert, 1), (*content.shape[1:],)))


def _parts(content: Content) -> tuple[Part, ...]:
    """Find the parts of a linear layer's weight [outputs, inputs], which is unread."""
    outputs, inputs = content.shape
    first, last = _line(content, 1, 0), _line(content, 1, inputs - 1)
    top, bottom = _line(content, 0, 0), _line(content, 0, outputs - 1)
    is_whole = torch.equal(first.factors, last.factors) and torch.equal(first.rows, last.rows)
    is_whole &= first.names == last.names and torch.equal(top.columns, bottom.columns)
    for line, column in ((first, top.columns[0]), (last, top.columns[-1])):
        is_whole &= bool((line.columns == column).all())
    if not is_whole:
        raise UnsupportedError(f"{first.names[0]} is not kept by whole rows")
    cuts = [i for i in range(1, outputs) if first.names[i] != first.names[i - 1]]
    return tuple(
        Part(
            source=first.names[start].removesuffix(".weight"),
            rows=first.rows[start:end],
            factors=first.factors[start:end],
            columns=top.columns,
        )
        for start, end in pairwise([0, *cuts, outputs])
    )


@dataclass(frozen=True, slots=True)
class _Line:
    """A row or a column of a weight: the stored tensor of each number, its row and column there,
    and the factor on it."""

    names: list[str]
    rows: Tensor
    columns: Tensor
    factors: Tensor


def _line(content: Content, dim: int, place: int) -> _Line:
    """Describe the numbers of an unread weight [outputs, inputs] at a place along ``dim``."""
    count = content.shape[1 - dim]
    content = narrow(content, dim, place, 1)
    places = torch.arange(count, dtype=torch.int64, device="cpu")
    names = [""] * count
    rows, columns = torch.empty_like(places), torch.empty_like(places)
    factors = torch.ones(count, dtype=torch.float64, device="cpu")
    for part, where in slices(content, places.unsqueeze(dim)):
        own = where.flatten()
        numbers = torch.arange(len(own), dtype=torch.int64, device="cpu")
        source = int(part.where.storage_offset()) + numbers * part.where.stride(1 - dim)
        depth = part.stored.shape[-1]
        rows[own], columns[own] = source // depth, source % depth
        for step in part.steps:
            if isinstance(step, Tensor):
                factors[own] *= step.double().flatten()
            elif callable(step):
                raise UnsupportedError(f"{part.stored.name} is computed as it is read")
        for each in own.tolist():
            names[each] = part.stored.name
    return _Line(names, rows, columns, factors)


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
    architecture = architecture_of(config)
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
