"""Sizes of a model's weights, by the part that holds them and by their format."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from torch_hybrid.layers.fused_experts import FusedExperts
from torch_hybrid.layers.integers import IntegerEmbedding
from torch_hybrid.layers.scaled_linear import ScaledLinear
from torch_hybrid.ops.formats.integers import INT4
from torch_hybrid.ops.formats.stored_weights import group_of, has_zeros, name_of


@dataclass(slots=True)
class Stored:
    """Weights of one part of a model that have one format.

    Attributes:
        layers: ids of the layers that have such weights.
        num_bytes: bytes of the weights, without scales.
        scale_bytes: bytes of the scales, zero points included.
    """

    layers: set[int] = field(default_factory=set)
    num_bytes: int = 0
    scale_bytes: int = 0


def weights_by_part(model: Any) -> dict[tuple[str, str], Stored]:
    """Sum the sizes of a model's weights by part and format; a tied weight counts once.

    Returns:
        Sizes by part (a mixer's op, "experts", "feed-forward", "norms", "embedding", "head") and
        format ("bfloat16", "int4 of 32": INT4 in groups of 32).
    """
    found: dict[tuple[str, str], Stored] = defaultdict(Stored)
    seen: set[Tensor] = set()
    for part, layer_id, module in _parts(model):
        for form, weight, scales in _weights(module):
            if weight in seen:
                continue
            seen.add(weight)
            name = "norms" if weight.ndim < 2 and part not in ("embedding", "head") else part
            stored = found[name, form]
            stored.num_bytes += weight.nbytes
            stored.scale_bytes += 0 if scales is None else scales.nbytes
            if layer_id is not None:
                stored.layers.add(layer_id)
    return dict(found)


def _parts(model: Any) -> Iterator[tuple[str, int | None, nn.Module]]:
    """List modules with their part and layer: those of layers first, then all of the model."""
    layers = zip(model.all_layers, model.table.layers, strict=True)
    for layer_id, (layer, entries) in enumerate(layers):
        kinds = {model.mixer_names.get(entry.kind): entry.kind for entry in entries}
        for kind, module in _within(layer, kinds):
            is_mixture = isinstance(module, FusedExperts)
            yield kind or ("experts" if is_mixture else "feed-forward"), layer_id, module
    for module in model.modules():
        is_table = isinstance(module, nn.Embedding | IntegerEmbedding)
        is_head = isinstance(module, nn.Linear | ScaledLinear)
        yield "embedding" if is_table else "head" if is_head else "norms", None, module


def _within(
    module: nn.Module, kinds: Mapping[str | None, str], kind: str | None = None
) -> Iterator[tuple[str | None, nn.Module]]:
    """List a module's descendants, each with the kind of mixer that it belongs to, if any."""
    for name, child in module.named_children():
        has_outputs = "o_proj" in dict(child.named_children())
        own = kinds.get(name) or kind or (kinds.get(None) if has_outputs else None)
        yield own, child
        yield from _within(child, kinds, own)


def _weights(module: nn.Module) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """List a module's own weights, each with its format and its scales."""
    own = dict(module.named_parameters(recurse=False))
    scales: dict[str, Tensor | None] = {}
    match module:
        case FusedExperts():
            scales = {
                "gate_up_proj": own.pop("gate_up_scales", None),
                "down_proj": own.pop("down_scales", None),
            }
        case ScaledLinear() | IntegerEmbedding():
            scales = {"weight": own.pop("scales")}
    for name, weight in own.items():
        scale = scales.get(name)
        yield _format_of(weight, scale), weight, scale


def _format_of(weight: Tensor, scales: Tensor | None) -> str:
    if scales is None:
        return str(weight.dtype).removeprefix("torch.")
    name = name_of(weight.dtype)
    if weight.dtype != INT4:
        return name
    zeros = " with zero points" if has_zeros(weight, scales) else ""
    return f"{name} of {group_of(weight, scales)}{zeros}"
