"""The paged pool of keys and values of one full-attention layer."""

from __future__ import annotations

from torch import Tensor

from torch_hybrid.caches.sizes import PoolCost, PoolSizes
from torch_hybrid.host import zeros
from torch_hybrid.specs import AttentionSpec


def make_paged_kv(spec: AttentionSpec, sizes: PoolSizes) -> Tensor:
    """A zeroed pool ``[2, num_pages + 1, page_size, num_kv_heads, head_dim]``.

    K and V share one tensor because an op may mutate one argument per storage in place. Page 0
    is null: no sequence owns it.
    """
    shape = (2, sizes.num_pages + 1, sizes.page_size, spec.num_kv_heads, spec.head_dim)
    return zeros(shape, dtype=sizes.dtype, device=sizes.device)


def paged_kv_cost(spec: AttentionSpec, sizes: PoolSizes) -> PoolCost:
    """Keys and values of each token."""
    return PoolCost(per_token=2 * spec.num_kv_heads * spec.head_dim * sizes.dtype.itemsize)
