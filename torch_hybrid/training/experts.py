"""Experts of a mixture, stacked as transformers keeps them, which train by one op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from torch_hybrid.functional import fused_experts


class Experts(nn.Module):
    """Experts with gates; subclasses know what others compute."""

    act_fn: Any
    gate_up_proj: Tensor
    down_proj: Tensor

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Mix the outputs [T, D] of each token's experts [T, top_k]; experts past all give 0."""
        x = as_in_autocast(hidden, self.down_proj.dtype)
        weights = self.first_weights().to(x.dtype), self.down_proj.to(x.dtype)
        return mixed(x, top_k_index, top_k_weights, *weights, **self.options()).to(hidden.dtype)

    def first_weights(self) -> Tensor:
        """Return the weights of gate and up [E, 2 I, D]; [E, I, D] without a gate."""
        return self.gate_up_proj

    def options(self) -> dict[str, Any]:
        """Return how the op is told to activate."""
        return {}

    def activates_as_published(self) -> bool:
        """Tell whether a config asks for the activation that the op has."""
        return is_silu(self.act_fn)


class LimitedExperts(Experts):
    """Experts whose gates and up are clamped."""

    swiglu_limit: float

    def options(self) -> dict[str, Any]:
        return {"limit": self.swiglu_limit}

    def activates_as_published(self) -> bool:
        return True


class SoftcappedExperts(Experts):
    """Experts whose gates and up are bent."""

    def options(self) -> dict[str, Any]:
        caps = self.act_fn.gate_softcap.softcap, self.act_fn.up_softcap.softcap
        return {"softcaps": caps}

    def activates_as_published(self) -> bool:
        return True


class SquaredExperts(Experts):
    """Experts without gates."""

    up_proj: Tensor

    def first_weights(self) -> Tensor:
        return self.up_proj

    def options(self) -> dict[str, Any]:
        return {"activation": "relu2"}

    def activates_as_published(self) -> bool:
        return type(self.act_fn) is type(ACT2FN["relu2"])


# By the class names of transformers' experts.
EXPERTS: dict[str, type[Experts]] = {
    "Qwen3NextExperts": Experts,
    "Qwen3_5MoeExperts": Experts,
    "LaraMiniExperts": Experts,
    "Qwen4ExpTextExperts": Experts,
    "KimiLinearExperts": Experts,
    "BailingHybridExperts": Experts,
    "JambaExperts": Experts,
    "GraniteMoeHybridExperts": Experts,
    "Lfm2MoeExperts": Experts,
    "MiniMaxExperts": Experts,
    "InklingExperts": Experts,
    "ZayaExperts": Experts,
    "Glm5NextTextExperts": LimitedExperts,
    "Inkling2Experts": SoftcappedExperts,
    "Inkling2LoopExperts": SoftcappedExperts,
    "NemotronHExperts": SquaredExperts,
}


def experts_class(module: Any) -> type[Experts] | None:
    """Find the class that experts train by; None for what is computed as transformers does.

    That is what no op here computes, and experts whose implementation a caller has chosen.
    """
    found = EXPERTS.get(type(module).__name__)
    if found is None or module.config._experts_implementation != "grouped_mm":
        return None
    return found if found.activates_as_published(module) else None


def is_silu(act_fn: Any) -> bool:
    """Tell whether an activation of transformers is silu."""
    return act_fn is F.silu or type(act_fn) is type(ACT2FN["silu"])


def mixed(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *weights: Tensor, **options: Any
) -> Tensor:
    """Mix outputs of experts, weighed in float32 or in the dtype of x."""
    if top_k_weights.dtype != torch.float32:
        top_k_weights = top_k_weights.to(x.dtype)
    picked = top_k_index.contiguous(), top_k_weights.contiguous()
    return fused_experts(x, *picked, *(each.contiguous() for each in weights), **options)


def as_in_autocast(x: Tensor, otherwise: torch.dtype | None = None) -> Tensor:
    """Cast x as autocast would; where that is off, to ``otherwise``."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x if otherwise is None else x.to(otherwise)
