"""gated_delta_step: its declaration and the list of its implementations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch_hybrid.ops.core.capability import Implementation
from torch_hybrid.ops.core.declare import define, like
from torch_hybrid.ops.delta_rule.op_step import DeltaStep
from torch_hybrid.ops.step_implementations import step_implementations

GATES = ("silu", "sigmoid")

IMPLEMENTATIONS = step_implementations(
    "gated_delta_step",
    "delta_rule",
    "gated",
    limits={"head_k_dim": 128, "head_v_dim": 256},
    composed="torch_hybrid.ops.delta_rule._composed:gated_delta",
    has_invariant=True,
)


@dataclass(slots=True, repr=False, eq=False)
class GatedDeltaStep(DeltaStep):
    """Step of a mixer: convolve, gate, advance the states by one token, and norm what is read from
    them; or verify drafts.

        q, k, v = act(convolution of qkv and the last inputs), rounded to the dtype
        q, k = q, k / |q|, |k|                                       of each head
        decay = exp(-exp(A_log) softplus(a + dt_bias))               of each value head
        u = beta_scale sigmoid(b) (v - decay S k);  S = decay S + u k^T
        o = scale S q, rounded to the dtype
        out = norm_weight (o / rms(o)) gate(z)                       of each value head

    It is what ``causal_conv1d``, the gates, ``gated_delta_rule`` and the norm of a layer
    compute one after the other, with the same roundings between them; value head ``j`` reads key
    head ``j // (HV // H)``, and all arithmetic is float32.

    With ``records`` each sequence has one certain token and up to D drafts after it. Its accepted
    records are replayed, its first token runs and its states are left; further tokens are run and
    not stored, and leave their inputs as records (``ops.verify``). In native implementations states
    have the bits that as many steps of the same tokens leave, one by one.

    Args:
        qkv: [T, 2 H K + HV V] inputs of the convolution, a row for each token. Float dtype; rows
            may lie any distance apart (a slice of a projection), one row is contiguous; so for z,
            b and a. K, V and HV are those of ``state``.
        z: [T, HV V] gate of the output, in qkv's dtype.
        b: [T, HV] step size before its sigmoid, in qkv's dtype.
        a: [T, HV] decay before its softplus, in qkv's dtype.
        conv_weight: [2 H K + HV V, W] filter of each channel, oldest tap first, in
            qkv's dtype; W from 2 to 8.
        conv_bias: [2 H K + HV V] in qkv's dtype, or None.
        A_log, dt_bias: [HV], each in qkv's dtype or in float32.
        norm_weight: [V] in qkv's dtype or in float32.
        conv_state: [S, W - 1, 2 H K + HV V] the last inputs of each sequence, oldest first, in
            qkv's dtype. **Mutated**: slot ``state_indices[n]`` receives those of sequence n.
        state: [S, HV, V, K] float32 pool. **Mutated**: slot ``state_indices[n]`` receives the
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
        beta_scale: of the step size; 2 where negative eigenvalues are allowed, else 1.
        norm_eps: added to the mean square of o.
        gate: the activation of the output's gate, "silu" or "sigmoid".
        impl: a name in IMPLEMENTATIONS; with records, of an implementation that has the feature
            "verify".
        records: [S, D, R] a row ``[qkv | b | a]`` of inputs for each draft, in qkv's dtype, where
            the step verifies drafts; else None. **Mutated**: slot ``state_indices[n]`` receives
            those of the second token on.
        accepted: [N] int32, 0 to D: the records in slot ``initial_indices[n]`` that are certain.
            Given where records are.

    Returns:
        [T, HV V] in qkv's dtype; rows of padding tokens are exactly 0.

    Raises:
        ValueError: a shape, dtype or layout is not as above, an option is unknown, or records are
            given without counts. On a CPU an index or a count is out of range, or a sequence has
            more tokens than the implementation takes.

    The mixer of "Gated Delta Networks" (arXiv 2412.06464), as in Qwen3-Next; with a sigmoid, as in
    Qwen4-Exp.
    """

    implementations: ClassVar[Mapping[str, Implementation]] = IMPLEMENTATIONS

    beta_scale: float = field(kw_only=True)
    norm_eps: float = field(kw_only=True)
    gate: str = field(default="silu", kw_only=True)

    def check(self) -> None:
        """Raise ValueError for an unknown option, and for records without counts."""
        DeltaStep.check(self)
        if self.gate not in GATES:
            raise ValueError(f"gate must be one of {list(GATES)}, got {self.gate!r}")


gated_delta_step = define(
    GatedDeltaStep,
    IMPLEMENTATIONS,
    returns=like("z"),
    limited={"head_k_dim": "K", "head_v_dim": "V"},
    flops="2 * T * C * W + 6 * T * HV * V * K",
)
