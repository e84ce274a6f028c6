"""Where our mixers join a transformers model: its attention function and its linear layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torch_hybrid.backends.hybrid import Step
from torch_hybrid.backends.paged_attention import attend

ATTENTION_NAME = "torch_hybrid"


def register_attention() -> None:
    """Make our attention known to transformers as ``ATTENTION_NAME``."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _attention)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    step: Step,
    **_options: Any,  # transformers passes every option to every attention function
) -> tuple[Tensor, None]:
    """Full attention as transformers calls it: q, k and v [1, heads, T, head_dim]."""
    entry, plan, kv = step.layer(module.layer_idx, "paged_attention")
    q, k, v = (states[0].transpose(0, 1).contiguous() for states in (query, key, value))
    return attend(q, k, v, entry.spec, plan, kv)[None], None  # type: ignore[arg-type]


class LinearAttentionAdapter(nn.Module):
    """Stands where a transformers model has its linear attention."""

    def __init__(self, mixer: nn.Module, layer_id: int, kind: str) -> None:
        super().__init__()
        self.mixer = mixer
        self.layer_id, self.kind = layer_id, kind

    def forward(
        self,
        hidden_states: Tensor,
        *,
        step: Step,
        cache_params: None = None,
        attention_mask: None = None,
        use_cache: bool = False,
    ) -> Tensor:
        """[1, T, dim] -> [1, T, dim], the rows packed as the step's plan says."""
        _, plan, cache = step.layer(self.layer_id, self.kind)
        output: Tensor = self.mixer(hidden_states[0], plan, cache)  # type: ignore[arg-type]
        return output[None]
