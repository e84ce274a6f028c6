"""Inputs of paged_attention: real model shapes and odd small ones."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.ops.declared import PagedInputs
from tests.ops.pages import lay_out
from torch_hybrid.ops.formats.fp8_kv import rounded
from torch_hybrid.ops.paged_attention.op import PagedAttention

# Those of a call that are given by position.
TENSORS = ("q", "k", "v", "kv", "cu_seqlens", "seq_lens", "page_table", "slot_mapping")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Heads, pages, and for each sequence its (new tokens, total length)."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int = 16
    lengths: tuple[tuple[int, int], ...]


@dataclass(slots=True, kw_only=True)
class Inputs(PagedInputs, PagedAttention):
    """The arguments of one call."""

    impl: str = ""

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same values in another dtype; a pool of 8 bits stays one."""
        names = ["q", "k", "v", *["kv"] * (self.kv_scales is None)]
        names += ["relative_bias"] * (self.relative_bias is not None)
        return replace(self, **{name: getattr(self, name).to(dtype) for name in names})

    def in_fp8(self, unit: float = 1.0) -> Inputs:
        """The same with the pool in 8 bits, and a scale for each head: a power of 2 of ``unit``s,
        where only rounding to 8 bits rounds."""
        exponents = torch.arange(2 * self.kv.shape[3]).view(2, -1) % 5 - 2
        scales = unit * 2.0**exponents
        return replace(self, kv=rounded(self.kv, scales[:, None, None, :, None]), kv_scales=scales)

    def rows_kept(self) -> Tensor:
        """[2, T, Hkv, D]: the new keys and values as the pool holds them."""
        rows = torch.stack([self.k, self.v])
        return rows if self.kv_scales is None else rounded(rows, self.kv_scales[:, None, :, None])


CASES = {
    "qwen3_next": Case(
        num_q_heads=16, num_kv_heads=2, head_dim=256, lengths=((1, 70), (19, 19), (1, 1), (3, 40))
    ),
    "qwen3": Case(num_q_heads=16, num_kv_heads=8, head_dim=128, lengths=((1, 33), (5, 21))),
    "olmo_hybrid": Case(num_q_heads=5, num_kv_heads=5, head_dim=128, lengths=((17, 17), (1, 17))),
    "one_head": Case(
        num_q_heads=1, num_kv_heads=1, head_dim=16, page_size=1, lengths=((7, 7), (0, 5), (1, 3))
    ),
    "odd": Case(
        num_q_heads=3,
        num_kv_heads=1,
        head_dim=80,
        page_size=5,
        lengths=((0, 0), (13, 37), (1, 11), (2, 2)),
    ),
    "long_decode": Case(
        num_q_heads=4, num_kv_heads=2, head_dim=64, lengths=((1, 1500), (1, 260), (1, 2))
    ),
    "long_extend": Case(
        num_q_heads=2, num_kv_heads=1, head_dim=64, lengths=((131, 131), (65, 150))
    ),
}

OPTIONS = {
    "plain": {"window": 0, "softcap": 0.0},
    "window": {"window": 9, "softcap": 0.0},
    "softcap": {"window": 0, "softcap": 2.0},
    "window_softcap": {"window": 40, "softcap": 30.0},
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
    """Random inputs with shuffled pages.

    Args:
        case: the shapes.
        dtype: of q, k, v and kv.
        seed: of the values and of the page order.
        unused: what every row of kv holds that no query may see: the null page, the last page,
            pages of nobody, rows past the end of a sequence.
        padding: tokens and (empty) sequences to append.
        fp8: keep keys and values in 8 bits.
    """
    generator = torch.Generator().manual_seed(seed)
    layout = lay_out(case.lengths, case.page_size, generator, padding)
    heads, dim = case.num_kv_heads, case.head_dim
    kv = torch.full((2, layout.num_pages, case.page_size, heads, dim), unused)
    prefix = layout.prefix_slots
    kv.flatten(1, 2)[:, prefix] = torch.randn(2, len(prefix), heads, dim, generator=generator)
    q, k, v = (
        torch.randn(len(layout.slot_mapping), count, dim, generator=generator)
        for count in (case.num_q_heads, heads, heads)
    )
    inputs = Inputs(
        q=q,
        k=k,
        v=v,
        kv=kv,
        cu_seqlens=layout.cu_seqlens,
        seq_lens=layout.seq_lens,
        page_table=layout.page_table,
        slot_mapping=layout.slot_mapping,
        scale=dim**-0.5,
    ).to(dtype)
    return inputs.in_fp8() if fp8 else inputs


def make_biases(inputs: Inputs, *, reach: int) -> Tensor:
    """Random biases of each query and head by distance; those of padding are NaN."""
    generator = torch.Generator().manual_seed(reach)
    biases = torch.randn(*inputs.q.shape[:2], reach, generator=generator)
    biases[int(inputs.cu_seqlens[-1]) :] = math.nan
    return biases.to(inputs.q.dtype)


def hide_what_is_before(window: float, inputs: Inputs) -> None:
    """Put NaN into the rows of each sequence that are before the window of all its queries."""
    lengths, new = inputs.seq_lens.tolist(), inputs.cu_seqlens.diff().tolist()
    page_size = inputs.kv.shape[2]
    for table, length, num_new in zip(inputs.page_table, lengths, new, strict=True):
        first = length - num_new - int(window) + 1 if window and num_new else 0
        for position in range(first):
            inputs.kv[:, table[position // page_size], position % page_size] = math.nan
