"""One token of each sequence through a Kimi-delta-attention mixer, between its projections.

The convolution, the gates, the recurrence and the gated norm of a decode step in one op: each by
itself takes little, and costs as much again to be called.
"""

from __future__ import annotations

from torch import Tensor

from torch_hybrid.ops.core.registration import check_impl, define_op
from torch_hybrid.ops.delta_step import SCHEMA, StepTensors, check_step, check_verify
from torch_hybrid.ops.step_implementations import step_implementations, verify_implementations
from torch_hybrid.ops.verify import SCHEMA as RECORDS

IMPLEMENTATIONS = step_implementations(
    "kimi_delta_step", limits={"head_k_dim": 128, "head_v_dim": 256}, has_invariant=True
)
VERIFY_IMPLEMENTATIONS = verify_implementations(IMPLEMENTATIONS, "kimi_delta_verify")


def kimi_delta_step(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    conv_state: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    activation: str,
    scale: float,
    gate_lower_bound: float | None,
    norm_eps: float,
    impl: str,
) -> Tensor:
    """Convolve, gate, advance the states by one token, and norm what is read from them.

        q, k, v = act(convolution of qkv and the last inputs), rounded to the dtype
        q, k = q / |q|, k / |k|                                      of each head
        g = -exp(A_log) softplus(a + dt_bias)                        of each channel of K, or
        g = gate_lower_bound sigmoid(exp(A_log) (a + dt_bias))
        S = S diag(e^g);  u = sigmoid(b) (v - S k);  S = S + u k^T
        o = scale S q, rounded to the dtype
        out = norm_weight (o / rms(o)) sigmoid(z)                    of each head

    It is what ``causal_conv1d``, the gates, ``recurrent_kimi_delta_attention`` and the norm of a
    layer compute one after the other, with the same roundings between them; all arithmetic is
    float32.

    Args:
        qkv: [T, H (2 K + V)] inputs of the convolution, a row for each token. Float dtype; rows
            may lie any distance apart (a slice of a projection), one row is contiguous; so for z,
            b and a. H, K and V are those of ``state``.
        z: [T, H V] gate of the output before its sigmoid, in qkv's dtype.
        b: [T, H] step size before its sigmoid, in qkv's dtype.
        a: [T, H K] decay of each channel before its activation, in qkv's dtype.
        conv_weight: [H (2 K + V), W] filter of each channel, oldest tap first, in qkv's dtype; W
            from 2 to 8.
        conv_bias: [H (2 K + V)] in qkv's dtype, or None.
        A_log: [H] in qkv's dtype or in float32.
        dt_bias: [H, K] in qkv's dtype or in float32.
        norm_weight: [V] in qkv's dtype or in float32.
        conv_state: [S, W - 1, H (2 K + V)] the last inputs of each sequence, oldest first, in
            qkv's dtype. **Mutated**: slot ``state_indices[n]`` receives those of sequence n.
        state: [S, H, V, K] float32 pool. **Mutated**: slot ``state_indices[n]`` receives the
            state after the token of sequence n. No other slot of either pool is written.
        cu_seqlens: [N + 1] int32 offsets of the sequences in T, from 0: each has one token, or
            none, which leaves its slot as it is. Implementations with the feature "extend" take
            several, of sequences that have a slot: as so many calls would, bit by bit; those with
            "no_store" also of others. Tokens at or past ``cu_seqlens[N]`` are padding.
        initial_indices: [N] int32 slot that each sequence starts from; 0, the null slot, is the
            zero state. Several may start from one slot, which no other one may then write.
        state_indices: [N] int32 slot that receives the state of each sequence, distinct except
            for 0: that state is not stored.
        activation: of the convolution, "none" or "silu".
        scale: factor on q, usually ``K ** -0.5``.
        gate_lower_bound: the least log decay of a token where that is bounded, at most 0; else
            None.
        norm_eps: added to the mean square of o.
        impl: a name in IMPLEMENTATIONS.

    Returns:
        [T, H V] in qkv's dtype; rows of padding tokens are exactly 0.

    Raises:
        ValueError: a shape, dtype or layout is not as above, an option is unknown, or, where
            reading them is free (on a CPU), an index is out of range or a sequence has more tokens
            than the implementation takes.

    The mixer of "Kimi Linear" (arXiv 2510.26692), and that of Ling-3, whose decays are bounded.
    """
    sizes = {"head_k_dim": state.shape[-1], "head_v_dim": state.shape[-2]}
    check_impl(impl, IMPLEMENTATIONS, qkv.device, sizes, dtype=qkv.dtype)
    if gate_lower_bound is not None and not gate_lower_bound <= 0:
        raise ValueError(f"gate_lower_bound must be at most 0, got {gate_lower_bound}")
    tensors = (
        qkv,
        z,
        b,
        a,
        conv_weight,
        conv_bias,
        A_log,
        dt_bias,
        norm_weight,
        conv_state,
        state,
        cu_seqlens,
        initial_indices,
        state_indices,
    )
    check_step(StepTensors(*tensors), activation=activation, by_channel=True)
    out: Tensor = _STEP(
        *tensors,
        activation=activation,
        scale=scale,
        gate_lower_bound=gate_lower_bound,
        norm_eps=norm_eps,
        impl=impl,
    )
    return out


