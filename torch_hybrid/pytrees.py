"""Dataclasses as pytrees, under names that ``torch.export`` and AOTInductor packages can look up.

A package keeps the structure of its inputs as text. Tensors are inputs of the graph; constants are
part of it, so they are in that text, as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_CLASSES: dict[str, type] = {}  # dataclasses that a constant may contain
_FIELDS: dict[type, Callable[[Any], tuple[Any, ...]]] = {}  # get the fields, last first


def register_value(cls: type) -> None:
    """Register a dataclass as a pytree: its fields are its children, by name."""
    pytree.register_dataclass(cls, serialized_type_name=_name(cls))
    names = [field.name for field in reversed(fields(cls))]
    get = attrgetter(*names)  # with one name it returns no tuple
    _FIELDS[cls] = get if len(names) > 1 else lambda value: (get(value),)
    torch.serialization.add_safe_globals([cls])  # an exported program has example inputs


def register_part(cls: type) -> None:
    """Register a frozen dataclass that may be within a constant.

    Its fields are strings, numbers, None, other parts, and tuples of those.
    """
    _CLASSES[_name(cls)] = cls
    torch.serialization.add_safe_globals([cls])


def register_constant(cls: type) -> None:
    """Register a frozen dataclass as a pytree without leaves, which a graph holds as it is.

    Other dataclasses within it are registered by ``register_part``.
    """
    pytree.register_constant(cls)
    register_part(cls)
    # register_constant has no argument for serialization.
    pytree.SUPPORTED_SERIALIZED_TYPES[cls] = pytree._SerializeNodeDef(
        cls,
        _name(cls),
        lambda context: json.dumps(_encoded(context.value)),
        lambda text: pytree.ConstantNode(_decoded(json.loads(text))),
    )
    pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[_name(cls)] = cls


def _name(cls: type) -> str:
    return f"torch_hybrid.{cls.__name__}"


@dataclass(frozen=True, slots=True)
class OnHost:
    """A tensor of a step's input that stays on the host.

    A kernel launch reads it: a captured graph keeps the values that it had at the capture.
    """

    value: Tensor


register_value(OnHost)


def _encoded(value: Any) -> Any:
    """Encode a constant for JSON: tuples become lists, a dataclass its name and fields."""
    if isinstance(value, tuple):
        return [_encoded(item) for item in value]
    if is_dataclass(value):
        items = {field.name: _encoded(getattr(value, field.name)) for field in fields(value)}
        return {"class": _name(type(value)), "fields": items}
    return value


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_decoded(item) for item in value)
    if isinstance(value, dict):
        items = {name: _decoded(item) for name, item in value["fields"].items()}
        return _CLASSES[value["class"]](**items)
    return value


def tensors_of(value: Any) -> tuple[list[Tensor], list[object]]:
    """Find the tensors within a value, in the order of ``pytree.tree_flatten``, and its structure.

    Registered values, tuples, lists, dicts and None may nest; all else counts as constant. This
    takes a quarter of the time of ``tree_flatten``.
    """
    tensors: list[Tensor] = []
    structure: list[object] = []
    rest = [value]
    while rest:
        node = rest.pop()
        if isinstance(node, Tensor):
            tensors.append(node)
            structure.append(Tensor)
        elif (fields_of := _FIELDS.get(type(node))) is not None:
            structure.append(type(node))
            rest.extend(fields_of(node))
        elif isinstance(node, tuple | list):
            structure.append((type(node), len(node)))
            rest.extend(reversed(node))
        elif isinstance(node, dict):
            structure.append(tuple(node))
            rest.extend(reversed(node.values()))
        else:
            structure.append(node)
    return tensors, structure
