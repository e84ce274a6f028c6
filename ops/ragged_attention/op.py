"""ragged_attention_with_lse: public function, validation, schema and implementations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import FLOATS, FLOATS_AND_FLOAT64, Capability, Implementation
from torch_hybrid.ops.core.registration import (
    check_contiguous,
    check_dtypes,
    check_impl,
    check_planned,
    check_scale,
    check_shapes,
    define_op,
    given,
)
from torch_hybrid.ops.cudnn_attention import cudnn_missing
from torch_hybrid.ops.flashinfer.library import HOPPER, flashinfer_missing, with_flashinfer
from torch_hybrid.ops.native import compiler_missing
from torch_hybrid.ops.triton.devices import triton_devices, triton_missing

_PACKAGE = "torch_hybrid.ops.ragged_attention"
_OWN = {
    "cudnn": Implementation(
        capability=Capability(
            devices=frozenset({"cuda"}),
            dtypes=frozenset({torch.bfloat16, torch.float16}),
            multiples={"head_dim": 8, "v_head_dim": 8},
            limits={"head_dim": 192, "v_head_dim": 128},
            cuda_graph=True,
            available=cudnn_missing,
        ),
        launcher=f"{_PACKAGE}._cudnn:ragged_attention_with_lse",
        planner="torch_hybrid.ops.cudnn_attention:plan",
    ),
    "cpp": Implementation(
        capability=Capability(
            devices=frozenset({"cpu"}),
            dtypes=frozenset({torch.float32, torch.bfloat16}),
            multiples={"head_dim": 16, "v_head_dim": 16},
            available=compiler_missing,
        ),
        launcher=f"{_PACKAGE}._cpu:ragged_attention_with_lse",
    ),
    "triton": Implementation(
        capability=Capability(
            devices=triton_devices(),
            limits={"head_dim": 256, "v_head_dim": 256},
            cuda_graph=True,
            available=triton_missing,
        ),
        launcher=f"{_PACKAGE}._triton:ragged_attention_with_lse",
    ),
    "torch": Implementation(
        capability=Capability(devices=frozenset({"cpu", "cuda"}), dtypes=FLOATS_AND_FLOAT64),
        launcher=f"{_PACKAGE}._torch:ragged_attention_with_lse",
    ),
}
IMPLEMENTATIONS = with_flashinfer(
    "ragged_attention_with_lse",
    _OWN,
    Implementation(
        capability=Capability(
            devices=frozenset({"cuda"}),
            dtypes=frozenset({torch.bfloat16, torch.float16}),
            one_of={"head_dim": (192,), "v_head_dim": (128,)},
            cuda_graph=True,
            available=flashinfer_missing(capabilities=HOPPER),
        ),
        launcher=f"{_PACKAGE}._flashinfer:ragged_attention_with_lse",
        planner=f"{_PACKAGE}._flashinfer:plan",
        by_name="a NaN in rows that follow a sequence's keys gets into its results",
    ),
)


def ragged_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: bool,
    scale: float,
    planned: Sequence[Tensor] = (),
    impl: str,
) -> tuple[Tensor, Tensor]:
    """Attend within each sequence of a packed batch, and return the log-sum-exp of the logits.

    N sequences of any number of queries and keys, none included; H query heads, Hk key heads
    (query head i reads key head ``i // (H // Hk)``), values of another size than keys. This is
    the expanded form of multi-head latent attention (DeepSeek-V2): causal over the new tokens,
    and not causal over each chunk of their prefix, the results joined by ``merge_states``.

    Args:
        q: [Tq, H, D], float32, bfloat16 or float16; any strides that keep D contiguous.
        k: [Tk, Hk, D], as q; k and v may be slices of one projection.
        v: [Tk, Hk, Dv], as q.
        cu_seqlens_q: [N + 1] int32, offsets of each sequence's queries, from 0; queries from
            ``cu_seqlens_q[N]`` on are padding.
        cu_seqlens_k: [N + 1] int32, offsets of each sequence's keys, from 0.
        causal: whether query i of a sequence with n queries and m keys sees its first
            ``m - n + i + 1`` keys alone (the last query sees all).
        scale: factor of the logits, usually ``D ** -0.5``.
        planned: for an implementation that plans, what its planner made of the lengths of a causal
            call, whose keys end where the queries do: values as a tensor on the host.
        impl: name in IMPLEMENTATIONS.

    Returns:
        The output, [Tq, H, Dv] in the dtype of q, and the natural-log LSE, [Tq, H] float32.
        Padding queries, and queries that see no key, hold ``(0, -inf)``, the identity of
        ``merge_states``.

    Raises:
        ValueError: a shape, dtype or option is wrong, or, where reading them is free (on a CPU),
            the offsets are.
    """
    _validate(q, k, v, cu_seqlens_q, cu_seqlens_k)
    check_scale(scale)
    sizes = {"head_dim": q.shape[-1], "v_head_dim": v.shape[-1]}
    check_impl(impl, IMPLEMENTATIONS, q.device, sizes)
    check_planned(impl, IMPLEMENTATIONS, planned)
    out, lse = _RAGGED_ATTENTION_WITH_LSE(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        causal=causal,
        scale=scale,
        impl=impl,
        **given(planned),
    )
    return out, lse


def _validate(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    for name, tensor, dim in (
        ("q", q, 3),
        ("k", k, 3),
        ("v", v, 3),
        ("cu_seqlens_q", cu_seqlens_q, 1),
    ):
        if tensor.dim() != dim:
            raise ValueError(f"{name} must have {dim} dimensions, got {tensor.dim()}")
    num_keys, num_k_heads, _ = k.shape
    check_shapes(
        {
            "k": (k, (num_keys, num_k_heads, q.shape[2])),
            "v": (v, (num_keys, num_k_heads, v.shape[2])),
            "cu_seqlens_k": (cu_seqlens_k, cu_seqlens_q.shape),
        }
    )
    if q.shape[1] % num_k_heads:
        raise ValueError(
            f"q heads must be a multiple of the {num_k_heads} key heads, got {q.shape[1]}"
        )
    if q.dtype not in FLOATS and q.dtype != torch.float64:
        raise ValueError(f"q must be a floating point tensor, got {q.dtype}")
    check_dtypes(
        {
            "k": (k, q.dtype),
            "v": (v, q.dtype),
            "cu_seqlens_q": (cu_seqlens_q, torch.int32),
            "cu_seqlens_k": (cu_seqlens_k, torch.int32),
        }
    )
    check_contiguous(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} must have a contiguous last dim, got {tensor.stride()}")


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: bool,
    scale: float,
    impl: str,
    planned: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, _ = q.shape
    out = q.new_empty(num_tokens, num_heads, v.shape[2])
    return out, q.new_empty(num_tokens, num_heads, dtype=torch.float32)


_RAGGED_ATTENTION_WITH_LSE = define_op(
    "ragged_attention_with_lse(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q,"
    " Tensor cu_seqlens_k, *, bool causal, float scale, str impl,"
    " Tensor[]? planned=None) -> (Tensor, Tensor)",
    fake=_fake,
    implementations=IMPLEMENTATIONS,
)
