"""Real-gated linear recurrent units (RG-LRU): a vector state, updated in place by slot."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import (
    BATCH_INVARIANT,
    FLOATS_AND_FLOAT64,
    Capability,
    Implementation,
)
from torch_hybrid.ops.core.recurrence import check_slots, check_tokens
from torch_hybrid.ops.core.registration import (
    check_contiguous,
    check_dtypes,
    check_impl,
    check_shapes,
    define_op,
)
from torch_hybrid.ops.native import compiler_missing
from torch_hybrid.ops.triton.devices import triton_devices, triton_missing

_TRITON_CAPABILITY = Capability(devices=triton_devices(), cuda_graph=True, available=triton_missing)
IMPLEMENTATIONS: dict[str, Implementation] = {
    "cpp": Implementation(
        capability=Capability(
            devices=frozenset({"cpu"}),
            dtypes=frozenset({torch.float32, torch.bfloat16}),
            features=frozenset({BATCH_INVARIANT}),
            available=compiler_missing,
        ),
        launcher="torch_hybrid.ops.rg_lru._cpu:rg_lru",
    ),
    "triton": Implementation(
        capability=_TRITON_CAPABILITY, launcher="torch_hybrid.ops.rg_lru._triton:rg_lru"
    ),
    "triton_invariant": Implementation(
        capability=replace(_TRITON_CAPABILITY, features=frozenset({BATCH_INVARIANT})),
        launcher="torch_hybrid.ops.rg_lru._triton_invariant:rg_lru",
    ),
    "torch": Implementation(
        capability=Capability(devices=frozenset({"cpu", "cuda"}), dtypes=FLOATS_AND_FLOAT64),
        launcher="torch_hybrid.ops.rg_lru._torch:rg_lru",
    ),
}


def rg_lru(
    x: Tensor,
    gates: Tensor,
    log_a: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    impl: str,
) -> Tensor:
    """Advance a state of one number per channel by each token, and return it.

        i, r = sigmoid(gates)                  of each channel
        log_decay = r log_a
        h = exp(log_decay) h + sqrt(1 - exp(2 log_decay)) i x

    The first token of a sequence that starts from nothing is not scaled: ``h = i x``. Arithmetic is
    float32, of float64 tensors float64.

    Args:
        x: [T, C] inputs, the sequences packed one after the other. Float dtype; rows may lie any
            distance apart (a slice of a projection), one row is contiguous.
        gates: [T, H, 2 C / H] what the gates are before their sigmoid, in x's dtype: for each head
            those of its channels' inputs, then those of their recurrence. Tokens and heads may lie
            any distance apart, as a product for each head gives them.
        log_a: [C] float32 natural logarithm of a channel's decay where its gate is 1; 0 at most.
        state: [S, C] float32 pool. **Mutated**: slot ``state_indices[n]`` receives the state after
            the last token of sequence n; no other slot is written.
        cu_seqlens: [N + 1] int32 offsets of the sequences in T, from 0. Tokens at or past
            ``cu_seqlens[N]`` are padding. An empty sequence leaves its slot as it is.
        initial_indices: [N] int32 slot that each sequence starts from; 0, the null slot: from
            nothing. Several may start from one slot, which no other one may then write.
        state_indices: [N] int32 slot that receives the state of each sequence, distinct except
            for 0: that state is not stored.
        impl: a name in IMPLEMENTATIONS.

    Returns:
        [T, C] states after each token in x's dtype; rows of padding tokens are exactly 0.

    Raises:
        ValueError: a shape, dtype or layout is not as above, ``impl`` is unknown, or, where reading
            them is free (on a CPU), an index is out of range.

    "Griffin" (arXiv 2402.19427), as in RecurrentGemma.
    """
    check_impl(impl, IMPLEMENTATIONS, x.device, dtype=x.dtype)
    _check_inputs(x, gates, log_a, state, cu_seqlens, initial_indices, state_indices)
    out: Tensor = _RG_LRU(
        x, gates, log_a, state, cu_seqlens, initial_indices, state_indices, impl=impl
    )
    return out


def _check_inputs(
    x: Tensor,
    gates: Tensor,
    log_a: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
) -> None:
    for name, tensor, num_dims in (("x", x, 2), ("gates", gates, 3)):
        if tensor.ndim != num_dims:
            raise ValueError(f"{name} must have {num_dims} dimensions, got {list(tensor.shape)}")
    num_tokens, channels = x.shape
    num_heads = gates.shape[1]
    if num_heads < 1 or channels % num_heads:
        raise ValueError(f"gates must have heads that divide {channels} channels, got {num_heads}")
    check_tokens({"x": (x, (num_tokens, channels), x.dtype)})
    check_shapes(
        {
            "gates": (gates, (num_tokens, num_heads, 2 * channels // num_heads)),
            "log_a": (log_a, (channels,)),
        }
    )
    check_dtypes({"gates": (gates, x.dtype), "log_a": (log_a, torch.float32)})
    if gates.stride(2) != 1 and gates.shape[2] > 1:
        strides = list(gates.stride())
        raise ValueError(f"gates must have contiguous rows, got strides {strides}")
    check_contiguous(log_a=log_a)
    check_slots(state, (channels,), cu_seqlens, initial_indices, state_indices)


_RG_LRU = define_op(
    "rg_lru(Tensor x, Tensor gates, Tensor log_a, Tensor(a!) state, Tensor cu_seqlens, "
    "Tensor initial_indices, Tensor state_indices, *, str impl) -> Tensor",
    like=["x"],
    implementations=IMPLEMENTATIONS,
)
