"""Linear attention with a scalar decay over ragged sequences, its state updated in place by slot.

Two execution forms of one operation: ``recurrent_ssd`` walks token by token and is meant for
decode; ``chunk_ssd`` turns each chunk into matrix products. Both serve Mamba2, lightning attention
and mLSTM, which differ in their arguments alone; see README.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
from torch_hybrid.ops.core.registration import (
    check_impl,
    check_planned,
    check_shapes,
    define_op,
    given,
)
from torch_hybrid.ops.flashinfer.library import HOPPER, flashinfer_missing, with_flashinfer
from torch_hybrid.ops.native import compiler_missing
from torch_hybrid.ops.triton.devices import triton_devices, triton_missing

_CPU = "torch_hybrid.ops.ssd._cpu"
_TORCH = "torch_hybrid.ops.ssd._torch"
_CPP_CAPABILITY = Capability(
    devices=frozenset({"cpu"}),
    dtypes=frozenset({torch.float32, torch.bfloat16}),
    available=compiler_missing,
)

RECURRENT_IMPLEMENTATIONS: dict[str, Implementation] = with_flashinfer(
    "recurrent_ssd",
    {
        "cpp": Implementation(
            capability=replace(_CPP_CAPABILITY, features=frozenset({BATCH_INVARIANT})),
            launcher=f"{_CPU}:recurrent_ssd",
        ),
        "triton": Implementation(
            capability=Capability(
                devices=triton_devices(),
                limits={"head_k_dim": 512},
                features=frozenset({BATCH_INVARIANT}),
                cuda_graph=True,
                available=triton_missing,
            ),
            launcher="torch_hybrid.ops.ssd._triton:recurrent_ssd",
        ),
        "torch": Implementation(
            capability=Capability(devices=frozenset({"cpu", "cuda"})),
            launcher=f"{_TORCH}:recurrent_ssd",
        ),
    },
    Implementation(
        capability=Capability(
            devices=frozenset({"cuda"}),
            one_of={"head_k_dim": (64, 128, 256), "head_v_dim": (64, 128)},
            cuda_graph=True,
            available=flashinfer_missing(capabilities=HOPPER),
        ),
        launcher="torch_hybrid.ops.ssd._flashinfer:recurrent_ssd",
        planner="torch_hybrid.ops.flashinfer.one_token:plan",
        by_name="its exponentials are approximations, whose errors add up in the states",
    ),
)
CHUNK_IMPLEMENTATIONS: dict[str, Implementation] = {
    "cpp": Implementation(capability=_CPP_CAPABILITY, launcher=f"{_CPU}:chunk_ssd"),
    "triton": Implementation(
        capability=Capability(
            devices=triton_devices(),
            limits={"head_k_dim": 256},
            cuda_graph=True,
            available=triton_missing,
        ),
        launcher="torch_hybrid.ops.ssd._triton_chunk:chunk_ssd",
    ),
    "torch": Implementation(
        capability=Capability(devices=frozenset({"cpu", "cuda"})),
        launcher=f"{_TORCH}:chunk_ssd",
    ),
}


def recurrent_ssd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    dt: Tensor | None,
    D: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    scale: float,
    planned: Sequence[Tensor] = (),
    impl: str,
) -> Tensor:
    """Walk token by token and advance the state of every sequence.

    Per head: ``S = e^g S + (dt v) k^T; o = scale S q + D v``, so that a token reads itself,
    undecayed. Head ``h`` reads group ``h // (H // G)`` of q and k. All arithmetic is float32.

    Args:
        q: [T, G, K] queries (Mamba2's C), the sequences packed one after the other. Float dtype;
            rows may lie any distance apart (a slice of a projection), one row is contiguous; so
            for k, v, g and dt.
        k: [T, G, K] keys (Mamba2's B), in q's dtype.
        v: [T, H, V] values (Mamba2's x), in q's dtype; H is a multiple of G.
        g: [T, H] float32 natural-log decay, at most 0: Mamba2's ``dt * A``, or minus the slope
            of a head of lightning attention, one row expanded to all tokens.
        dt: [T, H] float32 weight of each token in the state, mLSTM's exponential input gate; None
            is 1.
        D: [H] float32 weight of each token in its own output besides; None is 0.
        state: [S, H, V, K] float32 pool. **Mutated**: slot ``state_indices[n]`` receives the
            state after the last token of sequence n; no other slot is written.
        cu_seqlens: [N + 1] int32 offsets of the sequences in T, from 0. Tokens at or past
            ``cu_seqlens[N]`` are padding. An empty sequence leaves its slot as it is.
        initial_indices: [N] int32 slot that each sequence starts from; 0, the null slot, is the
            zero state. Several may start from one slot, which no other one may then write.
        state_indices: [N] int32 slot that receives the state of each sequence, distinct except
            for 0: that state is not stored.
        scale: factor on q: 1 in Mamba2 and MiniMax-01, ``K ** -0.5`` in Ring-2.5 and mLSTM.
        planned: for an implementation that plans, what its planner made for these lengths: its
            tensors, and its values as a tensor on the host.
        impl: a name in RECURRENT_IMPLEMENTATIONS.

    Returns:
        [T, H, V] outputs in v's dtype; rows of padding tokens are exactly 0.

    Raises:
        ValueError: a shape, dtype or layout is not as above, ``impl`` is unknown, or, where reading
            them is free (on a CPU), an index is out of range.

    From "Transformers are SSMs" (Mamba2, arXiv 2405.21060), "Lightning Attention-2"
    (arXiv 2401.04658) and "xLSTM" (mLSTM, arXiv 2405.04517).
    """
    sizes = {"head_k_dim": q.shape[-1], "head_v_dim": v.shape[-1]}
    check_impl(impl, RECURRENT_IMPLEMENTATIONS, q.device, sizes, dtype=q.dtype)
    check_planned(impl, RECURRENT_IMPLEMENTATIONS, planned)
    _check_inputs(q, k, v, g, dt, D, state, cu_seqlens, initial_indices, state_indices)
    out: Tensor = _RECURRENT(
        q,
        k,
        v,
        g,
        dt,
        D,
        state,
        cu_seqlens,
        initial_indices,
        state_indices,
        scale=scale,
        impl=impl,
        **given(planned),
    )
    return out


def chunk_ssd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    dt: Tensor | None,
    D: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    scale: float,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    impl: str,
) -> Tensor:
    """Walk chunk by chunk: the same function, as matrix products.

    Chunks are counted from the first token of each sequence in this call, so the result for a
    sequence does not depend on its neighbours. Arguments, mutation and result are those of
    :func:`recurrent_ssd`, and:

    Args:
        chunk_size: tokens per chunk, 16, 32, 64 or 128; changes speed and rounding only. "triton"
            takes chunks of its own.
        impl: a name in CHUNK_IMPLEMENTATIONS.
    """
    sizes = {"head_k_dim": q.shape[-1]}
    check_impl(impl, CHUNK_IMPLEMENTATIONS, q.device, sizes, dtype=q.dtype)
    check_chunk_size(chunk_size)
    _check_inputs(q, k, v, g, dt, D, state, cu_seqlens, initial_indices, state_indices)
    out: Tensor = _CHUNK(
        q,
        k,
        v,
        g,
        dt,
        D,
        state,
        cu_seqlens,
        initial_indices,
        state_indices,
        scale=scale,
        chunk_size=chunk_size,
        impl=impl,
    )
    return out


def _check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    dt: Tensor | None,
    D: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
) -> None:
    check_heads(q=q, v=v)
    num_tokens, num_groups, k_dim = q.shape
    num_heads, v_dim = v.shape[1:]
    check_tokens(
        {
            "q": (q, q.shape, q.dtype),
            "k": (k, q.shape, q.dtype),
            "v": (v, (num_tokens, num_heads, v_dim), q.dtype),
            "g": (g, (num_tokens, num_heads), torch.float32),
            "dt": (dt, (num_tokens, num_heads), torch.float32),
        }
    )
    check_shapes({"D": (D, (num_heads,))})
    if D is not None and D.dtype != torch.float32:
        raise ValueError(f"D must have dtype {torch.float32}, got {D.dtype}")
    if D is not None and not D.is_contiguous():
        raise ValueError(f"D must be contiguous, got strides {list(D.stride())}")
    check_slots(state, (num_heads, v_dim, k_dim), cu_seqlens, initial_indices, state_indices)
    if num_heads % num_groups:
        raise ValueError(f"v must have a multiple of the {num_groups} heads of k, got {num_heads}")


_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor? dt, Tensor? D, Tensor(a!) state, "
    "Tensor cu_seqlens, Tensor initial_indices, Tensor state_indices"
)
_RECURRENT = define_op(
    f"recurrent_ssd({_TENSORS}, *, float scale, str impl, Tensor[]? planned=None) -> Tensor",
    like=["v"],
    implementations=RECURRENT_IMPLEMENTATIONS,
)
_CHUNK = define_op(
    f"chunk_ssd({_TENSORS}, *, float scale, int chunk_size, str impl) -> Tensor",
    like=["v"],
    implementations=CHUNK_IMPLEMENTATIONS,
)
