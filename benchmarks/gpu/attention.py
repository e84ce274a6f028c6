"""Grouped-query attention to pages: decode, prefill, and prefill after a prefix."""

from __future__ import annotations

import math
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
    Contestant,
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
from torch_hybrid.ops.paged_attention import paged_attention
from torch_hybrid.ops.paged_attention.op import IMPLEMENTATIONS

PAGE_SIZE = 16
# query heads, key heads, head dim
QWEN3_NEXT, FALCON_H1, NEMOTRON_H = (16, 2, 256), (12, 2, 128), (32, 8, 128)
NAMES = {QWEN3_NEXT: "Qwen3-Next", FALCON_H1: "Falcon-H1", NEMOTRON_H: "Nemotron-H"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Paged(Inputs):
    """Sequences of equal lengths in pages that lie anywhere; q, k and v of one projection."""

    heads: tuple[int, int, int]
    length: int
    qkv: Tensor  # [T, Hq + 2 Hkv, D]
    kv: Tensor  # [2, P + 1, page, Hkv, D]
    cu_seqlens: Tensor
    seq_lens: Tensor
    page_table: Tensor
    slot_mapping: Tensor

    @classmethod
    def make(cls, heads: tuple[int, int, int], num_seqs: int, length: int, num_new: int) -> Paged:
        num_q_heads, num_kv_heads, head_dim = heads
        num_pages = math.ceil(length / PAGE_SIZE)
        table = 1 + torch.randperm(num_seqs * num_pages).view(num_seqs, num_pages)
        position = torch.arange(length - num_new, length)
        slots = table[:, position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
        return cls(
            heads=heads,
            length=length,
            qkv=randn(num_seqs * num_new, num_q_heads + 2 * num_kv_heads, head_dim),
            kv=randn(2, num_seqs * num_pages + 1, PAGE_SIZE, num_kv_heads, head_dim),
            cu_seqlens=offsets(num_seqs, num_new),
            seq_lens=torch.full((num_seqs,), length, dtype=torch.int32),
            page_table=table.int(),
            slot_mapping=slots.flatten().int(),
        )

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def num_new(self) -> int:
        return self.qkv.shape[0] // self.num_seqs

    def plan(self, planner: Planner) -> Planned:
        num_q_heads, num_kv_heads, head_dim = self.heads
        lengths = step_lengths(
            self.cu_seqlens,
            self.qkv.shape[0],
            seq_lens=self.seq_lens,
            page_table=self.page_table,
        )
        return planner(
            lengths,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=PAGE_SIZE,
            window=0,
            softcap=0.0,
            dtype=BF16,
            device=self.qkv.device,
        )

    def qkv_views(self) -> tuple[Tensor, Tensor, Tensor]:
        num_q_heads, num_kv_heads, _ = self.heads
        q, k, v = self.qkv.split([num_q_heads, num_kv_heads, num_kv_heads], 1)
        return q, k, v

    @property
    def num_bytes(self) -> float:
        num_q_heads, num_kv_heads, head_dim = self.heads
        kv = 4 * self.num_seqs * self.length * num_kv_heads * head_dim
        return kv + 4 * self.qkv.shape[0] * num_q_heads * head_dim

    @property
    def flops(self) -> float:
        """What the last half of a causal square is not asked for."""
        num_q_heads, _, head_dim = self.heads
        pairs = self.num_new * (self.length - (self.num_new - 1) / 2)
        return 4 * self.num_seqs * num_q_heads * head_dim * pairs


def call(inputs: Paged, impl: str, planned: Sequence[Tensor] = ()) -> Tensor:
    """One call of this package's op, which stores the new rows as well."""
    return paged_attention(
        *inputs.qkv_views(),
        inputs.kv,
        inputs.cu_seqlens,
        inputs.seq_lens,
        inputs.page_table,
        inputs.slot_mapping,
        scale=inputs.heads[2] ** -0.5,
        planned=planned,
        impl=impl,
    )


def _pages(inputs: Paged) -> tuple[Tensor, Tensor, Tensor]:
    """FlashInfer's offsets of pages (on the host), the pages, and how full the last ones are."""
    num_pages = inputs.page_table.shape[1]
    indptr = torch.arange(inputs.num_seqs + 1, dtype=torch.int32) * num_pages
    last = torch.full((inputs.num_seqs,), (inputs.length - 1) % PAGE_SIZE + 1, dtype=torch.int32)
    return indptr, inputs.page_table.flatten(), last


def _flashinfer_decode(inputs: Sequence[Paged]) -> Turns:
    """On tensor cores; new rows are in their pages already."""
    module = installed("flashinfer", "flashinfer")
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
        flashinfer_workspace(inputs[0].qkv), "NHD", use_tensor_cores=True
    )
    first = inputs[0]
    num_q_heads, num_kv_heads, head_dim = first.heads
    wrapper.plan(
        *_pages(first),
        num_qo_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=PAGE_SIZE,
        q_data_type=BF16,
        kv_data_type=BF16,
        sm_scale=head_dim**-0.5,
    )
    return Turns(calls=[partial(wrapper.run, q, kv) for q, kv in _queries_and_pages(inputs)])


def _flashinfer_prefill(inputs: Sequence[Paged]) -> Turns:
    """Its choice of fa3 or fa2; new rows are in their pages already."""
    module = installed("flashinfer", "flashinfer")
    wrapper = module.BatchPrefillWithPagedKVCacheWrapper(flashinfer_workspace(inputs[0].qkv), "NHD")
    first = inputs[0]
    num_q_heads, num_kv_heads, head_dim = first.heads
    wrapper.plan(
        first.cu_seqlens.cpu(),
        *_pages(first),
        num_qo_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=head_dim,
        page_size=PAGE_SIZE,
        causal=True,
        q_data_type=BF16,
        kv_data_type=BF16,
        sm_scale=head_dim**-0.5,
    )
    return Turns(calls=[partial(wrapper.run, q, kv) for q, kv in _queries_and_pages(inputs)])


def _queries_and_pages(inputs: Sequence[Paged]) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor]]]:
    for each in inputs:
        yield each.qkv_views()[0].contiguous(), (each.kv[0], each.kv[1])


