"""The gated delta rule over ragged sequences, with its state updated in place by slot.

Two execution forms of one operation: ``recurrent_gated_delta_rule`` walks token by token and is
meant for decode; ``chunk_gated_delta_rule`` turns each chunk into matrix products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import BATCH_INVARIANT, Capability, Implementation
from torch_hybrid.ops.core.recurrence import DEFAULT_CHUNK_SIZE, check_chunk_size
from torch_hybrid.ops.core.registration import check_impl, check_planned, define_op, given
from torch_hybrid.ops.delta_rule.kimi_op import (
    chunk_kimi_delta_attention,
    recurrent_kimi_delta_attention,
)
from torch_hybrid.ops.delta_rule.validate import check_inputs
from torch_hybrid.ops.flashinfer.library import HOPPER, flashinfer_missing, with_flashinfer
from torch_hybrid.ops.native import compiler_missing
from torch_hybrid.ops.triton.devices import triton_devices, triton_missing

__all__ = [
    "chunk_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "recurrent_gated_delta_rule",
    "recurrent_kimi_delta_attention",
]

_FLASHINFER = "torch_hybrid.ops.delta_rule._flashinfer"
_CPU = "torch_hybrid.ops.delta_rule._cpu_gated"
_TORCH = "torch_hybrid.ops.delta_rule._torch_gated"
_TRITON = "torch_hybrid.ops.delta_rule._triton"
_CPP_CAPABILITY = Capability(
    devices=frozenset({"cpu"}),
    dtypes=frozenset({torch.float32, torch.bfloat16}),
    available=compiler_missing,
)

RECURRENT_IMPLEMENTATIONS: dict[str, Implementation] = with_flashinfer(
    "recurrent_gated_delta_rule",
    {
        "cpp": Implementation(
            capability=replace(_CPP_CAPABILITY, features=frozenset({BATCH_INVARIANT})),
            launcher=f"{_CPU}:recurrent_gated_delta_rule",
        ),
        "triton": Implementation(
            capability=Capability(
                devices=triton_devices(),
                limits={"head_k_dim": 512},
                features=frozenset({BATCH_INVARIANT}),
                cuda_graph=True,
                available=triton_missing,
            ),
            launcher=f"{_TRITON}:recurrent_delta_rule",
        ),
        "torch": Implementation(
            capability=Capability(devices=frozenset({"cpu", "cuda"})),
            launcher=f"{_TORCH}:recurrent_gated_delta_rule",
        ),
    },
    Implementation(
        capability=Capability(
            devices=frozenset({"cuda"}),
            dtypes=frozenset({torch.bfloat16}),
            one_of={"head_k_dim": (128,), "head_v_dim": (128,)},
            limits={"max_beta": 1},
            cuda_graph=True,
            available=flashinfer_missing(capabilities=HOPPER, cutlass_dsl=True),
        ),
        launcher=f"{_FLASHINFER}_decode:recurrent_gated_delta_rule",
        planner="torch_hybrid.ops.flashinfer.one_token:plan",
        by_name="its exponentials are approximations, whose errors add up in the states",
    ),
)
CHUNK_IMPLEMENTATIONS: dict[str, Implementation] = with_flashinfer(
    "chunk_gated_delta_rule",
    {
        "cpp": Implementation(
            capability=_CPP_CAPABILITY, launcher=f"{_CPU}:chunk_gated_delta_rule"
        ),
        "triton_rounded": Implementation(
            capability=Capability(
                devices=frozenset({"cuda"}),
                dtypes=frozenset({torch.bfloat16}),
                limits={"head_k_dim": 128},
                exact=False,
                cuda_graph=True,
                available=triton_missing,
            ),
            launcher=f"{_TRITON}_gated:chunk_gated_delta_rule",
            options={"is_exact": False},
            planner="torch_hybrid.ops.delta_rule._triton_scan:plan",
            needs_plan=False,
        ),
        "triton": Implementation(
            capability=Capability(
                devices=triton_devices(),
                limits={"head_k_dim": 256},
                cuda_graph=True,
                available=triton_missing,
            ),
            launcher=f"{_TRITON}_gated:chunk_gated_delta_rule",
            planner="torch_hybrid.ops.delta_rule._triton_scan:plan",
            needs_plan=False,
        ),
        "torch": Implementation(
            capability=Capability(devices=frozenset({"cpu", "cuda"})),
            launcher=f"{_TORCH}:chunk_gated_delta_rule",
        ),
    },
    Implementation(
        capability=Capability(
            devices=frozenset({"cuda"}),
            dtypes=frozenset({torch.bfloat16, torch.float16}),
            one_of={"head_k_dim": (128,), "head_v_dim": (128,)},
            cuda_graph=True,
            available=flashinfer_missing(capabilities=HOPPER, cutlass_dsl=True),
        ),
        launcher=f"{_FLASHINFER}:chunk_gated_delta_rule",
        planner=f"{_FLASHINFER}:plan",
        by_name="its states are good to 16 bits, those of the others to float32",
    ),
)


def recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    scale: float,
    qk_l2norm: bool,
    planned: Sequence[Tensor] = (),
    impl: str,
) -> Tensor:
    """Run the gated delta rule token by token and advance the state of every sequence.

    Per value head: ``S = e^g S; u = beta (v - S k); S = S + u k^T; o = scale S q``. Value head
    ``j`` reads key head ``j // (HV // H)``. All arithmetic is float32.

    Args:
        q: [T, H, K] queries, the sequences packed one after the other. Float dtype; rows may lie
            any distance apart (a slice of a projection), one row is contiguous; so for k and v.
        k: [T, H, K] keys, in q's dtype.
        v: [T, HV, V] values, in q's dtype; HV is a multiple of H.
        g: [T, HV] float32 natural-log decay, at most 0.
        beta: [T, HV] float32 step size, in [0, 1], or [0, 2] with negative eigenvalues.
        state: [S, HV, V, K] float32 pool. **Mutated**: slot ``state_indices[n]`` receives the
            state after the last token of sequence n; no other slot is written.
        cu_seqlens: [N + 1] int32 offsets of the sequences in T, from 0. Tokens at or past
            ``cu_seqlens[N]`` are padding. An empty sequence leaves its slot as it is.
        initial_indices: [N] int32 slot that each sequence starts from; 0, the null slot, is the
            zero state. Several may start from one slot, which no other one may then write.
        state_indices: [N] int32 slot that receives the state of each sequence, distinct except
            for 0: that state is not stored.
        scale: factor on q, usually ``K ** -0.5``.
        qk_l2norm: scale each q and k to unit length first, by ``rsqrt(sum x^2 + 1e-6)``.
        planned: for an implementation that plans, what its planner made for these lengths: its
            tensors, and its values as a tensor on the host.
        impl: a name in RECURRENT_IMPLEMENTATIONS.

    Returns:
        [T, HV, V] outputs in v's dtype; rows of padding tokens are exactly 0.

    Raises:
        ValueError: a shape, dtype or layout is not as above, ``impl`` is unknown, or, where reading
            them is free (on a CPU), an index is out of range.

    From "Gated Delta Networks" (arXiv 2412.06464), as used by Qwen3-Next.
    """
    sizes = {"head_k_dim": q.shape[-1], "head_v_dim": v.shape[-1]}
    check_impl(impl, RECURRENT_IMPLEMENTATIONS, q.device, sizes, dtype=q.dtype)
    check_planned(impl, RECURRENT_IMPLEMENTATIONS, planned)
    check_inputs(q, k, v, g, beta, state, cu_seqlens, initial_indices, state_indices)
    out: Tensor = _RECURRENT(
        q,
        k,
        v,
        g,
        beta,
        state,
        cu_seqlens,
        initial_indices,
        state_indices,
        scale=scale,
        qk_l2norm=qk_l2norm,
        impl=impl,
        **given(planned),
    )
    return out


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    scale: float,
    qk_l2norm: bool,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    planned: Sequence[Tensor] = (),
    impl: str,
) -> Tensor:
    """Run the gated delta rule chunk by chunk: the same function, as matrix products.

    Chunks are counted from the first token of each sequence in this call, so the result for a
    sequence does not depend on its neighbours. Arguments, mutation and result are those of
    :func:`recurrent_gated_delta_rule`, and:

    Args:
        chunk_size: tokens per chunk, 16, 32, 64 or 128; changes speed and rounding only. "triton"
            and "flashinfer" take chunks of their own.
        impl: a name in CHUNK_IMPLEMENTATIONS.
    """
    sizes = {"head_k_dim": q.shape[-1], "head_v_dim": v.shape[-1]}
    check_impl(impl, CHUNK_IMPLEMENTATIONS, q.device, sizes, dtype=q.dtype)
    check_planned(impl, CHUNK_IMPLEMENTATIONS, planned)
    check_chunk_size(chunk_size)
    check_inputs(q, k, v, g, beta, state, cu_seqlens, initial_indices, state_indices)
    out: Tensor = _CHUNK(
        q,
        k,
        v,
        g,
        beta,
        state,
        cu_seqlens,
        initial_indices,
        state_indices,
        scale=scale,
        qk_l2norm=qk_l2norm,
        chunk_size=chunk_size,
        impl=impl,
        **given(planned),
    )
    return out


_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, Tensor cu_seqlens, "
    "Tensor initial_indices, Tensor state_indices"
)
_RECURRENT = define_op(
    f"recurrent_gated_delta_rule({_TENSORS}, *, float scale, bool qk_l2norm, str impl, "
    "Tensor[]? planned=None) -> Tensor",
    like=["v"],
    implementations=RECURRENT_IMPLEMENTATIONS,
)
_CHUNK = define_op(
    f"chunk_gated_delta_rule({_TENSORS}, *, float scale, bool qk_l2norm, int chunk_size, "
    "str impl, Tensor[]? planned=None) -> Tensor",
    like=["v"],
    implementations=CHUNK_IMPLEMENTATIONS,
)
