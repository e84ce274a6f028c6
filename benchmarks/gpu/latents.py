"""Multi-head latent attention: absorbed, to pages of latents, and expanded, of whole prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.case import (
    BF16,
    Case,
    Choice,
    Inputs,
    Turns,
    flashinfer_workspace,
    installed,
    offsets,
    own,
    randn,
)
from tests.ops.step_lengths import step_lengths
from torch_hybrid.ops.core.planning import Planned, Planner
from torch_hybrid.ops.latent_attention import latent_attention
from torch_hybrid.ops.latent_attention.op import EXTEND, IMPLEMENTATIONS
from torch_hybrid.ops.ragged_attention import ragged_attention_with_lse
from torch_hybrid.ops.ragged_attention.op import IMPLEMENTATIONS as RAGGED_IMPLEMENTATIONS

PAGE_SIZE = 64
RANK, ROPE = 512, 64
QK_DIM, V_DIM = 192, 128
MODELS = {16: "DeepSeek-V2-Lite", 32: "Kimi-Linear", 64: "Ling", 128: "DeepSeek-V3"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Latents(Inputs):
    """Sequences of equal lengths in pages that lie anywhere."""

    length: int
    q_latent: Tensor  # [T, H, 512]
    q_rope: Tensor  # [T, H, 64]
    latent: Tensor
    k_rope: Tensor
    pool: Tensor  # [P + 1, page, 576]
    cu_seqlens: Tensor
    seq_lens: Tensor
    page_table: Tensor
    slot_mapping: Tensor

    @classmethod
    def make(cls, num_heads: int, num_seqs: int, length: int, num_new: int) -> Latents:
        num_pages, num_tokens = length // PAGE_SIZE, num_seqs * num_new
        table = 1 + torch.randperm(num_seqs * num_pages).view(num_seqs, num_pages)
        position = torch.arange(length - num_new, length)
        slots = table[:, position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
        return cls(
            length=length,
            q_latent=randn(num_tokens, num_heads, RANK),
            q_rope=randn(num_tokens, num_heads, ROPE),
            latent=randn(num_tokens, RANK),
            k_rope=randn(num_tokens, ROPE),
            pool=randn(num_seqs * num_pages + 1, PAGE_SIZE, RANK + ROPE),
            cu_seqlens=offsets(num_seqs, num_new),
            seq_lens=torch.full((num_seqs,), length, dtype=torch.int32),
            page_table=table.int(),
            slot_mapping=slots.flatten().int(),
        )

    def plan(self, planner: Planner) -> Planned:
        num_tokens, num_heads, _ = self.q_latent.shape
        lengths = step_lengths(
            self.cu_seqlens, num_tokens, seq_lens=self.seq_lens, page_table=self.page_table
        )
        return planner(
            lengths,
            num_heads=num_heads,
            rank=RANK,
            rope_dim=ROPE,
            dtype=BF16,
            device=self.pool.device,
        )

    @property
    def scale(self) -> float:
        return QK_DIM**-0.5

    @property
    def num_bytes(self) -> float:
        return self.pool[1:].nbytes + 2 * self.q_latent.nbytes + self.q_rope.nbytes

    @property
    def flops(self) -> float:
        num_tokens, num_heads, _ = self.q_latent.shape
        num_new = num_tokens // self.seq_lens.shape[0]
        keys = self.length - (num_new - 1) / 2
        return 2 * num_tokens * num_heads * (2 * RANK + ROPE) * keys


def call(inputs: Latents, impl: str, planned: Sequence[Tensor] = ()) -> Tensor:
    """One call of this package's op, which stores the new latents as well."""
    return latent_attention(
        inputs.q_latent,
        inputs.q_rope,
        inputs.latent,
        inputs.k_rope,
        inputs.pool,
        inputs.cu_seqlens,
        inputs.seq_lens,
        inputs.page_table,
        inputs.slot_mapping,
        scale=inputs.scale,
        planned=planned,
        impl=impl,
    )


