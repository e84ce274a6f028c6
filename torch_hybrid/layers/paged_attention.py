"""Grouped-query attention over a paged cache, as a module of its own."""

from __future__ import annotations

from torch import Tensor, nn

from torch_hybrid.backends.paged_attention import PagedAttentionPlan, attend
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.layers.own_dtype import in_own_dtype
from torch_hybrid.specs import AttentionSpec


class PagedAttention(nn.Module):
    """Attention that writes new keys and values into pages, then reads all tokens of each sequence.

    It has no parameters: projections, norms and rotary embedding belong to the model.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.spec = spec

    @in_own_dtype(3)
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, plan: PagedAttentionPlan, cache: LayerCache
    ) -> Tensor:
        """Attend with the tokens of a step.

        Args:
            q: [T, num_q_heads, head_dim], the sequences packed as ``plan`` says.
            k, v: [T, num_kv_heads, head_dim], the new keys and values.
            plan: from the backend's ``plan``.
            cache: this layer's pools. Mutated at the rows that the plan names.

        Returns:
            [T, num_q_heads, head_dim]; rows of padding tokens are 0.
        """
        return attend(q, k, v, self.spec, plan, cache)
