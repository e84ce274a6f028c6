"""What ``Runner`` refuses of its options, before anything is allocated."""

from __future__ import annotations

import os
from typing import Any

from torch_hybrid.backends.select import Backends
from torch_hybrid.specs import LayerTable


def check_types(model: Any, backends: Any) -> None:
    """Raise TypeError unless ``model`` is an adapted one and ``backends`` are names, or None."""
    if not isinstance(getattr(model, "table", None), LayerTable):
        raise TypeError(
            f"model must come from th.from_pretrained or th.adapt, got {type(model).__name__}"
        )
    if backends is not None and not isinstance(backends, Backends):
        raise TypeError(f"backends must be a th.Backends or None, got {backends!r}")


def check_artefact(artefact: str | os.PathLike[str] | None, *, compiles: bool) -> None:
    """Raise ValueError if there is an artefact for a runner that compiles nothing."""
    if artefact is not None and not compiles:
        raise ValueError("an artefact has compiled steps, got compile=False")


def check_max_tokens(max_tokens: int, chunk_size: int) -> None:
    """Raise ValueError unless a step holds a chunk of the layers that prefill in chunks."""
    if max_tokens < chunk_size:
        what = f"hold at least one chunk of {chunk_size} tokens"
        raise ValueError(
            f"max_tokens must {what if chunk_size > 1 else 'be at least 1'}, got {max_tokens}"
        )