def _cudnn(inputs: Sequence[Paged]) -> Turns:
    """torch's attention with the cuDNN backend, on dense tensors: it reads no pages."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    calls = []
    for each in inputs:
        rows = (tensor.unflatten(0, (each.num_seqs, each.num_new)) for tensor in each.qkv_views())
        calls.append(partial(attend, *(tensor.transpose(1, 2).contiguous() for tensor in rows)))
    return Turns(calls=calls, output=lambda out: out.transpose(1, 2).flatten(0, 1))


def cases() -> Iterator[Case]:
    """Lengths are those that a sequence holds with its new tokens."""
    lengths = ((1, 8192), (1, 65536), (8, 1024), (8, 8192), (64, 1024), (64, 8192), (256, 2048))
    for num_seqs, length in lengths:
        yield _decode(QWEN3_NEXT, num_seqs, length)
    yield _decode(QWEN3_NEXT, 1, 131072)
    yield _decode(NEMOTRON_H, 64, 2048)
    yield _decode(FALCON_H1, 64, 2048)
    yield _decode(QWEN3_NEXT, 64, 1024, num_new=4)
    for num_seqs, length in ((1, 2048), (1, 8192), (4, 2048)):
        yield _prefill(QWEN3_NEXT, num_seqs, length, length)
        yield _prefill(NEMOTRON_H, num_seqs, length, length)
    yield _prefill(FALCON_H1, 1, 8192, 8192)
    yield _prefill(QWEN3_NEXT, 1, 32048, 2048)


def _decode(heads: tuple[int, int, int], num_seqs: int, length: int, *, num_new: int = 1) -> Case:
    others = {"flashinfer": _flashinfer_decode if num_new == 1 else _flashinfer_prefill}
    return _case("GQA decode", heads, num_seqs, length, num_new, others)


def _prefill(heads: tuple[int, int, int], num_seqs: int, length: int, num_new: int) -> Case:
    others: dict[str, Contestant] = {"flashinfer": _flashinfer_prefill}
    if num_new == length:
        others["cudnn"] = _cudnn
    return _case("GQA prefill", heads, num_seqs, length, num_new, others)


def _case(
    op: str,
    heads: tuple[int, int, int],
    num_seqs: int,
    length: int,
    num_new: int,
    others: dict[str, Contestant],
) -> Case:
    name = f"{NAMES[heads]} {heads[0]}/{heads[1]} of {heads[2]}"
    features = () if num_new == 1 else ("extend",)
    shape = f"{num_seqs}x{num_new}" + ("" if num_new == length else f" of {length}")
    return Case(
        op=op,
        model=name,
        shape=shape,
        make=partial(Paged.make, heads, num_seqs, length, num_new),
        reference=partial(call, impl="torch"),
        own=own(IMPLEMENTATIONS, call, features=features),
        choice=Choice(
            op="paged_attention",
            sizes={
                "num_q_heads": heads[0],
                "num_kv_heads": heads[1],
                "head_dim": heads[2],
                "page_size": PAGE_SIZE,
            },
            features=features,
        ),
        others=others,
    )
