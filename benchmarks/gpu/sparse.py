"""Sparse attention, whose blocks an indexer picks, and dense attention of the same lengths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from benchmarks.gpu import attention, latents
from benchmarks.gpu.case import BF16, Case, Inputs, offsets, own, randn
from torch_hybrid.ops.block_attention import block_attention
from torch_hybrid.ops.block_attention.op import IMPLEMENTATIONS as ATTENTION
from torch_hybrid.ops.gated_pooling import gated_pooling
from torch_hybrid.ops.gated_pooling.op import IMPLEMENTATIONS as POOLING
from torch_hybrid.ops.latent_attention.op import IMPLEMENTATIONS as LATENTS
from torch_hybrid.ops.paged_attention.op import IMPLEMENTATIONS as PAGED
from torch_hybrid.ops.pooled_selection_step import pooled_selection_step
from torch_hybrid.ops.pooled_selection_step.op import IMPLEMENTATIONS as INDEXING
from torch_hybrid.ops.select_blocks import select_blocks
from torch_hybrid.ops.select_blocks.op import IMPLEMENTATIONS as SELECTION

INDEX_DIM = 128
# (sequences, length, new tokens of each)
SHAPES = (
    (1, 4096, 1),
    (1, 8192, 1),
    (1, 32768, 1),
    (1, 131072, 1),
    (16, 8192, 1),
    (16, 32768, 1),
    (64, 8192, 1),
    (1, 2048, 2048),
    (1, 8192, 2048),
    (1, 32768, 2048),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Sizes of a layer; without key heads, the ``head_dim`` numbers of a latent serve all."""

    block_size: int
    page_size: int
    top_k: int
    num_index_heads: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int