def _flashinfer_latents(inputs: Sequence[Latents]) -> Turns:
    """Its choice of fa3 or fa2; new latents are in their pages already."""
    module = installed("flashinfer", "flashinfer.mla")
    first = inputs[0]
    num_seqs, num_pages = first.page_table.shape
    wrapper = module.BatchMLAPagedAttentionWrapper(flashinfer_workspace(first.pool))
    wrapper.plan(
        first.cu_seqlens.cpu(),
        torch.arange(num_seqs + 1, dtype=torch.int32) * num_pages,
        first.page_table.flatten(),
        first.seq_lens.cpu(),
        num_heads=first.q_latent.shape[1],
        head_dim_ckv=RANK,
        head_dim_kpe=ROPE,
        page_size=PAGE_SIZE,
        causal=True,
        sm_scale=first.scale,
        q_data_type=BF16,
        kv_data_type=BF16,
    )
    calls = [
        partial(
            wrapper.run, each.q_latent, each.q_rope, each.pool[..., :RANK], each.pool[..., RANK:]
        )
        for each in inputs
    ]
    return Turns(calls=calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expanded(Inputs):
    """Whole prompts of equal lengths; k and v are slices of one projection."""

    q: Tensor  # [T, H, 192]
    kv: Tensor  # [T, H, 192 + 128]
    cu_seqlens: Tensor

    @classmethod
    def make(cls, num_heads: int, num_seqs: int, length: int) -> Expanded:
        num_tokens = num_seqs * length
        return cls(
            q=randn(num_tokens, num_heads, QK_DIM),
            kv=randn(num_tokens, num_heads, QK_DIM + V_DIM),
            cu_seqlens=offsets(num_seqs, length),
        )

    def plan(self, planner: Planner) -> Planned:
        num_tokens, num_heads, _ = self.q.shape
        return planner(
            step_lengths(self.cu_seqlens, num_tokens),
            num_heads=num_heads,
            head_dim=QK_DIM,
            v_head_dim=V_DIM,
            dtype=BF16,
            device=self.q.device,
        )

    @property
    def num_seqs(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    @property
    def num_bytes(self) -> float:
        num_tokens, num_heads, _ = self.q.shape
        return self.q.nbytes + self.kv.nbytes + 2 * num_tokens * num_heads * V_DIM

    @property
    def flops(self) -> float:
        num_tokens, num_heads, _ = self.q.shape
        length = num_tokens / self.num_seqs
        return 2 * num_tokens * num_heads * (QK_DIM + V_DIM) * (length + 1) / 2


def call_expanded(inputs: Expanded, impl: str, planned: Sequence[Tensor] = ()) -> Tensor:
    """One call of this package's op."""
    k, v = inputs.kv.split([QK_DIM, V_DIM], 2)
    index = inputs.cu_seqlens
    scale = QK_DIM**-0.5
    return ragged_attention_with_lse(
        inputs.q, k, v, index, index, causal=True, scale=scale, planned=planned, impl=impl
    )[0]


def _flashinfer_expanded(inputs: Sequence[Expanded]) -> Turns:
    module = installed("flashinfer", "flashinfer")
    workspace = flashinfer_workspace(inputs[0].q)
    wrapper = module.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    indptr, num_heads = inputs[0].cu_seqlens.cpu(), inputs[0].q.shape[1]
    wrapper.plan(
        indptr,
        indptr,
        num_qo_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim_qk=QK_DIM,
        head_dim_vo=V_DIM,
        causal=True,
        sm_scale=QK_DIM**-0.5,
        q_data_type=BF16,
        kv_data_type=BF16,
    )
    parts = [[part.contiguous() for part in each.kv.split([QK_DIM, V_DIM], 2)] for each in inputs]
    runs = [partial(wrapper.run, each.q, *kv) for each, kv in zip(inputs, parts, strict=True)]
    return Turns(calls=runs)


def _cudnn(inputs: Sequence[Expanded]) -> Turns:
    """torch's attention with the cuDNN backend, on dense tensors."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    calls = []
    for each in inputs:
        rows = (each.q, *each.kv.split([QK_DIM, V_DIM], 2))
        dense = (row.unflatten(0, (each.num_seqs, -1)).transpose(1, 2).contiguous() for row in rows)
        calls.append(partial(attend, *dense))
    return Turns(calls=calls, output=lambda out: out.transpose(1, 2).flatten(0, 1))


def cases() -> Iterator[Case]:
    """Decode at 16 to 128 heads; new tokens after a prefix; whole prompts."""
    for num_heads, num_seqs, length, num_new in (
        (16, 1, 16384, 1),
        (16, 32, 16384, 1),
        (32, 1, 65536, 1),
        (32, 64, 8192, 1),
        (32, 4, 8192, 256),
        (64, 32, 16384, 1),
        (128, 32, 16384, 1),
    ):
        is_decode = num_new == 1
        features = () if is_decode else tuple(EXTEND)
        yield Case(
            op="MLA decode" if is_decode else "MLA after a prefix",
            model=f"{MODELS[num_heads]} {num_heads} heads",
            shape=f"{num_seqs}x{num_new} of {length}",
            make=partial(Latents.make, num_heads, num_seqs, length, num_new),
            reference=partial(call, impl="torch"),
            own=own(IMPLEMENTATIONS, call, features=features),
            choice=Choice(
                op="latent_attention",
                sizes={"num_heads": num_heads, "rank": RANK, "rope_dim": ROPE},
                features=features,
            ),
            others={"flashinfer": _flashinfer_latents},
        )
    for num_heads, num_seqs, length in ((16, 1, 4096), (32, 1, 8192), (32, 4, 2048)):
        yield Case(
            op="MLA prefill",
            model=f"{MODELS[num_heads]} {num_heads} heads",
            shape=f"{num_seqs}x{length}",
            make=partial(Expanded.make, num_heads, num_seqs, length),
            reference=partial(call_expanded, impl="torch"),
            own=own(RAGGED_IMPLEMENTATIONS, call_expanded),
            choice=Choice(
                op="ragged_attention_with_lse",
                sizes={"num_heads": num_heads, "head_dim": QK_DIM, "v_head_dim": V_DIM},
            ),
            others={"flashinfer": _flashinfer_expanded, "cudnn": _cudnn},
        )
