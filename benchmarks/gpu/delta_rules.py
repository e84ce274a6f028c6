"""The gated delta rule of Qwen3-Next, and Kimi delta attention: decode and prefill."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.case import (
    Case,
    Choice,
    Contestant,
    Inputs,
    Turns,
    installed,
    offsets,
    own,
    randn,
)
from tests.ops.step_lengths import step_lengths
from torch_hybrid.ops import delta_rule
from torch_hybrid.ops.core.planning import Planned, Planner
from torch_hybrid.ops.core.recurrence import of_form
from torch_hybrid.ops.core.registration import REGISTERED

CHUNK = 64  # of the usual form, whose FLOPs are counted
QWEN3_NEXT = (16, 32, 128, 128)  # key heads, value heads, K, V
OLMO_HYBRID = (30, 30, 96, 192)
KIMI_LINEAR = (32, 32, 128, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRule(Inputs):
    """q, k and v are slices of one projection; gates before and after their activations."""

    changed: ClassVar[tuple[str, ...]] = ("state",)

    heads: tuple[int, int, int, int]
    qkv: Tensor  # [T, 2 H K + HV V]
    raw_g: Tensor  # [T, HV], of Kimi [T, HV, K]
    raw_beta: Tensor  # [T, HV]
    g: Tensor
    beta: Tensor
    state: Tensor  # [N + 1, HV, V, K]
    cu_seqlens: Tensor
    long_cu_seqlens: Tensor  # int64, as flash-linear-attention wants them
    indices: Tensor  # [N]: slots from 1 on, in order

    @classmethod
    def make(
        cls, heads: tuple[int, int, int, int], num_seqs: int, num_new: int, *, channels: bool
    ) -> DeltaRule:
        num_k_heads, num_v_heads, k_dim, v_dim = heads
        num_tokens = num_seqs * num_new
        width = 2 * num_k_heads * k_dim + num_v_heads * v_dim
        per_head = (num_tokens, num_v_heads)
        raw_g = randn(*per_head, *((k_dim,) if channels else ())) - 2
        raw_beta = randn(*per_head)
        cu_seqlens = offsets(num_seqs, num_new)
        return cls(
            heads=heads,
            qkv=randn(num_tokens, width),
            raw_g=raw_g,
            raw_beta=raw_beta,
            g=-F.softplus(raw_g.float()),
            beta=raw_beta.float().sigmoid(),
            state=randn(num_seqs + 1, num_v_heads, v_dim, k_dim).float(),
            cu_seqlens=cu_seqlens,
            long_cu_seqlens=cu_seqlens.long(),
            indices=torch.arange(1, num_seqs + 1, dtype=torch.int32),
        )

    def plan(self, planner: Planner) -> Planned:
        slots = {"initial_indices": self.indices, "state_indices": self.indices}
        lengths = step_lengths(self.cu_seqlens, self.qkv.shape[0], **slots)
        facts = {"num_v_heads": self.heads[1], "head_v_dim": self.heads[3]}
        return planner(lengths, **facts, dtype=self.qkv.dtype, device=self.qkv.device)

    @property
    def scale(self) -> float:
        return self.heads[2] ** -0.5

    def qkv_views(self) -> tuple[Tensor, Tensor, Tensor]:
        num_k_heads, num_v_heads, k_dim, v_dim = self.heads
        k_size = num_k_heads * k_dim
        q, k, v = self.qkv.split([k_size, k_size, num_v_heads * v_dim], 1)
        unflatten = partial(torch.unflatten, dim=1)
        return (
            unflatten(q, sizes=(num_k_heads, k_dim)),
            unflatten(k, sizes=(num_k_heads, k_dim)),
            unflatten(v, sizes=(num_v_heads, v_dim)),
        )

    def packed(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as tensors of their own."""
        q, k, v = self.qkv_views()
        return q.contiguous(), k.contiguous(), v.contiguous()

    @property
    def num_bytes(self) -> float:
        out = 2 * self.qkv.shape[0] * self.heads[1] * self.heads[3]
        return self.qkv.nbytes + out + self.g.nbytes + self.beta.nbytes + 2 * self.state[1:].nbytes

    @property
    def flops(self) -> float:
        num_tokens, num_seqs = self.qkv.shape[0], self.indices.shape[0]
        if num_tokens == num_seqs:
            return 0.0
        _, num_heads, k, v = self.heads
        per_chunk = 6 * CHUNK * k * v + 2 * CHUNK**2 * (3 * k + 2 * v) + 2 / 3 * CHUNK**3
        return num_tokens / CHUNK * num_heads * per_chunk


def call(op: Callable[..., Tensor], inputs: DeltaRule, impl: str, **options: Any) -> Tensor:
    """One call of this package's op."""
    return op(
        *inputs.qkv_views(),
        inputs.g,
        inputs.beta,
        inputs.state,
        inputs.cu_seqlens,
        inputs.indices,
        inputs.indices,
        scale=inputs.scale,
        qk_l2norm=True,
        impl=impl,
        **options,
    )


def _of_fla(inputs: DeltaRule) -> dict[str, Any]:
    """What all of flash-linear-attention's forms are given."""
    q, k, v = (tensor[None] for tensor in inputs.packed())
    return {
        "q": q,
        "k": k,
        "v": v,
        "g": inputs.g[None],
        "beta": inputs.beta[None],
        "scale": inputs.scale,
        "initial_state": inputs.state[1:],
        "use_qk_l2norm_in_kernel": True,
        "state_v_first": True,
        "cu_seqlens": inputs.long_cu_seqlens,
    }


