"""One token of each sequence through a lightning-attention mixer, between its projections.

The norms and the rotation of q and k, the recurrence, the gate and the norm of a decode step in one
op: each by itself takes little, and costs as much again to be called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_hybrid.ops.conv_step import check_activation
from torch_hybrid.ops.core.registration import check_impl, define_op
from torch_hybrid.ops.lightning_step.validate import check_inputs
from torch_hybrid.ops.step_implementations import step_implementations, verify_implementations
from torch_hybrid.ops.verify import SCHEMA as RECORDS
from torch_hybrid.ops.verify import check_records

IMPLEMENTATIONS = step_implementations("lightning_step", limits={"head_k_dim": 512})
VERIFY_IMPLEMENTATIONS = verify_implementations(IMPLEMENTATIONS, "lightning_verify")


def lightning_step(
    qkv: Tensor,
    gate: Tensor | None,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    slopes: Tensor,
    norm_weight: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    activation: str,
    scale: float,
    norm_groups: int,
    norm_eps: float,
    impl: str,
) -> Tensor:
    """Norm and rotate q and k, advance the states by one token, and norm and gate what is read.

        q, k, v = act(qkv), rounded to the dtype
        q, k = norm_weight q / rms(q), ...                 of each head, where there are weights
        q, k = rotated by the token's angles               NeoX's halves, where there are angles
        S = exp(-slope) S + v k^T
        o = scale S q                  rounded to the dtype where q and k are not normed
        out = norm_weight o / rms(o) sigmoid(gate)         rms of each group of channels

    It is what a layer computes before ``recurrent_ssd``, that op, and what comes after it, with the
    same roundings between them; all arithmetic is float32.

    Args:
        qkv: [T, 3 H D] queries, keys and values, a row for each token; H and D are those of
            ``state``. Float dtype; rows may lie any distance apart (a slice of a projection), one
            row is contiguous; so for gate, cos and sin.
        gate: [T, H D] of the output, before its sigmoid, in qkv's dtype, or None: o is returned.
        q_norm_weight, k_norm_weight: [D] in qkv's dtype or in float32, or both None.
        cos, sin: [T, R / 2] float32, of which the first R channels of a head are rotated, or both
            None.
        slopes: [H] float32, minus the log decay of a token in each head.
        norm_weight: [H D] in qkv's dtype or in float32; None where gate is None.
        state: [S, H, D, D] float32 pool. **Mutated**: slot ``state_indices[n]`` receives the
            state after the token of sequence n; no other slot is written.
        cu_seqlens: [N + 1] int32 offsets of the sequences in T, from 0: each has one token, or
            none, which leaves its slot as it is. Implementations with the feature "extend" take
            several, of sequences that have a slot: as so many calls would, bit by bit. Tokens at or
            past ``cu_seqlens[N]`` are padding.
        initial_indices: [N] int32 slot that each sequence starts from; 0, the null slot, is the
            zero state. Several may start from one slot, which no other one may then write.
        state_indices: [N] int32 slot that receives the state of each sequence, distinct except
            for 0: that state is not stored.
        activation: of q, k and v, "none" or "silu".
        scale: factor on q.
        norm_groups: equal parts of a token's H D channels, each normed by itself.
        norm_eps: added to the mean square of a head of q and k, and of a group.
        impl: a name in IMPLEMENTATIONS.

    Returns:
        [T, H D] in qkv's dtype, without a gate in float32; rows of padding tokens are exactly 0.

    Raises:
        ValueError: a shape, dtype or layout is not as above, an option is unknown, or, where
            reading them is free (on a CPU), an index is out of range or a sequence has more tokens
            than the implementation takes.

    The mixer of MiniMax-01 (arXiv 2501.08313) and of Ring-2.5, in decode.
    """
    sizes = {"head_k_dim": state.shape[-1]}
    check_impl(impl, IMPLEMENTATIONS, qkv.device, sizes, dtype=qkv.dtype)
    tensors = (
        qkv,
        gate,
        q_norm_weight,
        k_norm_weight,
        cos,
        sin,
        slopes,
        norm_weight,
        state,
        cu_seqlens,
        initial_indices,
        state_indices,
    )
    check_activation(activation)
    check_inputs(*tensors, norm_groups=norm_groups)
    out: Tensor = _STEP(
        *tensors,
        activation=activation,
        scale=scale,
        norm_groups=norm_groups,
        norm_eps=norm_eps,
        impl=impl,
    )
    return out


def lightning_verify(
    qkv: Tensor,
    gate: Tensor | None,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    slopes: Tensor,
    norm_weight: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    records: Tensor,
    accepted: Tensor,
    *,
    activation: str,
    scale: float,
    norm_groups: int,
    norm_eps: float,
    impl: str,
) -> Tensor:
    """``lightning_step`` of one certain token of each sequence and drafts after it.

    The accepted records of a sequence are replayed, its first token runs and its state is left;
    further tokens are run and not stored, and leave records (``ops.verify``). In native
    implementations states have the bits that ``lightning_step`` leaves after the same tokens, one
    by one.

    Args:
        qkv, gate, q_norm_weight, k_norm_weight, cos, sin, slopes, norm_weight: as of the step.
        state: as of the step. **Mutated**: slot ``state_indices[n]`` receives what is there after
            the accepted records and the first token of sequence n.
        cu_seqlens: [N + 1] int32 offsets of the sequences in T, from 0: each has M + 1 tokens at
            most, and the first is certain. Tokens at or past ``cu_seqlens[N]`` are padding.
        initial_indices, state_indices: as of the step; a sequence's records lie in the slots of its
            states.
        records: [S, M, 2 H D] float32, a row ``[k | v]`` for each draft: as the recurrence takes
            them, normed and rotated. **Mutated**: slot ``state_indices[n]`` receives those of the
            second token on.
        accepted: [N] int32, 0 to M: the records in slot ``initial_indices[n]`` that are certain.
        activation, scale, norm_groups, norm_eps: as of the step.
        impl: a name in VERIFY_IMPLEMENTATIONS.

    Returns:
        [T, H D] in qkv's dtype, without a gate in float32; rows of padding tokens are exactly 0.

    Raises:
        ValueError: as of the step, and, on a CPU, a count is not as above.
    """
    sizes = {"head_k_dim": state.shape[-1]}
    check_impl(impl, VERIFY_IMPLEMENTATIONS, qkv.device, sizes, dtype=qkv.dtype)
    tensors = (
        qkv,
        gate,
        q_norm_weight,
        k_norm_weight,
        cos,
        sin,
        slopes,
        norm_weight,
        state,
        cu_seqlens,
        initial_indices,
        state_indices,
    )
    check_activation(activation)
    check_inputs(*tensors, norm_groups=norm_groups)
    check_records(
        records,
        accepted,
        num_slots=state.shape[0],
        width=2 * state.shape[1] * state.shape[2],
        dtype=torch.float32,
        num_seqs=state_indices.shape[0],
    )
    out: Tensor = _VERIFY(
        *tensors,
        records,
        accepted,
        activation=activation,
        scale=scale,
        norm_groups=norm_groups,
        norm_eps=norm_eps,
        impl=impl,
    )
    return out


def _outputs(qkv: Tensor, gate: Tensor | None, *_: Any, **__: Any) -> Tensor:
    dtype = torch.float32 if gate is None else qkv.dtype
    return qkv.new_empty(qkv.shape[0], qkv.shape[1] // 3, dtype=dtype)


_TENSORS = (
    "Tensor qkv, Tensor? gate, Tensor? q_norm_weight, Tensor? k_norm_weight, Tensor? cos, "
    "Tensor? sin, Tensor slopes, Tensor? norm_weight, Tensor(a!) state, Tensor cu_seqlens, "
    "Tensor initial_indices, Tensor state_indices"
)
_OPTIONS = "str activation, float scale, int norm_groups, float norm_eps, str impl"
_STEP = define_op(
    f"lightning_step({_TENSORS}, *, {_OPTIONS}) -> Tensor",
    fake=_outputs,
    implementations=IMPLEMENTATIONS,
)
_VERIFY = define_op(
    f"lightning_verify({_TENSORS}, {RECORDS}, *, {_OPTIONS}) -> Tensor",
    fake=_outputs,
    implementations=VERIFY_IMPLEMENTATIONS,
)
