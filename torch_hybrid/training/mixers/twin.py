"""Base classes of mixers that train.

A twin is a class in front of a mixer's own. With a packing it computes by
``torch_hybrid.functional``; else the mixer's own forward runs, with caches of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.functional import causal_conv1d
from torch_hybrid.ops.core.registration import first_impl
from torch_hybrid.ops.gated_norm import gated_norm_forward
from torch_hybrid.packing import Packing

Submodule = Callable[..., Tensor]
TWINS: dict[str, type[Twin]] = {}  # by the names of the classes that they stand in front of


class Twin(nn.Module):
    """Mixer whose subclasses know what their families compute.

    A subclass names the classes of transformers that it is ``of``: mixers, and decoders that hand
    nothing to theirs.
    """

    def __init_subclass__(cls, of: Sequence[str] = (), **options: Any) -> None:
        super().__init_subclass__(**options)
        TWINS.update(dict.fromkeys(of, cls))

    def forward(
        self, hidden_states: Tensor, *args: Any, packing: Packing | None = None, **options: Any
    ) -> Tensor:
        """Map [B, T, D] to [B, T, D]; ``packing`` is that of all B * T tokens."""
        if packing is None:
            own: Tensor = super().forward(hidden_states, *args, **options)
            return own
        return self.packed(hidden_states.flatten(0, 1), packing).view(hidden_states.shape)

    def packed(self, x: Tensor, packing: Packing) -> Tensor:
        """Map tokens [T, D] to [T, D]."""
        raise NotImplementedError


class KnowsPackings(
    Twin,
    of=(
        "JetBlock",
        "KimiK3DeltaAttention",
        "BailingMoeV2_5LinearAttention",
    ),
):
    """Module whose own forward takes a packing, or none: mixers of ours, and decoders."""

    def forward(self, *args: Any, **options: Any) -> Any:
        """Run that forward."""
        return super(Twin, self).forward(*args, **options)


class TwinOfPair(Twin):
    """Mixer that returns a pair, whose second is None with a packing."""

    def forward(
        self, hidden_states: Tensor, *args: Any, packing: Packing | None = None, **options: Any
    ) -> Any:
        """Map [B, T, D] to [B, T, D] and None."""
        made = super().forward(hidden_states, *args, packing=packing, **options)
        return made if packing is None else (made, None)


def convolved(
    conv: nn.Conv1d, x: Tensor, packing: Packing, activation: Literal["silu"] | None = None
) -> Tensor:
    """Convolve tokens [T, C] by a causal convolution of transformers."""
    weight, bias = filters_of(conv).squeeze(1).to(x.dtype), conv.bias
    bias = None if bias is None else bias.to(x.dtype)
    y, _ = causal_conv1d(x, weight, bias, packing, activation=activation, output_final_state=False)
    return y


def filters_of(conv: nn.Conv1d) -> Tensor:
    """Return the filters of a convolution, whose forward is not called.

    Raises:
        UnsupportedError: an adapter of PEFT, which adds to what a forward makes, would be left out.
    """
    if has_adapter(conv):
        raise UnsupportedError(
            "convolutions have no adapters: leave them out of target_modules, or have them trained "
            "whole by modules_to_save"
        )
    return conv.weight


def has_adapter(module: nn.Module) -> bool:
    """Tell whether PEFT has put an adapter around a module."""
    return "base_layer" in module._modules


def gated_norm(norm: Any, x: Tensor, gate: Tensor) -> Tensor:
    """Normalise and gate rows [R, D] by a norm of transformers: one pass over them on a CPU."""
    if x.device.type != "cpu" or has_adapter(norm):
        normed: Tensor = norm(x, gate)
        return normed
    width = x.shape[1]
    # Mamba2's norms have groups; of the others Falcon-H1's alone says when it gates.
    is_grouped = hasattr(norm, "group_size")
    return gated_norm_forward(
        *(x, gate.to(x.dtype), as_work(norm.weight)),
        group_size=norm.group_size if is_grouped else width // getattr(norm, "n_groups", 1),
        eps=norm.variance_epsilon,
        activation=getattr(norm, "activation", "silu"),
        gates_first=is_grouped or not getattr(norm, "norm_before_gate", True),
        impl=first_impl("gated_norm_forward", x.device, x.dtype),
    )


def earlier(x: Tensor, packing: Packing, steps: int = 1, before: Tensor | float = 0.0) -> Tensor:
    """Find the token so many steps before each [T, C] in its sequence, ``before`` where none is."""
    rows = pad(x, (0, 0, steps, 0))[: x.shape[0]]
    return torch.where((packing.positions < steps)[:, None], before, rows)


def by_head(x: Tensor, head_dim: int) -> Tensor:
    """Split the last axis into heads."""
    return x.view(*x.shape[:-1], x.shape[-1] // head_dim, head_dim)


def work_dtype(x: Tensor) -> torch.dtype:
    """Name the dtype of sums: float32, of float64 float64."""
    return torch.promote_types(x.dtype, torch.float32)


def as_work(x: Tensor) -> Tensor:
    """Convert to the dtype of sums."""
    return x.to(work_dtype(x))
