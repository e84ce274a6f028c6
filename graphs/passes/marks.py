"""Marks of nodes: the half of a step and the stage that a node belongs to, and its layer.

The step marks the calls of its halves. Marks of halves and stages stand in node metadata, which
functionalization and Inductor keep as the origins of every kernel. Only this package's passes see
marks of layers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch.fx.traceback
from torch.fx import Graph, Node

_HALF, _STAGE, _LAYER = "half", "stage", "layer"


def in_half(index: int) -> AbstractContextManager[None]:
    """Mark what is traced in this context as part of one half."""
    context: AbstractContextManager[None] = torch.fx.traceback.annotate({_HALF: index})
    return context


def half_of(node: Node) -> int | None:
    """Read the half that a node belongs to; None if it belongs to the whole step."""
    if node.op in ("placeholder", "get_attr", "output"):
        return None  # Dynamo makes an input where it is first used
    marked: int | None = node.meta.get("custom", {}).get(_HALF)
    return marked


def stage_of(node: Node) -> int | None:
    """Read the stage, counted in its half, that a node was scheduled in; None if there is none."""
    marked: int | None = node.meta.get("custom", {}).get(_STAGE)
    return marked


def set_stage(node: Node, stage: int) -> None:
    """Mark a node as scheduled in a stage of its half."""
    node.meta["custom"] = {**node.meta.get("custom", {}), _STAGE: stage}


def other_marks(node: Node) -> dict[str, Any]:
    """Read the marks of a node that are not this package's."""
    marks = node.meta.get("custom", {})
    return {key: value for key, value in marks.items() if key not in (_HALF, _STAGE)}


def clear_marks(node: Node) -> None:
    """Make a node part of the whole step."""
    node.meta["custom"] = other_marks(node)


def keep_marks(new: Node, old: Node) -> None:
    """Copy the marks of a node to the node that a pass puts in its place."""
    if "custom" in old.meta:
        new.meta["custom"] = old.meta["custom"]
    if _LAYER in old.meta:
        set_layer(new, old.meta[_LAYER])


def maker(graph: Graph, old: Node) -> Callable[..., Node]:
    """Return what makes calls of functions, or of methods by name, with the marks of ``old``."""

    def made(target: Callable[..., Any] | str, *args: Any, **options: Any) -> Node:
        call: Any = graph.call_method if isinstance(target, str) else graph.call_function
        new: Node = call(target, args, options)
        keep_marks(new, old)
        return new

    return made


def layer_of(node: Node) -> int | None:
    """Read the layer that a call belongs to; None if it belongs to the whole step."""
    layer: int | None = node.meta.get(_LAYER)
    return layer


def set_layer(node: Node, layer: int) -> None:
    """Mark a call as part of a layer."""
    node.meta[_LAYER] = layer


def clear_layer(node: Node) -> None:
    """Make a call part of no layer, but of the whole step."""
    node.meta.pop(_LAYER, None)
