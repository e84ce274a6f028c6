"""RWKV's weighted average of past values (WKV): a vector state, updated in place by slot."""

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
        launcher="torch_hybrid.ops.wkv._cpu:wkv",
    ),
    "triton": Implementation(
        capability=_TRITON_CAPABILITY, launcher="torch_hybrid.ops.wkv._triton:wkv"
    ),
    "triton_invariant": Implementation(
        capability=replace(_TRITON_CAPABILITY, features=frozenset({BATCH_INVARIANT})),
        launcher="torch_hybrid.ops.wkv._triton_invariant:wkv",
    ),
    "torch": Implementation(
        capability=Capability(devices=frozenset({"cpu", "cuda"}), dtypes=FLOATS_AND_FLOAT64),
        launcher="torch_hybrid.ops.wkv._torch:wkv",
    ),
}


def wkv(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    impl: str,
) -> Tensor:
    """The mean of a channel's values so far, each weighted by its key and by its age.

        out         = (numerator + e^(bonus + k) v) / (denominator + e^(bonus + k))
        numerator   = e^log_decay numerator + e^k v             of each channel
        denominator = e^log_decay denominator + e^k

    Both sums are kept divided by e^exponent, of the largest exponent in them, so that none of them
    overflows. Arithmetic is float32, of float64 tensors float64.

    Args:
        k: [T, C] logarithms of weights, the sequences packed one after the other. Float dtype; rows
            may lie any distance apart (a slice of a projection), one row is contiguous.
        v: [T, C] values, like ``k``.
        log_decay: [C] float32, what a token takes from the logarithms of all weights before it;
            0 at most.
        bonus: [C] float32, what a token's own weight has more in the token's own output.
        state: [S, 3, C] float32 pool: numerator, denominator, exponent. **Mutated**: slot
            ``state_indices[n]`` receives the state after the last token of sequence n; no other
            slot is written.
        cu_seqlens: [N + 1] int32 offsets of the sequences in T, from 0. Tokens at or past
            ``cu_seqlens[N]`` are padding. An empty sequence leaves its slot as it is.
        initial_indices: [N] int32 slot that each sequence starts from; 0, the null slot: from
            nothing. Several may start from one slot, which no other one may then write.
        state_indices: [N] int32 slot that receives the state of each sequence, distinct except
            for 0: that state is not stored.
        impl: a name in IMPLEMENTATIONS.

    Returns:
        [T, C] means in k's dtype; rows of padding tokens are exactly 0.

    Raises:
        ValueError: a shape, dtype or layout is not as above, ``impl`` is unknown, or, where reading
            them is free (on a CPU), an index is out of range.

    "RWKV" (arXiv 2305.13048), as in RWKV-4.
    """
    check_impl(impl, IMPLEMENTATIONS, k.device, dtype=k.dtype)
    _check_inputs(k, v, log_decay, bonus, state, cu_seqlens, initial_indices, state_indices)
    out: Tensor = _WKV(
        k, v, log_decay, bonus, state, cu_seqlens, initial_indices, state_indices, impl=impl
    )
    return out


def _check_inputs(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
) -> None:
    if k.ndim != 2:
        raise ValueError(f"k must have 2 dimensions, got {list(k.shape)}")
    channels = k.shape[1]
    check_tokens({"k": (k, k.shape, k.dtype), "v": (v, k.shape, k.dtype)})
    check_shapes({"log_decay": (log_decay, (channels,)), "bonus": (bonus, (channels,))})
    check_dtypes({"log_decay": (log_decay, torch.float32), "bonus": (bonus, torch.float32)})
    check_contiguous(log_decay=log_decay, bonus=bonus)
    check_slots(state, (3, channels), cu_seqlens, initial_indices, state_indices)


_WKV = define_op(
    "wkv(Tensor k, Tensor v, Tensor log_decay, Tensor bonus, Tensor(a!) state, Tensor cu_seqlens, "
    "Tensor initial_indices, Tensor state_indices, *, str impl) -> Tensor",
    like=["k"],
    implementations=IMPLEMENTATIONS,
)
