"""gated_delta_step: its declaration and the list of its implementations."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch_hybrid.ops.core.declare import Cpp, define, like
from torch_hybrid.ops.delta_rule.op_step import CPP_SIZES, CPP_VALUES, DeltaStep
from torch_hybrid.ops.step_implementations import step_implementations

GATES = ("silu", "sigmoid")

IMPLEMENTATIONS = step_implementations(
    "gated_delta_step",
    "delta_rule",
    "gated",
    limits={"head_k_dim": 128, "head_v_dim": 256},
    composed="torch_hybrid.ops.delta_rule._composed:gated_delta",
    torch_form="torch_hybrid.ops.delta_rule._composed:gated_delta_in_torch",
    has_invariant=True,
    opens_chunks=True,
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

    Args:
        a: [T, HV] decay before its softplus, in qkv's dtype.
        A_log, dt_bias: [HV], each in qkv's dtype or in float32.
        beta_scale: of the step size; 2 where negative eigenvalues are allowed, else 1.
        gate: the activation of the output's gate, "silu" or "sigmoid".

    Returns:
        [T, HV V] in qkv's dtype; rows of padding tokens are exactly 0.

    The mixer of "Gated Delta Networks" (arXiv 2412.06464), as in Qwen3-Next; with a sigmoid, as in
    Qwen4-Exp.
    """

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
    cpp=Cpp(
        CPP_SIZES,
        CPP_VALUES
        | {
            "gate_lower_bound": "0.0",
            "is_bounded": "False",
            "sigmoid_gate": "x.gate == 'sigmoid'",
        },
    ),
)
