"""One token of each sequence through a Mamba2 mixer, between its projections.

The convolution, the step sizes, the recurrence, the gate and the norm of a decode step in one op:
each by itself takes little, and costs as much again to be called.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torch_hybrid.ops.conv_step import check_activation
from torch_hybrid.ops.core.registration import check_impl, define_op
from torch_hybrid.ops.ssd_step.validate import check_inputs, check_options
from torch_hybrid.ops.step_implementations import step_implementations, verify_implementations
from torch_hybrid.ops.verify import SCHEMA as RECORDS
from torch_hybrid.ops.verify import check_records

IMPLEMENTATIONS = step_implementations("ssd_step", limits={"head_k_dim": 512})
VERIFY_IMPLEMENTATIONS = verify_implementations(IMPLEMENTATIONS, "ssd_verify")


def ssd_step(
    xBC: Tensor,
    z: Tensor | None,
    dt: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    D: Tensor,
    norm_weight: Tensor | None,
    conv_state: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    activation: str,
    dt_min: float,
    dt_max: float,
    norm_before_gate: bool,
    norm_groups: int,
    norm_eps: float,
    impl: str,
) -> Tensor:
    """Convolve, advance the states by one token, and gate and norm what is read from them.

        x, B, C = act(convolution of xBC and the last inputs), rounded to the dtype
        step = clamp(softplus(dt + dt_bias), dt_min, dt_max)         of each head
        S = exp(-exp(A_log) step) S + (step x) B^T
        o = S C + D x, rounded to the dtype
        y = o silu(z);  out = norm_weight y / rms(y)                 or, norm before gate:
        y = o;          out = norm_weight y / rms(y) silu(z)

    It is what ``causal_conv1d``, the step sizes, ``recurrent_ssd`` and the gated norm of a layer
    compute one after the other, with the same roundings between them; head ``h`` reads group
    ``h // (H // G)`` of B and C, and all arithmetic is float32.

    Args:
        xBC: [T, H V + 2 G K] inputs of the convolution, a row for each token. Float dtype; rows
            may lie any distance apart (a slice of a projection), one row is contiguous; so for z
            and dt. H, V and K are those of ``state``.
        z: [T, H V] gate of the output, in xBC's dtype, or None: o is returned as it is.
        dt: [T, H] step size before its softplus, in xBC's dtype.
        conv_weight: [H V + 2 G K, W] filter of each channel, oldest tap first, in xBC's dtype; W
            from 2 to 8.
        conv_bias: [H V + 2 G K] in xBC's dtype, or None.
        A_log, dt_bias, D: [H], each in xBC's dtype or in float32.
        norm_weight: [H V] in xBC's dtype or in float32, or None: y is returned.
        conv_state: [S, W - 1, H V + 2 G K] the last inputs of each sequence, oldest first, in
            xBC's dtype. **Mutated**: slot ``state_indices[n]`` receives those of sequence n.
        state: [S, H, V, K] float32 pool. **Mutated**: slot ``state_indices[n]`` receives the
            state after the token of sequence n. No other slot of either pool is written.
        cu_seqlens: [N + 1] int32 offsets of the sequences in T, from 0: each has one token, or
            none, which leaves its slot as it is. Implementations with the feature "extend" take
            several, of sequences that have a slot: as so many calls would, bit by bit. Tokens at or
            past ``cu_seqlens[N]`` are padding.
        initial_indices: [N] int32 slot that each sequence starts from; 0, the null slot, is the
            zero state. Several may start from one slot, which no other one may then write.
        state_indices: [N] int32 slot that receives the state of each sequence, distinct except
            for 0: that state is not stored.
        activation: of the convolution, "none" or "silu".
        dt_min, dt_max: bounds of the step size; 0 and infinity where there are none.
        norm_before_gate: whether o is normed, and not its product with the gate.
        norm_groups: equal parts of a token's H V channels, each normed by itself.
        norm_eps: added to the mean square of a part.
        impl: a name in IMPLEMENTATIONS.

    Returns:
        [T, H V] in xBC's dtype; rows of padding tokens are exactly 0.

    Raises:
        ValueError: a shape, dtype or layout is not as above, an option is unknown, or, where
            reading them is free (on a CPU), an index is out of range or a sequence has more tokens
            than the implementation takes.

    The mixer of "Transformers are SSMs" (Mamba2, arXiv 2405.21060), as in Nemotron-H.
    """
    sizes = {"head_k_dim": state.shape[-1]}
    check_impl(impl, IMPLEMENTATIONS, xBC.device, sizes, dtype=xBC.dtype)
    tensors = (
        xBC,
        z,
        dt,
        conv_weight,
        conv_bias,
        A_log,
        dt_bias,
        D,
        norm_weight,
        conv_state,
        state,
        cu_seqlens,
        initial_indices,
        state_indices,
    )
    check_activation(activation)
    check_inputs(*tensors)
    width = state.shape[1] * state.shape[2]
    check_options(dt_min=dt_min, dt_max=dt_max, norm_groups=norm_groups, width=width)
    out: Tensor = _STEP(
        *tensors,
        activation=activation,
        dt_min=dt_min,
        dt_max=dt_max,
        norm_before_gate=norm_before_gate,
        norm_groups=norm_groups,
        norm_eps=norm_eps,
        impl=impl,
    )
    return out


def ssd_verify(
    xBC: Tensor,
    z: Tensor | None,
    dt: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    D: Tensor,
    norm_weight: Tensor | None,
    conv_state: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    records: Tensor,
    accepted: Tensor,
    *,
    activation: str,
    dt_min: float,
    dt_max: float,
    norm_before_gate: bool,
    norm_groups: int,
    norm_eps: float,
    impl: str,
) -> Tensor:
    """``ssd_step`` of one certain token of each sequence and drafts after it.

    The accepted records of a sequence are replayed, its first token runs and its states are left;
    further tokens are run and not stored, and leave their inputs as records (``ops.verify``). In
    native implementations states have the bits that ``ssd_step`` leaves after the same tokens, one
    by one.

    Args:
        xBC, z, dt, conv_weight, conv_bias, A_log, dt_bias, D, norm_weight: as of the step.
        conv_state, state: as of the step. **Mutated**: slot ``state_indices[n]`` receives what is
            there after the accepted records and the first token of sequence n.
        cu_seqlens: [N + 1] int32 offsets of the sequences in T, from 0: each has R + 1 tokens at
            most, and the first is certain. Tokens at or past ``cu_seqlens[N]`` are padding.
        initial_indices, state_indices: as of the step; a sequence's records lie in the slots of its
            states.
        records: [S, R, H V + 2 G K + H] a row ``[xBC | dt]`` of inputs for each draft, in xBC's
            dtype. **Mutated**: slot ``state_indices[n]`` receives those of the second token on.
        accepted: [N] int32, 0 to R: the records in slot ``initial_indices[n]`` that are certain.
        activation, dt_min, dt_max, norm_before_gate, norm_groups, norm_eps: as of the step.
        impl: a name in VERIFY_IMPLEMENTATIONS.

    Returns:
        [T, H V] in xBC's dtype; rows of padding tokens are exactly 0.

    Raises:
        ValueError: as of the step, and, on a CPU, a count is not as above.
    """
    sizes = {"head_k_dim": state.shape[-1]}
    check_impl(impl, VERIFY_IMPLEMENTATIONS, xBC.device, sizes, dtype=xBC.dtype)
    tensors = (
        xBC,
        z,
        dt,
        conv_weight,
        conv_bias,
        A_log,
        dt_bias,
        D,
        norm_weight,
        conv_state,
        state,
        cu_seqlens,
        initial_indices,
        state_indices,
    )
    check_activation(activation)
    check_inputs(*tensors)
    width = state.shape[1] * state.shape[2]
    check_options(dt_min=dt_min, dt_max=dt_max, norm_groups=norm_groups, width=width)
    check_records(
        records,
        accepted,
        num_slots=state.shape[0],
        width=xBC.shape[1] + dt.shape[1],
        dtype=xBC.dtype,
        num_seqs=state_indices.shape[0],
    )
    out: Tensor = _VERIFY(
        *tensors,
        records,
        accepted,
        activation=activation,
        dt_min=dt_min,
        dt_max=dt_max,
        norm_before_gate=norm_before_gate,
        norm_groups=norm_groups,
        norm_eps=norm_eps,
        impl=impl,
    )
    return out


def _like_x(xBC: Tensor, *args: Any, **_: Any) -> Tensor:
    """The outputs of all heads, of which ``state`` knows."""
    state: Tensor = args[9]
    return xBC.new_empty(xBC.shape[0], state.shape[1] * state.shape[2])


_TENSORS = (
    "Tensor xBC, Tensor? z, Tensor dt, Tensor conv_weight, Tensor? conv_bias, Tensor A_log, "
    "Tensor dt_bias, Tensor D, Tensor? norm_weight, Tensor(a!) conv_state, Tensor(b!) state, "
    "Tensor cu_seqlens, Tensor initial_indices, Tensor state_indices"
)
_OPTIONS = (
    "str activation, float dt_min, float dt_max, bool norm_before_gate, int norm_groups, "
    "float norm_eps, str impl"
)
_STEP = define_op(
    f"ssd_step({_TENSORS}, *, {_OPTIONS}) -> Tensor",
    fake=_like_x,
    implementations=IMPLEMENTATIONS,
)
_VERIFY = define_op(
    f"ssd_verify({_TENSORS}, {RECORDS}, *, {_OPTIONS}) -> Tensor",
    fake=_like_x,
    implementations=VERIFY_IMPLEMENTATIONS,
)
