"""A linear mixer on its own, fed one sequence in pieces."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import torch_hybrid as th


def run(layer: Any, x: Tensor, lengths: list[int], backends: th.Backends | None = None) -> Tensor:
    """One sequence in pieces of the given lengths."""
    kind, table = layer.spec.kind, th.LayerTable.from_specs([layer.spec])
    cache = th.HybridCache(table, max_seqs=1, kv_tokens=128, page_size=16, dtype=x.dtype)
    made = th.make_backends(table, cache.sizes, backends)
    seqs, out = cache.allocate(1), []
    for part in x.split(lengths):
        batch = cache.make_batch(seqs, [[0] * len(part)])
        mode = th.Mode.DECODE if len(part) == 1 else th.Mode.EXTEND
        plan = th.plan_all(made, batch, mode)[kind]
        out.append(layer(part, plan, cache.pools[kind][0]))
        cache.commit(seqs, [len(part)])
    return torch.cat(out)


def assert_every_parameter_matters(layer: Any, dim: int) -> None:
    """A change of any one changes what comes out."""
    x = torch.randn(20, dim)
    before = run(layer, x, [20])
    for weight in layer.parameters():
        kept = weight.clone()
        weight.mul_(1.5).add_(0.1)
        assert (run(layer, x, [20]) - before).abs().max() > 1e-4
        weight.copy_(kept)
