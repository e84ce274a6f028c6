"""Torch's functions as a model calls them that runs as it is, with some of them replaced.

Passes do the same in graphs. Each of their files makes the replacements for its own work.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from torch.overrides import TorchFunctionMode

P = ParamSpec("P")
R = TypeVar("R")

# By a function of torch, or its name: what is called instead, with the function and its arguments.
Replacements = Mapping[object, Callable[..., Any]]


def with_own_functions(step: Callable[P, R], replaced: Replacements) -> Callable[P, R]:
    """Have a step call replacements, which themselves call torch's functions or a caller's own."""

    def stepped(*args: P.args, **kwargs: P.kwargs) -> R:
        with _OwnFunctions(replaced):
            return step(*args, **kwargs)

    return stepped


class _OwnFunctions(TorchFunctionMode):
    """Mode of this thread in which some of torch's functions are replaced."""

    def __init__(self, replaced: Replacements) -> None:
        super().__init__()
        self._replaced = replaced
        self._has_names = any(isinstance(each, str) for each in replaced)

    def __torch_function__(
        self,
        func: Any,
        types: Collection[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        replacement = self._replaced.get(func)
        if replacement is None and self._has_names:
            replacement = self._replaced.get(getattr(func, "__name__", ""))
        if replacement is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return replacement(func, *args, **kwargs or {})