def _fla(
    package: str, function: str, options: dict[str, Any], inputs: Sequence[DeltaRule]
) -> Turns:
    """flash-linear-attention's forms, which leave the state in a new tensor."""
    op = getattr(installed("fla", f"fla.ops.{package}"), function)
    options = {"output_final_state": True, **options}
    calls = [partial(op, **_of_fla(each), **options) for each in inputs]
    return Turns(calls=calls, output=lambda result: result[0][0])


def _fla_kimi_decode(inputs: Sequence[DeltaRule]) -> Turns:
    """In place, by slot; of several tokens it wants a slot for each."""
    op = installed("fla", "fla.ops.kda.fused_recurrent").fused_recurrent_kda_fwd
    calls = [
        partial(
            op,
            **_of_fla(each) | {"initial_state": each.state},
            inplace_final_state=True,
            ssm_state_indices=each.indices,
        )
        for each in inputs
    ]
    return Turns(calls=calls, output=lambda result: result[0][0])


def _flashinfer_decode(inputs: Sequence[DeltaRule]) -> Turns:
    """It computes the gates itself: a decay of softplus alone, with a rate of 1 and no bias."""
    op = installed("flashinfer", "flashinfer.gdn_decode").gated_delta_rule_decode_pretranspose
    num_heads = inputs[0].heads[1]
    zeros = inputs[0].g.new_zeros(num_heads)
    calls = []
    for each in inputs:
        q, k, v = (tensor[:, None] for tensor in each.packed())
        calls.append(
            partial(
                op,
                q,
                k,
                v,
                None,
                zeros,
                each.raw_g[:, None],
                zeros,
                each.raw_beta[:, None],
                scale=each.scale,
                use_qk_l2norm=True,
                initial_state=each.state,
                initial_state_indices=each.indices,
                backend="flashinfer",
            )
        )
    return Turns(calls=calls, output=lambda result: result[0][:, 0])


def _flashinfer_prefill(use_cp: bool, inputs: Sequence[DeltaRule]) -> Turns:
    """With ``use_cp``, long sequences are split over the device."""
    op = installed("flashinfer", "flashinfer.gdn_prefill").chunk_gated_delta_rule
    longest = int(inputs[0].cu_seqlens.diff().max())
    calls = [
        partial(
            op,
            *each.packed(),
            each.g.exp(),
            each.beta,
            scale=each.scale,
            initial_state=each.state,
            output_final_state=True,
            output_state=each.state,
            cu_seqlens=each.cu_seqlens,
            use_qk_l2norm_in_kernel=True,
            use_cp=use_cp,
            state_indices=each.indices,
            max_seqlen=longest,
        )
        for each in inputs
    ]
    return Turns(calls=calls, output=lambda result: result[0])


def cases() -> Iterator[Case]:
    """Decode of 1 to 256 sequences, prefill of 2048 to 32768 tokens."""
    gdn_decode = partial(_case, "GDN decode", "Qwen3-Next", QWEN3_NEXT)
    gdn_prefill = partial(_case, "GDN prefill", "Qwen3-Next", QWEN3_NEXT)
    kda_decode = partial(_case, "KDA decode", "Kimi-Linear", KIMI_LINEAR)
    kda_prefill = partial(_case, "KDA prefill", "Kimi-Linear", KIMI_LINEAR)
    for num_seqs in (1, 8, 32, 64, 256):
        yield gdn_decode(num_seqs, 1)
    yield gdn_decode(64, 4)
    yield _case("GDN decode", "OLMo-hybrid", OLMO_HYBRID, 64, 1)
    for num_seqs, length in ((1, 2048), (1, 8192), (1, 32768), (8, 1024), (16, 512)):
        yield gdn_prefill(num_seqs, length)
    for num_seqs in (1, 8, 64, 256):
        yield kda_decode(num_seqs, 1)
    yield kda_decode(64, 4)
    for num_seqs, length in ((1, 8192), (8, 1024), (16, 512)):
        yield kda_prefill(num_seqs, length)


def _case(
    what: str, model: str, heads: tuple[int, int, int, int], num_seqs: int, num_new: int
) -> Case:
    prefill, channels = what.endswith("prefill"), what.startswith("KDA")
    rule = "kimi_delta_attention" if channels else "gated_delta_rule"
    form = "chunk" if prefill else "recurrent"
    ours = partial(call, getattr(delta_rule, rule))
    return Case(
        op=what,
        model=model,
        shape=f"{num_seqs}x{num_new}",
        make=partial(DeltaRule.make, heads, num_seqs, num_new, channels=channels),
        reference=partial(ours, impl=f"{form}_torch"),
        choice=Choice(
            op=rule,
            form=form,
            sizes={"head_k_dim": heads[2], "head_v_dim": heads[3]},
        ),
        own=own(of_form(REGISTERED[rule], form), ours),
        others=_others(prefill=prefill, channels=channels, one_token=num_new == 1),
    )


def _others(*, prefill: bool, channels: bool, one_token: bool) -> dict[str, Contestant]:
    if channels and prefill:
        return {"fla": partial(_fla, "kda", "chunk_kda", {"safe_gate": True})}
    if channels and one_token:
        return {"fla": _fla_kimi_decode}
    if channels:
        return {"fla": partial(_fla, "kda", "fused_recurrent_kda", {})}
    if prefill:
        return {
            "fla": partial(_fla, "gated_delta_rule", "chunk_gated_delta_rule", {}),
            "flashinfer": partial(_flashinfer_prefill, False),
            "flashinfer, split": partial(_flashinfer_prefill, True),
        }
    fla = partial(_fla, "gated_delta_rule", "fused_recurrent_gated_delta_rule", {})
    return {"fla": fla, "flashinfer": _flashinfer_decode} if one_token else {"fla": fla}
