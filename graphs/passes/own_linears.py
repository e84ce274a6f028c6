"""Linear layers of steps that run uncompiled, by the op that compiled ones take (merge_linears)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torch_hybrid.ops.linear.op import IMPLEMENTATIONS, linear

# Numbers of a weight from which the op is worth its call, and those of a mode, by Python: decode of
# one sequence took 1.20 of torch's time where weights had up to 0.4M, and 0.91 with 1.6M.
LARGE = 1 << 20


def has_large_linears(modules: Iterable[nn.Module]) -> bool:
    """Say whether reading weights takes most of a decode step, and calls by Python do not."""
    return any(
        isinstance(module, nn.Linear) and module.weight.numel() >= LARGE for module in modules
    )


def with_own_linears(step: Callable[..., Tensor], impl: str) -> Callable[..., Tensor]:
    """Have a step of a model that runs as it is give its linear layers to ``linear``.

    torch reads the weights of a few rows at half of the machine's rate or less. Reading them is
    most of a decode step.
    """

    def stepped(*inputs: Any) -> Tensor:
        with _OwnLinears(impl):
            return step(*inputs)

    return stepped


class _OwnLinears(TorchFunctionMode):
    """Torch's functions as a model calls them, but for ``F.linear`` of what the op takes.

    Args:
        impl: an implementation of ``linear``.
    """

    def __init__(self, impl: str) -> None:
        super().__init__()
        self._impl = impl

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        return (self._linear if func is F.linear else func)(*args, **kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        dtypes = {input.dtype, weight.dtype} | ({bias.dtype} if bias is not None else set())
        is_taken = (
            type(weight) in (Tensor, nn.Parameter)  # a weight of its own kind multiplies itself
            and input.ndim >= 2
            and input.stride(-1) == 1
            and weight.is_contiguous()
            and len(dtypes) == 1
            and input.dtype in IMPLEMENTATIONS[self._impl].capability.dtypes
        )
        if not is_taken:
            return F.linear(input, weight, bias)
        rows = input.reshape(-1, input.shape[-1])
        out = linear(rows, [weight], [bias], impl=self._impl)
        return out.view(*input.shape[:-1], weight.shape[0])
