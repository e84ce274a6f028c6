"""The paged pool of latents of one MLA layer."""

from __future__ import annotations

from torch import Tensor

from torch_hybrid.caches.sizes import PoolCost, PoolSizes
from torch_hybrid.host import zeros
from torch_hybrid.specs import LatentSpec


def make_latent_kv(spec: LatentSpec, sizes: PoolSizes) -> Tensor:
    """A zeroed pool ``[num_pages + 1, page_size, latent_rank + rope_dim]``.

    A row is ``[latent | shared key]``; page 0 is null: no sequence owns it.
    """
    shape = (sizes.num_pages + 1, sizes.page_size, spec.row_dim)
    return zeros(shape, dtype=sizes.dtype, device=sizes.device)


def latent_kv_cost(spec: LatentSpec, sizes: PoolSizes) -> PoolCost:
    """One row for each token."""
    return PoolCost(per_token=spec.row_dim * sizes.dtype.itemsize)
