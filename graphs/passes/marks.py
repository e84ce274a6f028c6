"""Marks of nodes: which half of a step they belong to, from the traced function down to Inductor;
and which layer, as far as our own passes.

The step marks the calls of its halves; the marks ride in node metadata, which functionalization
and Inductor keep as the origins of every kernel.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch.fx.traceback
from torch.fx import Node

_HALF, _STAGE, _LAYER = "half", "stage", "layer"


def in_half(index: int) -> AbstractContextManager[None]:
    """Mark what is traced in this context as part of one half."""
    context: AbstractContextManager[None] = torch.fx.traceback.annotate({_HALF: index})
    return context


def half_of(node: Node) -> int | None:
    """The half that a node is part of; None for what belongs to the whole step."""
    if node.op in ("placeholder", "get_attr", "output"):
        return None  # Dynamo makes an input where it is first used
    marked: int | None = node.meta.get("custom", {}).get(_HALF)
    return marked


def stage_of(node: Node) -> int | None:
    """The stage of its half that a node was scheduled in."""
    marked: int | None = node.meta.get("custom", {}).get(_STAGE)
    return marked


def set_stage(node: Node, stage: int) -> None:
    """Mark a node as scheduled in a stage of its half."""
    node.meta["custom"] = {**node.meta.get("custom", {}), _STAGE: stage}


def other_marks(node: Node) -> dict[str, Any]:
    """What else a node was marked with, by whoever traced it."""
    marks = node.meta.get("custom", {})
    return {key: value for key, value in marks.items() if key not in (_HALF, _STAGE)}


def clear_marks(node: Node) -> None:
    """Let a node belong to the whole step."""
    node.meta["custom"] = other_marks(node)


def keep_marks(new: Node, old: Node) -> None:
    """Mark a node that a pass made as the one that it stands for."""
    if "custom" in old.meta:
        new.meta["custom"] = old.meta["custom"]
    if _LAYER in old.meta:
        set_layer(new, old.meta[_LAYER])


def layer_of(node: Node) -> int | None:
    """The layer that a call is part of; None for those of the whole step."""
    layer: int | None = node.meta.get(_LAYER)
    return layer


def set_layer(node: Node, layer: int) -> None:
    """Mark a call as part of a layer."""
    node.meta[_LAYER] = layer


def clear_layer(node: Node) -> None:
    """Let a call belong to the whole step."""
    node.meta.pop(_LAYER, None)
