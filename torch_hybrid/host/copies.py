"""Copies of modules that share what copies need not have, and what cannot be copied."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from types import MethodType
from typing import Any, TypeVar

from torch import nn

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def copy_modules(
    model: ModuleT, instead: Mapping[int, Any], copied: tuple[type, ...] = ()
) -> ModuleT:
    """Copy a model's modules, and the containers that they have; all else is shared.

    A copy of all else could fail: of a lock, or a logger with a file.

    Args:
        model: the model.
        instead: what the copy has instead of tensors and other values of these ids.
        copied: classes of further values that are copied.
    """
    shared: dict[int, Any] = {}
    seen, todo = set[int](), list[Any]([model])
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        match value:
            case nn.Module():
                todo += vars(value).values()
            case dict():
                todo += value.values()
            case list() | tuple() | set() | frozenset():
                todo += value
            case MethodType():
                todo.append(value.__self__)
            case partial():
                todo += [value.func, *value.args, *value.keywords.values()]
            case _ if not isinstance(value, copied):
                shared[id(value)] = value
    return copy.deepcopy(model, shared | dict(instead))
