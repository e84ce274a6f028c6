"""Kimi delta attention over ragged sequences, with its state updated in place by slot.

Two execution forms of one operation: ``recurrent_kimi_delta_attention`` walks token by token and is
meant for decode; ``chunk_kimi_delta_attention`` turns each chunk into matrix products.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import BATCH_INVARIANT, Capability, Implementation
from torch_hybrid.ops.core.recurrence import (
    DEFAULT_CHUNK_SIZE,
    check_chunk_size,
    check_heads,
    check_slots,
    check_tokens,
)
from torch_hybrid.ops.core.registration import check_impl, check_planned, define_op, given
from torch_hybrid.ops.native import compiler_missing
from torch_hybrid.ops.triton.devices import triton_devices, triton_missing

_CPU = "torch_hybrid.ops.delta_rule._cpu_kimi"
_TORCH = "torch_hybrid.ops.delta_rule._torch_kimi"
_TRITON = "torch_hybrid.ops.delta_rule._triton"
_CPP_CAPABILITY = Capability(
    devices=frozenset({"cpu"}),
    dtypes=frozenset({torch.float32, torch.bfloat16}),
    available=compiler_missing,
)

RECURRENT_IMPLEMENTATIONS: dict[str, Implementation] = {
    "cpp": Implementation(
        capability=_CPP_CAPABILITY, launcher=f"{_CPU}:recurrent_kimi_delta_attention"
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
        launcher=f"{_TORCH}:recurrent_kimi_delta_attention",
    ),
}
CHUNK_IMPLEMENTATIONS: dict[str, Implementation] = {
    "cpp": Implementation(
        capability=_CPP_CAPABILITY, launcher=f"{_CPU}:chunk_kimi_delta_attention"
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
        launcher=f"{_TRITON}_kimi:chunk_kimi_delta_attention",
        options={"is_exact": False},
        planner="torch_hybrid.ops.delta_rule._triton_scan:plan",
        needs_plan=False,
    ),
    "triton": Implementation(
        capability=Capability(
            devices=triton_devices(),
            limits={"head_k_dim": 128},
            cuda_graph=True,
            available=triton_missing,
        ),
        launcher=f"{_TRITON}_kimi:chunk_kimi_delta_attention",
        planner="torch_hybrid.ops.delta_rule._triton_scan:plan",
        needs_plan=False,
    ),
    "torch": Implementation(
        capability=Capability(devices=frozenset({"cpu", "cuda"})),
        launcher=f"{_TORCH}:chunk_kimi_delta_attention",
    ),
}


def recurrent_kimi_delta_attention(
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
    impl: str,
) -> Tensor:
    """Run Kimi delta attention token by token and advance the state of every sequence.

    Per head: ``S = S diag(e^g); u = beta (v - S k); S = S + u k^T; o = scale S q``. All
    arithmetic is float32. How g comes about (softplus, or bounded from below) is the layer's
    matter: any g up to 0 is exact, -inf (forget the channel) included.

    Args:
        q: [T, H, K] queries, the sequences packed one after the other. Float dtype; rows may lie
            any distance apart (a slice of a projection), one row is contiguous; so for k and v.
        k: [T, H, K] keys, in q's dtype.
        v: [T, H, V] values, in q's dtype.
        g: [T, H, K] float32 natural-log decay of each channel, at most 0; rows as for q.
        beta: [T, H] float32 step size, in [0, 1].
        state: [S, H, V, K] float32 pool. **Mutated**: slot ``state_indices[n]`` receives the
            state after the last token of sequence n; no other slot is written.
        cu_seqlens: [N + 1] int32 offsets of the sequences in T, from 0. Tokens at or past
            ``cu_seqlens[N]`` are padding. An empty sequence leaves its slot as it is.
        initial_indices: [N] int32 slot that each sequence starts from; 0, the null slot, is the
            zero state. Several may start from one slot, which no other one may then write.
        state_indices: [N] int32 slot that receives the state of each sequence, distinct except
            for 0: that state is not stored.
        scale: factor on q, usually ``K ** -0.5``.
        qk_l2norm: scale each q and k to unit length first, by ``rsqrt(sum x^2 + 1e-6)``.
        impl: a name in RECURRENT_IMPLEMENTATIONS.

    Returns:
        [T, H, V] outputs in v's dtype; rows of padding tokens are exactly 0.

    Raises:
        ValueError: a shape, dtype or layout is not as above, ``impl`` is unknown, or, where reading
            them is free (on a CPU), an index is out of range.

    From "Kimi Linear" (arXiv 2510.26692); also the linear layers of Ling-3.
    """
    sizes = {"head_k_dim": q.shape[-1]}
    check_impl(impl, RECURRENT_IMPLEMENTATIONS, q.device, sizes, dtype=q.dtype)
    _check_inputs(q, k, v, g, beta, state, cu_seqlens, initial_indices, state_indices)
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
    )
    return out


def chunk_kimi_delta_attention(
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
    """Run Kimi delta attention chunk by chunk: the same function, as matrix products.

    Chunks are counted from the first token of each sequence in this call, so the result for a
    sequence does not depend on its neighbours. Arguments, mutation and result are those of
    :func:`recurrent_kimi_delta_attention`, and:

    Args:
        chunk_size: tokens per chunk, 16, 32, 64 or 128; changes speed and rounding only. "triton"
            takes chunks of its own.
        planned: for an implementation that plans, what its planner made for these lengths: its
            tensors, and its values as a tensor on the host.
        impl: a name in CHUNK_IMPLEMENTATIONS.
    """
    sizes = {"head_k_dim": q.shape[-1]}
    check_impl(impl, CHUNK_IMPLEMENTATIONS, q.device, sizes, dtype=q.dtype)
    check_planned(impl, CHUNK_IMPLEMENTATIONS, planned)
    check_chunk_size(chunk_size)
    _check_inputs(q, k, v, g, beta, state, cu_seqlens, initial_indices, state_indices)
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


def _check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
) -> None:
    check_heads(q=q, v=v)
    num_tokens, num_heads, k_dim = q.shape
    v_dim = v.shape[2]
    check_tokens(
        {
            "q": (q, q.shape, q.dtype),
            "k": (k, q.shape, q.dtype),
            "v": (v, (num_tokens, num_heads, v_dim), q.dtype),
            "g": (g, q.shape, torch.float32),
            "beta": (beta, (num_tokens, num_heads), torch.float32),
        }
    )
    check_slots(state, (num_heads, v_dim, k_dim), cu_seqlens, initial_indices, state_indices)


_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, Tensor cu_seqlens, "
    "Tensor initial_indices, Tensor state_indices"
)
_RECURRENT = define_op(
    f"recurrent_kimi_delta_attention({_TENSORS}, *, float scale, bool qk_l2norm, "
    "str impl) -> Tensor",
    like=["v"],
    implementations=RECURRENT_IMPLEMENTATIONS,
)
_CHUNK = define_op(
    f"chunk_kimi_delta_attention({_TENSORS}, *, float scale, bool qk_l2norm, int chunk_size, "
    "str impl, Tensor[]? planned=None) -> Tensor",
    like=["v"],
    implementations=CHUNK_IMPLEMENTATIONS,
)
