"""Linear layers of steps that run uncompiled, by the op that compiled ones take (merge_linears)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from torch_hybrid.graphs.passes.own_functions import with_own_functions
from torch_hybrid.ops.linear.op import IMPLEMENTATIONS, linear

# Numbers of a weight from which the op is worth its call, and those of replacements, by Python:
# decode of one sequence took 1.20 of torch's time where weights had up to 0.4M, and 0.91 with 1.6M.
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

    Args:
        step: a function that calls torch.
        impl: an implementation of ``linear``.
    """

    def taken(func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if _is_taken(input, weight, bias, impl):
            return by_rows(input, weight, bias, impl=impl)
        return F.linear(input, weight, bias)

    return with_own_functions(step, {F.linear: taken})


def by_rows(input: Tensor, weight: Tensor, bias: Tensor | None, *, impl: str) -> Tensor:
    """Compute ``F.linear`` by an implementation of the op ``linear``, which takes a matrix."""
    out = linear(input.reshape(-1, input.shape[-1]), [weight], [bias], impl=impl)
    return out.view(*input.shape[:-1], weight.shape[0])


def _is_taken(input: Tensor, weight: Tensor, bias: Tensor | None, impl: str) -> bool:
    return (
        type(weight) in (Tensor, nn.Parameter)  # a weight of its own kind multiplies itself
        and input.ndim >= 2
        and input.stride(-1) == 1
        and weight.is_contiguous()
        and weight.dtype == input.dtype
        and (bias is None or bias.dtype == input.dtype)
        and input.dtype in IMPLEMENTATIONS[impl].capability.dtypes
    )
