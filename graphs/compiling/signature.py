"""Signatures of modules: all that a trace can see of a module but the values of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

LAYER_NUMBERS = {"layer_idx", "layer_id"}  # resolved through the table while tracing
_CHOSEN = {"choice"}  # implementation of an op: a runner sets it on all modules before it traces
_HELD_APART = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)

# Maps an object of an unknown class to its fact.
Unknown = Callable[[Any], object]


def identity(value: Any) -> object:
    """Name an object by its identity, which no other object of this process shares."""
    return type(value), id(value)


def signature(module: nn.Module, unknown: Unknown = identity) -> tuple[Any, ...]:
    """Compute a key, equal for modules whose traces differ only in tensors and layer number."""
    own = vars(module) | _numbered_hooks(module)
    facts = {
        name: fact(value, unknown)
        for name, value in own.items()
        if name not in LAYER_NUMBERS | _HELD_APART | _CHOSEN and not isinstance(value, Tensor)
    }
    tensors = [(name, tensor_facts(tensor)) for name, tensor in own_tensors(module)]
    children = [
        (name, None if child is None else signature(child, unknown))
        for name, child in module._modules.items()
    ]
    return type(module), tuple(sorted(facts.items())), tuple(tensors), tuple(children)


def fact(value: Any, unknown: Unknown = identity) -> Any:
    """Turn a value into one that is compared by its contents."""
    if isinstance(value, _PLAIN):
        return type(value), repr(value)
    if isinstance(value, tuple | list):
        return type(value), tuple(fact(item, unknown) for item in value)
    if isinstance(value, Mapping):
        items = ((fact(key, unknown), fact(item, unknown)) for key, item in value.items())
        return type(value), tuple(items)
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if field.name not in LAYER_NUMBERS]
        return type(value), tuple(fact(getattr(value, name), unknown) for name in names)
    return unknown(value)


def own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """List the tensors that a module holds itself, by name: parameters, buffers and attributes."""
    held = [*module._parameters.items(), *module._buffers.items(), *vars(module).items()]
    return [(name, value) for name, value in held if isinstance(value, Tensor)]


def tensor_facts(tensor: Tensor) -> tuple[Any, ...]:
    """Describe a tensor by its class and layout."""
    layout = tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device)
    return type(tensor), *layout, tensor.requires_grad


def _numbered_hooks(module: nn.Module) -> dict[str, dict[int, Any]]:
    """Number a module's hooks among its own: torch counts the hooks of all modules."""
    hooks = {name: value for name, value in vars(module).items() if "_hooks" in name and value}
    place = {key: i for i, key in enumerate(sorted({key for own in hooks.values() for key in own}))}
    return {name: {place[key]: hook for key, hook in own.items()} for name, own in hooks.items()}