QWEN4_EXP = Model(
    block_size=4,
    page_size=16,
    top_k=512,
    num_index_heads=4,
    num_q_heads=24,
    num_kv_heads=2,
    head_dim=256,
)
GLM_5_3 = Model(
    block_size=16,
    page_size=64,
    top_k=128,
    num_index_heads=32,
    num_q_heads=64,
    num_kv_heads=0,
    head_dim=512,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Of equal lengths, in pages that lie anywhere."""

    cu_seqlens: Tensor
    seq_lens: Tensor
    page_table: Tensor
    slot_mapping: Tensor

    @classmethod
    def make(cls, page_size: int, num_seqs: int, length: int, num_new: int) -> Sequences:
        num_pages = -(-length // page_size)
        table = 1 + torch.randperm(num_seqs * num_pages).view(num_seqs, num_pages)
        position = torch.arange(length - num_new, length)
        slots = table[:, position // page_size] * page_size + position % page_size
        return cls(
            cu_seqlens=offsets(num_seqs, num_new),
            seq_lens=torch.full((num_seqs,), length, dtype=torch.int32),
            page_table=table.int(),
            slot_mapping=slots.flatten().int(),
        )

    @property
    def num_pages(self) -> int:
        return self.page_table.numel() + 1

    @property
    def num_tokens(self) -> int:
        return self.slot_mapping.shape[0]

    def positions(self) -> Tensor:
        """[T], of the new tokens."""
        num_seqs = self.seq_lens.shape[0]
        num_new = self.num_tokens // num_seqs
        ahead = self.seq_lens - num_new
        return (ahead[:, None] + torch.arange(num_new, device=ahead.device)).flatten()

    def args(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.cu_seqlens, self.seq_lens, self.page_table, self.slot_mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected(Inputs):
    """What an indexer scores: whole numbers, whose scores are the same in any order of sums."""

    model: Model
    sequences: Sequences
    q: Tensor
    keys: Tensor
    weights: Tensor | None
    block_keys: Tensor

    @classmethod
    def make(cls, model: Model, num_seqs: int, length: int, num_new: int) -> Selected:
        def whole(*shape: int) -> Tensor:
            return torch.randint(-99, 100, shape).to(BF16)

        sequences = Sequences.make(model.page_size, num_seqs, length, num_new)
        num_tokens, num_heads = sequences.num_tokens, model.num_index_heads
        weights = torch.randint(1, 4, (num_tokens, num_heads)).float()
        return cls(
            model=model,
            sequences=sequences,
            q=whole(num_tokens, num_heads, INDEX_DIM),
            keys=whole(num_tokens, INDEX_DIM),
            weights=weights if model is GLM_5_3 else None,
            block_keys=whole(sequences.num_pages, model.page_size // model.block_size, INDEX_DIM),
        )

    @property
    def num_bytes(self) -> float:
        return self.block_keys.nbytes + self.q.nbytes + 4 * self.q.shape[0] * self.model.top_k

    @property
    def flops(self) -> float:
        blocks = (self.sequences.positions() + 1) // self.model.block_size
        scored = blocks[blocks > self.model.top_k].sum().item()
        return 2 * self.model.num_index_heads * INDEX_DIM * scored


def select(inputs: Selected, impl: str) -> Tensor:
    """One call, which stores the keys of complete blocks as well."""
    return select_blocks(
        inputs.q,
        inputs.keys,
        inputs.weights,
        inputs.block_keys,
        *inputs.sequences.args(),
        block_size=inputs.model.block_size,
        top_k=inputs.model.top_k,
        impl=impl,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Attended(Inputs):
    """Queries, and blocks that were drawn for each: those of neighbours apart, or alike."""

    model: Model
    sequences: Sequences
    q: Tensor
    k: Tensor
    v: Tensor | None
    kv: Tensor
    blocks: Tensor

    @classmethod
    def make(
        cls, model: Model, num_seqs: int, length: int, num_new: int, alike: float = 0.0
    ) -> Attended:
        sequences = Sequences.make(model.page_size, num_seqs, length, num_new)
        num_tokens, num_pages = sequences.num_tokens, sequences.num_pages
        heads = (model.num_kv_heads,) if model.num_kv_heads else ()
        planes = (2,) if heads else ()
        row = (num_tokens, *heads, model.head_dim)
        return cls(
            model=model,
            sequences=sequences,
            q=randn(num_tokens, model.num_q_heads, model.head_dim),
            k=randn(*row),
            v=randn(*row) if heads else None,
            kv=randn(*planes, num_pages, model.page_size, *heads, model.head_dim),
            blocks=_drawn(model, sequences.positions(), length, alike),
        )

    @property
    def num_keys(self) -> Tensor:
        """[T], that each query sees."""
        tail = (self.sequences.positions() + 1) % self.model.block_size
        return (self.blocks >= 0).sum(1) * self.model.block_size + tail

    @property
    def num_bytes(self) -> float:
        """Of prompts, one read of all that is held; what more is read comes out of L2."""
        of_a_key = 2 * self.model.head_dim * max(1, 2 * self.model.num_kv_heads)
        held = self.sequences.seq_lens.sum().item()
        seen = min(self.num_keys.sum().item(), held)
        return of_a_key * seen + 2 * self.q.nbytes + self.blocks.nbytes

    @property
    def flops(self) -> float:
        return 4 * self.model.num_q_heads * self.model.head_dim * self.num_keys.sum().item()


def _drawn(model: Model, positions: Tensor, length: int, alike: float) -> Tensor:
    """[T, top_k] of the blocks that are complete at each position, those that a token likes best.

    What a token and the next like has a correlation of ``alike``.
    """
    complete = ((positions + 1) // model.block_size)[:, None]
    block = torch.arange(max(model.top_k, length // model.block_size))
    likes = torch.randn(len(positions), len(block))
    if alike:
        for before, row in pairwise(likes):
            row.mul_((1 - alike**2) ** 0.5).add_(before, alpha=alike)
    order = (-likes).masked_fill_(block >= complete, torch.inf)
    drawn = order.topk(model.top_k, largest=False).indices
    drawn = drawn.masked_fill(drawn >= complete, len(block)).sort(1).values
    return drawn.masked_fill(drawn == len(block), -1).int()


def attend(inputs: Attended, impl: str) -> Tensor:
    """One call, which stores the new rows as well."""
    return block_attention(
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.kv,
        inputs.blocks,
        *inputs.sequences.args(),
        block_size=inputs.model.block_size,
        scale=inputs.model.head_dim**-0.5,
        impl=impl,
    )


def _slots(num_seqs: int) -> Tensor:
    """A slot for each sequence."""
    return torch.arange(1, num_seqs + 1, dtype=torch.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooled(Inputs):
    """Tokens whose keys make those of blocks."""

    changed: ClassVar[tuple[str, ...]] = ("state",)
    sequences: Sequences
    slots: Tensor
    keys: Tensor
    gates: Tensor
    bias: Tensor
    state: Tensor

    @classmethod
    def make(cls, model: Model, num_seqs: int, length: int, num_new: int) -> Pooled:
        sequences = Sequences.make(model.page_size, num_seqs, length, num_new)
        size = model.block_size
        return cls(
            sequences=sequences,
            slots=_slots(num_seqs),
            keys=randn(sequences.num_tokens, INDEX_DIM),
            gates=randn(sequences.num_tokens, INDEX_DIM),
            bias=randn(size, INDEX_DIM),
            state=randn(num_seqs + 1, size - 1, 2, INDEX_DIM),
        )

    @property
    def num_bytes(self) -> float:
        return 3 * self.keys.nbytes + self.state[1:].nbytes


def pool(inputs: Pooled, impl: str) -> Tensor:
    """One call, which keeps the tokens of the last block."""
    cu_seqlens, seq_lens, _, _ = inputs.sequences.args()
    return gated_pooling(
        inputs.keys,
        inputs.gates,
        inputs.bias,
        inputs.state,
        cu_seqlens,
        seq_lens,
        inputs.slots,
        inputs.slots,
        impl=impl,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexed(Inputs):
    """One token of each sequence, and all that its indexer takes. The tokens of a block have the
    same whole numbers for keys, so that scores are the same in any order of sums."""

    changed: ClassVar[tuple[str, ...]] = ("state",)
    selected: Selected
    slots: Tensor
    gates: Tensor
    bias: Tensor
    state: Tensor

    @classmethod
    def make(cls, model: Model, num_seqs: int, length: int, num_new: int) -> Indexed:
        selected = Selected.make(model, num_seqs, length, num_new)
        size = model.block_size
        keys = selected.keys[:, None].expand(-1, size - 1, -1)
        state = torch.stack([keys, randn(*keys.shape)], 2)
        return cls(
            selected=selected,
            slots=_slots(num_seqs),
            gates=randn(num_seqs, INDEX_DIM),
            bias=randn(size, INDEX_DIM),
            state=torch.cat([state[:1], state]),
        )

    def another(self) -> Indexed:
        pools = {"gates": self.gates.clone(), "state": self.state.clone()}
        return replace(self, selected=self.selected.another(), **pools)

    @property
    def num_bytes(self) -> float:
        return self.selected.num_bytes + 2 * self.gates.nbytes + self.state[1:].nbytes

    @property
    def flops(self) -> float:
        return self.selected.flops


def index(inputs: Indexed, impl: str) -> Tensor:
    """One call, which pools, keeps and stores keys, and selects."""
    selected = inputs.selected
    return pooled_selection_step(
        selected.q,
        selected.keys,
        inputs.gates,
        inputs.bias,
        selected.weights,
        inputs.state,
        selected.block_keys,
        *selected.sequences.args(),
        inputs.slots,
        inputs.slots,
        top_k=selected.model.top_k,
        impl=impl,
    )


def cases() -> Iterator[Case]:
    """Each step of sparse attention, and dense attention of the same lengths."""
    heads = (QWEN4_EXP.num_q_heads, QWEN4_EXP.num_kv_heads, QWEN4_EXP.head_dim)
    steps = (
        ("sparse select", "Qwen4-Exp", partial(Selected.make, QWEN4_EXP), select, SELECTION),
        ("sparse attend", "Qwen4-Exp", partial(Attended.make, QWEN4_EXP), attend, ATTENTION),
        ("dense attend", "Qwen4-Exp", partial(attention.Paged.make, heads), attention.call, PAGED),
        ("sparse pool", "GLM-5.3", partial(Pooled.make, GLM_5_3), pool, POOLING),
        ("sparse select", "GLM-5.3", partial(Selected.make, GLM_5_3), select, SELECTION),
        ("sparse attend", "GLM-5.3", partial(Attended.make, GLM_5_3), attend, ATTENTION),
        ("dense attend", "GLM-5.3", partial(latents.Latents.make, 64), latents.call, LATENTS),
    )
    alike = partial(Attended.make, QWEN4_EXP, alike=0.9)
    neighbours = ("sparse attend", "Qwen4-Exp, neighbours alike", alike, attend, ATTENTION)
    whole = ("sparse index", "GLM-5.3", partial(Indexed.make, GLM_5_3), index, INDEXING)
    for num_seqs, length, num_new in SHAPES:
        more = (neighbours,) if num_new > 1 else (whole,)
        for op, model, make, call, implementations in (*steps, *more):
            yield Case(
                op=op,
                model=model,
                shape=f"{num_seqs}x{num_new} of {length}",
                make=partial(make, num_seqs, length, num_new),
                reference=partial(call, impl="torch"),
                own=own({"triton": implementations["triton"]}, call),
            )
