"""Inputs of latent_attention: real model shapes and odd small ones."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.ops.declared import PagedInputs
from tests.ops.pages import lay_out
from torch_hybrid.ops.formats.fp8_kv import rounded
from torch_hybrid.ops.latent_attention.op import LatentAttention


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes, and for each sequence its (new tokens, total length)."""

    num_heads: int
    rank: int = 512
    rope_dim: int = 64
    nope_dim: int = 128
    page_size: int = 16
    lengths: tuple[tuple[int, int], ...]

    @property
    def scale(self) -> float:
        """That of the expanded head, whatever the rank."""
        return (self.nope_dim + self.rope_dim) ** -0.5


# Those of a call that are given by position.
TENSORS = ("q_latent", "q_rope", "latent", "k_rope", "pool",
           "cu_seqlens", "seq_lens", "page_table", "slot_mapping")  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Inputs(PagedInputs, LatentAttention):
    """The arguments of one call."""

    impl: str = ""

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same values in another dtype; a pool of 8 bits stays one."""
        own = ("q_latent", "q_rope", "latent", "k_rope")
        names = own if self.pool_scale is not None else (*own, "pool")
        return replace(self, **{name: getattr(self, name).to(dtype) for name in names})

    def in_fp8(self, scale: float = 0.5) -> Inputs:
        """The same with the pool in 8 bits; with a power of 2, only rounding to them rounds."""
        return replace(self, pool=rounded(self.pool, scale), pool_scale=torch.tensor([scale]))

    def rows_kept(self) -> Tensor:
        """[T, R + P]: the new rows as the pool holds them."""
        rows = torch.cat([self.latent, self.k_rope], 1)
        return rows if self.pool_scale is None else rounded(rows, self.pool_scale)


CASES = {
    "deepseek_v2_lite": Case(num_heads=16, lengths=((1, 70), (19, 19), (1, 1), (3, 40))),
    "kimi_linear": Case(num_heads=32, lengths=((1, 33), (5, 21))),
    "deepseek_v3": Case(num_heads=128, lengths=((1, 90), (2, 2))),
    "one_head": Case(
        num_heads=1, rank=16, rope_dim=16, page_size=1, lengths=((7, 7), (0, 5), (1, 3))
    ),
    "odd": Case(
        num_heads=5,
        rank=80,
        rope_dim=48,
        page_size=5,
        lengths=((0, 0), (13, 37), (1, 11), (2, 2)),
    ),
    "long_decode": Case(
        num_heads=4, rank=64, rope_dim=32, lengths=((1, 1500), (1, 260), (1, 2), (1, 256))
    ),
    "long_extend": Case(
        num_heads=2, rank=32, rope_dim=16, lengths=((131, 131), (65, 650), (300, 1200))
    ),
}


def make_inputs(
    case: Case,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    unused: float = math.nan,
    padding: tuple[int, int] = (0, 0),
    fp8: bool = False,
) -> Inputs:
    """Random inputs with shuffled pages; queries are such that logits are of order 1.

    Args:
        case: the shapes.
        dtype: of the queries, the latents and the pool.
        seed: of the values and of the page order.
        unused: what every row of the pool holds that no query may see.
        padding: tokens and (empty) sequences to append.
        fp8: keep latents in 8 bits.
    """
    generator = torch.Generator().manual_seed(seed)
    layout = lay_out(case.lengths, case.page_size, generator, padding)
    width = case.rank + case.rope_dim
    pool = torch.full((layout.num_pages, case.page_size, width), unused)
    prefix = layout.prefix_slots
    pool.flatten(0, 1)[prefix] = torch.randn(len(prefix), width, generator=generator)
    num_tokens = len(layout.slot_mapping)
    q = torch.randn(num_tokens, case.num_heads, width, generator=generator)
    q *= width**-0.5 / case.scale
    new = torch.randn(num_tokens, width, generator=generator)
    inputs = Inputs(
        q_latent=q[..., : case.rank],
        q_rope=q[..., case.rank :],
        latent=new[:, : case.rank],
        k_rope=new[:, case.rank :],
        pool=pool,
        cu_seqlens=layout.cu_seqlens,
        seq_lens=layout.seq_lens,
        page_table=layout.page_table,
        slot_mapping=layout.slot_mapping,
        scale=case.scale,
    ).to(dtype)
    return inputs.in_fp8() if fp8 else inputs