def kimi_delta_verify(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    conv_state: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    records: Tensor,
    accepted: Tensor,
    *,
    activation: str,
    scale: float,
    gate_lower_bound: float | None,
    norm_eps: float,
    impl: str,
) -> Tensor:
    """``kimi_delta_step`` of one certain token of each sequence and drafts after it.

    The accepted records of a sequence are replayed, its first token runs and its states are left;
    further tokens are run and not stored, and leave their inputs as records (``ops.verify``). In
    native implementations states have the bits that ``kimi_delta_step`` leaves after the same
    tokens, one by one.

    Args:
        qkv, z, b, a, conv_weight, conv_bias, A_log, dt_bias, norm_weight: as of the step.
        conv_state, state: as of the step. **Mutated**: slot ``state_indices[n]`` receives what is
            there after the accepted records and the first token of sequence n.
        cu_seqlens: [N + 1] int32 offsets of the sequences in T, from 0: each has D + 1 tokens at
            most, and the first is certain. Tokens at or past ``cu_seqlens[N]`` are padding.
        initial_indices, state_indices: as of the step; a sequence's records lie in the slots of its
            states.
        records: [S, D, R] a row ``[qkv | b | a]`` of inputs for each draft, in qkv's dtype.
            **Mutated**: slot ``state_indices[n]`` receives those of the second token on.
        accepted: [N] int32, 0 to D: the records in slot ``initial_indices[n]`` that are certain.
        activation, scale, gate_lower_bound, norm_eps: as of the step.
        impl: a name in VERIFY_IMPLEMENTATIONS.

    Returns:
        [T, HV V] in qkv's dtype; rows of padding tokens are exactly 0.

    Raises:
        ValueError: as of the step, and, on a CPU, a count is not as above.
    """
    sizes = {"head_k_dim": state.shape[-1], "head_v_dim": state.shape[-2]}
    check_impl(impl, VERIFY_IMPLEMENTATIONS, qkv.device, sizes, dtype=qkv.dtype)
    tensors = (
        qkv,
        z,
        b,
        a,
        conv_weight,
        conv_bias,
        A_log,
        dt_bias,
        norm_weight,
        conv_state,
        state,
        cu_seqlens,
        initial_indices,
        state_indices,
    )
    x = StepTensors(*tensors)
    check_verify(x, records, accepted, activation=activation, by_channel=True)
    out: Tensor = _VERIFY(
        *tensors,
        records,
        accepted,
        activation=activation,
        scale=scale,
        gate_lower_bound=gate_lower_bound,
        norm_eps=norm_eps,
        impl=impl,
    )
    return out


_STEP = define_op(
    f"kimi_delta_step({SCHEMA}, *, str activation, float scale, float? gate_lower_bound, "
    "float norm_eps, str impl) -> Tensor",
    like=["z"],
    implementations=IMPLEMENTATIONS,
)
_VERIFY = define_op(
    f"kimi_delta_verify({SCHEMA}, {RECORDS}, *, str activation, float scale, "
    "float? gate_lower_bound, float norm_eps, str impl) -> Tensor",
    like=["z"],
    implementations=VERIFY_IMPLEMENTATIONS,
)
