"""Pools of a layer: tensors kept between steps, made and counted as its spec says."""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from torch_hybrid.caches.sizes import PoolCost, PoolSizes
from torch_hybrid.errors import UnsupportedError
from torch_hybrid.host.memory import zeros
from torch_hybrid.specs import LayerSpec, Pool

LayerCache = dict[str, Tensor]  # by the names of the spec's pools


def make_pools(spec: LayerSpec, sizes: PoolSizes) -> LayerCache:
    """Make a tensor for each pool of a layer, filled as the spec says, each with its own storage.

    The shape is ``[num_slots + num_snapshots + 1, *shape]`` per slot, open or not, with
    ``num_drafts`` before ``shape`` per draft, ``[num_pages + 1, page_size / tokens, *shape]`` per
    page, or ``shape`` per layer. A pool of several ``planes`` has them as its first dimension. Slot
    0 and page 0 are null: nobody owns them.

    Raises:
        UnsupportedError: the tokens that share a row do not divide a page.
    """
    return {name: _make_pool(pool, sizes) for name, pool in _wanted(spec, sizes).items()}


def _wanted(spec: LayerSpec, sizes: PoolSizes) -> dict[str, Pool]:
    given = {"draft": sizes.num_drafts > 0, "open": sizes.opens_chunks}
    return {name: pool for name, pool in spec.pools().items() if given.get(pool.per, True)}


def _make_pool(pool: Pool, sizes: PoolSizes) -> Tensor:
    made = zeros(_shape(pool, sizes), dtype=pool.dtype or sizes.dtype, device=sizes.device)
    return made.fill_(pool.fill) if pool.fill else made


def pool_cost(spec: LayerSpec, sizes: PoolSizes) -> PoolCost:
    """Count the bytes that a token and a sequence take in the pools of a layer."""
    cost: Counter[str] = Counter()
    for pool in _wanted(spec, sizes).values():
        cost[pool.per] += pool.nbytes(sizes.dtype)
    return PoolCost(
        per_token=cost["page"],
        per_sequence=cost["slot"] + cost["open"] + sizes.num_drafts * cost["draft"],
        per_layer=cost["layer"],
    )


def _shape(pool: Pool, sizes: PoolSizes) -> tuple[int, ...]:
    if sizes.page_size % pool.tokens:
        raise UnsupportedError(
            f"page_size must be a multiple of {pool.tokens}, the tokens that share an index key, "
            f"got {sizes.page_size}"
        )
    num_slots = sizes.num_slots + sizes.num_snapshots + 1
    rows: dict[str, tuple[int, ...]] = {
        "slot": (num_slots,),
        "open": (num_slots,),
        "page": (sizes.num_pages + 1, sizes.page_size // pool.tokens),
        "draft": (num_slots, sizes.num_drafts),
        "layer": (),
    }
    planes = (pool.planes,) if pool.planes else ()
    return (*planes, *rows[pool.per], *pool.shape)
