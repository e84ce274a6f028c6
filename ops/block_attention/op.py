"""block_attention: its declaration and the list of its implementations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import FLOATS_AND_FLOAT64
from torch_hybrid.ops.core.declare import Cpp, Index, Pool, Rows, define, like
from torch_hybrid.ops.core.page_bounds import PagedOp
from torch_hybrid.ops.core.registration import check_groups, check_scale, check_shapes
from torch_hybrid.ops.implementations import in_cpp, in_torch, in_triton, invariant

_PACKAGE = "torch_hybrid.ops.block_attention"

_CPP = in_cpp(f"{_PACKAGE}._cpu.cpp:block_attention", multiples={"head_dim": 16})
_TRITON = in_triton(f"{_PACKAGE}._triton:block_attention", limits={"head_dim": 512})
IMPLEMENTATIONS = {
    "cpp": _CPP,
    "cpp_invariant": invariant(_CPP),
    "triton": _TRITON,
    "triton_invariant": invariant(_TRITON),
    "torch": in_torch(f"{_PACKAGE}._torch:block_attention", dtypes=FLOATS_AND_FLOAT64),
}


@dataclass(slots=True, repr=False, eq=False)
class BlockAttention(PagedOp):
    """Attention to the blocks of each query, after new keys and values are written to their pages.

    A sequence's tokens are cut into blocks of ``block_size``. A query at position p sees the
    tokens of the blocks that ``blocks`` names for it. It sees those too that follow the last of
    the ``(p + 1) // block_size`` blocks that are complete at p. N sequences, their T new tokens
    packed, Hq query heads, Hkv key heads (query head i reads key head ``i // (Hq // Hkv)``), P
    pages. Page 0 is null: it is neither read nor written. Tokens from ``cu_seqlens[N]`` on are
    padding.

    Args:
        q: [T, Hq, D], float32, bfloat16 or float16; any strides that keep D contiguous.
        k: [T, Hkv, D], as q.
        v: [T, Hkv, D], as q; or None: keys are the values as well, and all query heads share one,
            as they do in latent attention without rotation (MLA, absorbed). k is then [T, D].
        kv: [2, P, page_size, Hkv, D], dtype of q, contiguous; keys in ``kv[0]``, values in
            ``kv[1]``; [P, page_size, D] without v. **Mutated**: the rows that ``slot_mapping``
            names.
        blocks: [T, K] int32, contiguous, the distinct blocks of each query by number, complete at
            its position; -1 after them. As ``select_blocks`` returns them.
        block_size: tokens in a block; it divides ``page_size``.
        scale: factor of the logits, usually ``D ** -0.5``.

    Returns:
        [T, Hq, D] in the dtype of q; rows of padding tokens, and of queries that see nothing, are
        0.
    """

    q: Annotated[Tensor, Rows("Hq", "D", last_dim=True)]
    k: Annotated[Tensor, Rows("...", last_dim=True)]
    v: Annotated[Tensor | None, Rows("...", last_dim=True)]
    kv: Annotated[Tensor, Pool("...")]
    blocks: Annotated[Tensor, Index("T", "K", counts=True)]
    cu_seqlens: Annotated[Tensor, Index("N + 1")]
    seq_lens: Annotated[Tensor, Index("N")]
    page_table: Annotated[Tensor, Index("N", "M", counts=True, last_dim=True)]
    slot_mapping: Annotated[Tensor, Index("T")]
    block_size: int = field(kw_only=True)
    scale: float = field(kw_only=True)

    def check(self) -> None:
        """Raise ValueError unless keys and values fit the queries, and blocks the pages."""
        self._check_keys()
        check_scale(self.scale)
        page_size = self.kv.shape[1 if self.v is None else 2]
        if self.block_size < 1 or page_size % self.block_size:
            raise ValueError(
                f"block_size must divide the {page_size} tokens of a page, got {self.block_size}"
            )

    def _check_keys(self) -> None:
        """Raise ValueError for a shape of keys or values: with values they have heads, a plane
        each; without, neither."""
        kv, (num_tokens, num_q_heads, head_dim) = self.kv, self.q.shape
        ndim = 3 if self.v is None else 5
        if kv.ndim != ndim:
            raise ValueError(f"kv must have {ndim} dimensions, got {kv.ndim}")
        heads, planes = kv.shape[3:-1], () if self.v is None else (2,)
        sizes = kv.shape[len(planes) :][:2]
        check_shapes(
            {
                "kv": (kv, (*planes, *sizes, *heads, head_dim)),
                "k": (self.k, (num_tokens, *heads, head_dim)),
                "v": (self.v, (num_tokens, *heads, head_dim)),
            }
        )
        num_kv_heads = heads[0] if heads else 1
        check_groups("q heads must be", num_q_heads, num_kv_heads, "key heads")

    def check_indices(self) -> None:
        """Raise ValueError unless every index that a call uses is inside its pool, and every block
        is complete where it is seen."""
        _, kv = self.by_head()
        self.check_pages(num_pages=kv.shape[1], page_size=kv.shape[2])
        num_new, num_tokens = self.cu_seqlens.diff(), int(self.cu_seqlens[-1])
        ahead = self.seq_lens - self.cu_seqlens[1:]
        first = torch.repeat_interleave(ahead, num_new, output_size=num_tokens)
        position = first + torch.arange(num_tokens, dtype=torch.int32, device="cpu")
        seen, rows = (position + 1) // self.block_size, self.blocks[:num_tokens]
        wrong = (rows < -1) | (rows >= seen[:, None])
        if bool(wrong.any()):
            token = int(wrong.any(1).nonzero()[0])
            raise ValueError(
                f"blocks[{token}] must be in [-1, {int(seen[token])}), the blocks that are "
                f"complete there, got {rows[token].tolist()}"
            )

    def by_head(self) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return new rows [T, Hkv, D] of each plane, and a view [planes, P, page_size, Hkv, D].

        Where keys are the values as well there is one plane, of one head.
        """
        if self.v is None:
            return (self.k[:, None],), self.kv[None, :, :, None]
        return (self.k, self.v), self.kv


block_attention = define(
    BlockAttention,
    IMPLEMENTATIONS,
    returns=like("q"),
    limited={"head_dim": "D"},
    names_ndim=True,
    flops="4 * T * Hq * D * K * x.block_size",
    cpp=Cpp(
        "Hq=num_q_heads D=head_dim K=top_k",
        {
            "num_pages": "x.kv.shape[0 if x.v is None else 1]",
            "page_size": "x.kv.shape[1 if x.v is None else 2]",
            "num_kv_heads": "1 if x.v is None else x.kv.shape[3]",
        },
    ),
)
