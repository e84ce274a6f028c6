"""A layer that keeps the last inputs of a convolution, and has no rule: nothing more is needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import pytest
import torch
import torch.nn.functional as F

import torch_hybrid as th
from torch_hybrid.backends.mode import MODES
from torch_hybrid.backends.recurrent import CONVOLUTION, Recurrence, RecurrentBackend, convolve
from torch_hybrid.backends.step import chunk_grid
from torch_hybrid.specs import LayerFamily, Pool

WIDTH, CHANNELS = 3, 32
RECURRENCE = Recurrence(decode=(CONVOLUTION,), extend=(CONVOLUTION,))


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """A gated short convolution's facts."""

    conv_width: int
    kind: ClassVar[str] = "short_conv"
    family: ClassVar[LayerFamily] = "linear"

    def pools(self) -> dict[str, Pool]:
        return {"conv": Pool((self.conv_width - 1, CHANNELS), per="slot")}

    def divided(self, num_ranks: int) -> Self:
        return self


@pytest.mark.parametrize("lengths", [[1, 5, 1, 1, 9], [17], [1] * 4], ids=str)
def test_pieces_equal_the_whole(lengths: list[int]):
    table = th.LayerTable.from_specs([ShortConvSpec(WIDTH)])
    cache = th.HybridCache(table, max_seqs=1, kv_tokens=32, page_size=16)
    args = table.of_kind("short_conv"), cache.sizes, th.Backends(), MODES
    backends = {"short_conv": RecurrentBackend(RECURRENCE, *args)}
    assert chunk_grid(backends) == 1
    weight, x = torch.randn(CHANNELS, WIDTH), torch.randn(sum(lengths), CHANNELS)
    seqs, outs = cache.allocate(1), []
    for part in x.split(lengths):
        batch = cache.make_batch(seqs, [[0] * len(part)])
        mode = th.Mode.DECODE if len(part) == 1 else th.Mode.EXTEND
        step = th.Step(plans=th.plan_all(backends, batch, mode), caches=cache.pools, table=table)
        _, plan, pools = step.at(0).mixer()
        outs.append(convolve(part, weight, None, plan, pools["conv"], activation="silu"))
        cache.commit(seqs, [len(part)])
    padded = F.pad(x.T, (WIDTH - 1, 0))
    expected = F.silu(F.conv1d(padded, weight[:, None], groups=CHANNELS)).T
    torch.testing.assert_close(torch.cat(outs), expected)
