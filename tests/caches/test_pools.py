"""A spec says what it keeps; the rest is written once for all kinds of layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import pytest
import torch

import torch_hybrid.caches.room as room
from torch_hybrid.caches.hybrid import HybridCache
from torch_hybrid.errors import CapacityError
from torch_hybrid.specs import LayerFamily, LayerTable, Pool


@dataclass(frozen=True, slots=True)
class OddSpec:
    """Pools of every sort: a vector, the last inputs of a convolution alone, bytes, planes."""

    width: int
    kind: ClassVar[str] = "odd"
    family: ClassVar[LayerFamily] = "linear"

    def pools(self) -> dict[str, Pool]:
        return {
            "vector": Pool((self.width,), per="slot", dtype=torch.float64),
            "conv": Pool((2, self.width), per="slot"),
            "index": Pool((3,), per="page", dtype=torch.uint8),
            "both": Pool((5,), per="page", planes=2),
        }

    def divided(self, num_ranks: int) -> Self:
        return self


def make_cache() -> HybridCache:
    table = LayerTable.from_specs([OddSpec(7), (), OddSpec(9)])
    return HybridCache(table, max_seqs=3, kv_tokens=20, page_size=4, dtype=torch.bfloat16)


def test_pools_are_as_the_spec_says():
    first, second = make_cache().pools["odd"]
    assert {name: (list(pool.shape), pool.dtype) for name, pool in first.items()} == {
        "vector": ([4, 7], torch.float64),
        "conv": ([4, 2, 7], torch.bfloat16),
        "index": ([6, 4, 3], torch.uint8),
        "both": ([2, 6, 4, 5], torch.bfloat16),
    }
    assert second["conv"].shape == (4, 2, 9)
    assert not any(pool.any() for pool in first.values())


def test_every_pool_has_a_storage_of_its_own():
    pools = make_cache().pool_tensors()
    assert len({pool.untyped_storage().data_ptr() for pool in pools}) == len(pools) == 8


def test_costs_are_the_bytes_of_the_pools(monkeypatch: pytest.MonkeyPatch):
    cache = make_cache()
    first, second = cache.costs()
    assert (first.per_token, first.per_sequence) == (3 + 2 * 5 * 2, 7 * 8 + 2 * 7 * 2)
    assert (second.per_token, second.per_sequence) == (3 + 2 * 5 * 2, 9 * 8 + 2 * 9 * 2)
    num_bytes = sum(pool.nbytes for pool in cache.pool_tensors())
    monkeypatch.setattr(room, "free_bytes", lambda device: num_bytes - 1)
    with pytest.raises(CapacityError, match=f"the pools need {num_bytes:,} bytes"):
        make_cache()
