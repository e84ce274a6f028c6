"""Mamba's selective scan over ragged sequences, its state updated in place by slot.

Two execution forms of one operation: ``recurrent_selective_scan`` walks token by token and is meant
for decode; ``chunk_selective_scan`` may walk parts of a sequence side by side. Both take the step
sizes before their softplus, and gate what they read: between the projections that make its inputs
and the one that takes its outputs, the op is all that a mixer does.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import BATCH_INVARIANT, Capability, Implementation
from torch_hybrid.ops.core.recurrence import (
    DEFAULT_CHUNK_SIZE,
    check_chunk_size,
    check_slots,
    check_tokens,
)
from torch_hybrid.ops.core.registration import (
    check_contiguous,
    check_dtypes,
    check_impl,
    check_shapes,
    define_op,
)
from torch_hybrid.ops.native import compiler_missing
from torch_hybrid.ops.triton.devices import triton_devices, triton_missing

_CPU = "torch_hybrid.ops.selective_scan._cpu"
_TORCH = "torch_hybrid.ops.selective_scan._torch"
_TRITON = "torch_hybrid.ops.selective_scan._triton"
_CPP_CAPABILITY = Capability(
    devices=frozenset({"cpu"}),
    dtypes=frozenset({torch.float32, torch.bfloat16}),
    available=compiler_missing,
)
_TRITON_CAPABILITY = Capability(
    devices=triton_devices(),
    limits={"state_dim": 256},
    cuda_graph=True,
    available=triton_missing,
)
_TORCH_CAPABILITY = Capability(devices=frozenset({"cpu", "cuda"}))

RECURRENT_IMPLEMENTATIONS: dict[str, Implementation] = {
    "cpp": Implementation(
        capability=replace(_CPP_CAPABILITY, features=frozenset({BATCH_INVARIANT})),
        launcher=f"{_CPU}:recurrent_selective_scan",
    ),
    "triton": Implementation(
        capability=replace(_TRITON_CAPABILITY, features=frozenset({BATCH_INVARIANT})),
        launcher=f"{_TRITON}:recurrent_selective_scan",
    ),
    "torch": Implementation(
        capability=_TORCH_CAPABILITY, launcher=f"{_TORCH}:recurrent_selective_scan"
    ),
}
CHUNK_IMPLEMENTATIONS: dict[str, Implementation] = {
    "cpp": Implementation(capability=_CPP_CAPABILITY, launcher=f"{_CPU}:chunk_selective_scan"),
    "triton": Implementation(
        capability=_TRITON_CAPABILITY, launcher=f"{_TRITON}:chunk_selective_scan"
    ),
    "torch": Implementation(
        capability=_TORCH_CAPABILITY, launcher=f"{_TORCH}:chunk_selective_scan"
    ),
}


def recurrent_selective_scan(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    z: Tensor | None,
    A_log: Tensor,
    D: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    impl: str,
) -> Tensor:
    """Walk token by token and advance the state of every sequence.

    Per channel and state, with a step size of each channel:

        step = softplus(dt)
        S = exp(-exp(A_log) step) S + step x B
        out = (sum of S C over the states + D x) silu(z)

    so that a token reads itself, undecayed. Channel ``c`` reads group ``c // (channels // G)`` of B
    and C. All arithmetic is float32, rounded once at the end.

    Args:
        x: [T, channels] inputs, the sequences packed one after the other. Float dtype; rows may lie
            any distance apart (a slice of a projection), one row is contiguous; so for dt, B, C
            and z, which have its dtype.
        dt: [T, channels] step sizes before their softplus, their bias added.
        B: [T, G, N] by what inputs enter each of the N states of a channel; G divides the channels.
        C: [T, G, N] by what the states are read.
        z: [T, channels] gate of the output; None: it is not gated.
        A_log: [channels, N] logarithm of the rate at which each state decays, in x's dtype or in
            float32.
        D: [channels] weight of each input in its own output besides, in x's dtype or in float32.
        state: [S, channels, N] float32 pool. **Mutated**: slot ``state_indices[n]`` receives the
            state after the last token of sequence n; no other slot is written.
        cu_seqlens: [N + 1] int32 offsets of the sequences in T, from 0. Tokens at or past
            ``cu_seqlens[N]`` are padding. An empty sequence leaves its slot as it is.
        initial_indices: [N] int32 slot that each sequence starts from; 0, the null slot, is the
            zero state. Several may start from one slot, which no other one may then write.
        state_indices: [N] int32 slot that receives the state of each sequence, distinct except
            for 0: that state is not stored.
        impl: a name in RECURRENT_IMPLEMENTATIONS.

    Returns:
        [T, channels] in x's dtype; rows of padding tokens are exactly 0.

    Raises:
        ValueError: a shape, dtype or layout is not as above, ``impl`` is unknown, or, where reading
            them is free (on a CPU), an index is out of range.

    From "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (arXiv 2312.00752).
    """
    tensors = (x, dt, B, C, z, A_log, D, state, cu_seqlens, initial_indices, state_indices)
    sizes = {"state_dim": state.shape[-1]}
    check_impl(impl, RECURRENT_IMPLEMENTATIONS, x.device, sizes, dtype=x.dtype)
    _check_inputs(*tensors)
    out: Tensor = _RECURRENT(*tensors, impl=impl)
    return out


def chunk_selective_scan(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    z: Tensor | None,
    A_log: Tensor,
    D: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    impl: str,
) -> Tensor:
    """Walk the parts of a sequence side by side where that pays: the same function.

    Arguments, mutation and result are those of :func:`recurrent_selective_scan`, and:

    Args:
        chunk_size: tokens that "torch" takes as a part, 16, 32, 64 or 128; changes speed and
            rounding only. "cpp" has channels enough to walk all parts one after the other, "triton"
            takes parts of its own.
        impl: a name in CHUNK_IMPLEMENTATIONS.
    """
    tensors = (x, dt, B, C, z, A_log, D, state, cu_seqlens, initial_indices, state_indices)
    sizes = {"state_dim": state.shape[-1]}
    check_impl(impl, CHUNK_IMPLEMENTATIONS, x.device, sizes, dtype=x.dtype)
    check_chunk_size(chunk_size)
    _check_inputs(*tensors)
    out: Tensor = _CHUNK(*tensors, chunk_size=chunk_size, impl=impl)
    return out


def _check_inputs(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    z: Tensor | None,
    A_log: Tensor,
    D: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
) -> None:
    for name, tensor, num_dims in (("x", x, 2), ("B", B, 3), ("A_log", A_log, 2)):
        if tensor.ndim != num_dims:
            raise ValueError(f"{name} must have {num_dims} dimensions, got {list(tensor.shape)}")
    num_tokens, channels = x.shape
    num_groups, state_dim = B.shape[1], A_log.shape[1]
    of_groups = (num_tokens, num_groups, state_dim)
    check_tokens(
        {
            "x": (x, x.shape, x.dtype),
            "dt": (dt, x.shape, x.dtype),
            "B": (B, of_groups, x.dtype),
            "C": (C, of_groups, x.dtype),
            "z": (z, x.shape, x.dtype),
        }
    )
    check_shapes({"A_log": (A_log, (channels, state_dim)), "D": (D, (channels,))})
    parameters = {"A_log": A_log, "D": D}
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32:
            check_dtypes({name: (parameter, x.dtype)})
    check_contiguous(**parameters)
    check_slots(state, (channels, state_dim), cu_seqlens, initial_indices, state_indices)
    if num_groups < 1 or channels % num_groups:
        raise ValueError(f"x must have a multiple of the {num_groups} groups of B, got {channels}")


_TENSORS = (
    "Tensor x, Tensor dt, Tensor B, Tensor C, Tensor? z, Tensor A_log, Tensor D, "
    "Tensor(a!) state, Tensor cu_seqlens, Tensor initial_indices, Tensor state_indices"
)
_RECURRENT = define_op(
    f"recurrent_selective_scan({_TENSORS}, *, str impl) -> Tensor",
    like=["x"],
    implementations=RECURRENT_IMPLEMENTATIONS,
)
_CHUNK = define_op(
    f"chunk_selective_scan({_TENSORS}, *, int chunk_size, str impl) -> Tensor",
    like=["x"],
    implementations=CHUNK_IMPLEMENTATIONS,
)
