"""Keys and values by head, whatever a pool holds."""

from __future__ import annotations

from torch import Tensor


def by_head(k: Tensor, v: Tensor | None, kv: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """The new rows [T, Hkv, D] of each plane, and views [planes, P, page_size, Hkv, D] of them.

    Where keys are the values as well there is one plane, of one head.
    """
    if v is None:
        return (k[:, None],), kv[None, :, :, None]
    return (k, v), kv
