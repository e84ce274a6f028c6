"""Linear layers of steps that run uncompiled, by the op that compiled ones take (merge_linears)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_hybrid.ops.core.registration import NAMESPACE
from torch_hybrid.ops.linear.op import IMPLEMENTATIONS

_LINEAR = getattr(torch.ops, NAMESPACE).linear  # arguments are the model's: not checked once more
# Numbers of a weight from which the op is worth its call, and those of replacements, by Python:
# decode of one sequence took 1.20 of torch's time where weights had up to 0.4M, and 0.91 with 1.6M.
LARGE = 1 << 20


def has_large_linears(modules: Iterable[nn.Module]) -> bool:
    """Say whether reading weights takes most of a decode step, and calls by Python do not."""
    return any(
        isinstance(module, nn.Linear) and module.weight.numel() >= LARGE for module in modules
    )


@dataclass(frozen=True, slots=True)
class OwnLinears:
    """Linear layers of a model that the op ``linear`` computes, while they are attached.

    torch reads the weights of a few rows at half of the machine's rate or less. Reading them is
    most of a decode step. A mode that replaces ``F.linear`` would see all other calls too, ten for
    each: a tenth of a step.

    Attributes:
        layers: the layers.
        impl: an implementation of ``linear``.
    """

    layers: tuple[nn.Linear, ...]
    impl: str

    @staticmethod
    def of(modules: Iterable[nn.Module], impl: str) -> OwnLinears:
        """Take the modules that are linear layers, as torch has them."""
        forward, own = nn.Linear.forward, "forward"
        linears = (m for m in modules if isinstance(m, nn.Linear) and own not in vars(m))
        return OwnLinears(tuple(m for m in linears if type(m).forward is forward), impl)

    @contextmanager
    def attached(self, _model: nn.Module) -> Iterator[None]:
        """Have each layer's own ``forward`` call the op meanwhile."""
        for layer in self.layers:
            vars(layer)["forward"] = partial(_forward, layer, self.impl)
        try:
            yield
        finally:
            for layer in self.layers:
                del vars(layer)["forward"]


def _forward(layer: nn.Linear, impl: str, input: Tensor) -> Tensor:
    weight, bias = layer.weight, layer.bias
    if _is_taken(input, weight, bias, impl):
        return by_rows(input, weight, bias, impl=impl)
    return F.linear(input, weight, bias)


def by_rows(input: Tensor, weight: Tensor, bias: Tensor | None, *, impl: str) -> Tensor:
    """Compute ``F.linear`` by an implementation of the op ``linear``, which takes a matrix."""
    out: Tensor = _LINEAR.direct(input.reshape(-1, input.shape[-1]), [weight], [bias], impl=impl)
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
