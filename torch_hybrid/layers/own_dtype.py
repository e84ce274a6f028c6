"""Mixers under ``torch.autocast``: they compute in the dtype of their weights and caches."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

Forward = TypeVar("Forward", bound=Callable[..., Any])


def in_own_dtype(
    num_inputs: int, dtype_of: Callable[[Any], torch.dtype] | None = None
) -> Callable[[Forward], Forward]:
    """Exclude a mixer's ``forward`` from autocast, which knows nothing of its caches.

    If autocast is on, the first ``num_inputs`` arguments are cast to ``dtype_of(mixer)``. By
    default this is the dtype of the mixer's weights, or of its pools (the last argument) if it has
    no weights. The output has that dtype too.
    """

    def decorate(forward: Forward) -> Forward:
        @wraps(forward)
        def run(self: Any, x: Tensor, *args: Any, **options: Any) -> Any:
            if not torch.is_autocast_enabled(x.device.type):
                return forward(self, x, *args, **options)
            if dtype_of is not None:
                dtype = dtype_of(self)
            elif (own := next(self.parameters(), None)) is not None:
                dtype = own.dtype
            else:
                dtype = next(iter((x, *args, *options.values())[-1].values())).dtype
            inputs = [tensor.to(dtype) for tensor in (x, *args[: num_inputs - 1])]
            with torch.autocast(x.device.type, enabled=False):
                return forward(self, *inputs, *args[num_inputs - 1 :], **options)

        return run  # type: ignore[return-value]

    return decorate
