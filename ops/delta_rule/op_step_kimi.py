"""kimi_delta_step: its declaration and the list of its implementations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from torch import Tensor

from torch_hybrid.ops.core.declare import Cpp, Dense, Pool, Rows, define, like
from torch_hybrid.ops.delta_rule.op_step import CPP_SIZES, CPP_VALUES, DeltaStep
from torch_hybrid.ops.open_chunk import CORRECTED_BY_CHANNEL, ChunkLayout
from torch_hybrid.ops.step_implementations import step_implementations

IMPLEMENTATIONS = step_implementations(
    "kimi_delta_step",
    "delta_rule",
    "kimi",
    limits={"head_k_dim": 128, "head_v_dim": 256},
    composed="torch_hybrid.ops.delta_rule._composed:kimi_delta",
    torch_form="torch_hybrid.ops.delta_rule._composed:kimi_delta_in_torch",
    has_invariant=True,
    opens_chunks=True,
)


@dataclass(slots=True, repr=False, eq=False)
class KimiDeltaStep(DeltaStep):
    """Step of a mixer: convolve, gate, advance the states by one token, and norm what is read from
    them; or verify drafts.

        q, k, v = act(convolution of qkv and the last inputs), rounded to the dtype
        q, k = q / |q|, k / |k|                                      of each head
        g = -exp(A_log) softplus(a + dt_bias)                        of each channel of K, or
        g = gate_lower_bound sigmoid(exp(A_log) (a + dt_bias))
        S = S diag(e^g);  u = sigmoid(b) (v - S k);  S = S + u k^T
        o = scale S q, rounded to the dtype
        out = norm_weight (o / rms(o)) sigmoid(z)                    of each head

    It is what ``causal_conv1d``, the gates, ``kimi_delta_attention`` and the norm of a
    layer compute one after the other, with the same roundings between them; all arithmetic is
    float32. There are as many key heads H as value heads HV.

    Args:
        a: [T, H K] decay of each channel before its activation, in qkv's dtype.
        A_log: [H] in qkv's dtype or in float32.
        dt_bias: [H, K] in qkv's dtype or in float32.
        gate_lower_bound: the least log decay of a token where that is bounded, at most 0; else
            None.

    Returns:
        [T, H V] in qkv's dtype; rows of padding tokens are exactly 0.

    The mixer of "Kimi Linear" (arXiv 2510.26692), and that of Ling-3, whose decays are bounded.
    """

    layout: ClassVar[ChunkLayout] = CORRECTED_BY_CHANNEL

    a: Annotated[Tensor, Rows("HV * K")]
    dt_bias: Annotated[Tensor, Dense("HV", "K", or_float32=True, counts=False)]
    gate_lower_bound: float | None = field(kw_only=True)
    norm_eps: float = field(kw_only=True)
    records: Annotated[Tensor | None, Pool("D_", "C + HV + HV * K")] = field(
        default=None, kw_only=True
    )

    def check_heads(self) -> None:
        """Raise ValueError unless q and k have as many heads as v."""
        channels = self.qkv.shape[1]
        _, num_heads, v_dim, k_dim = self.state.shape
        if channels != (wanted := num_heads * (2 * k_dim + v_dim)):
            raise ValueError(f"qkv must have {wanted} channels, those of state, got {channels}")
        DeltaStep.check_heads(self)

    def check(self) -> None:
        """Raise ValueError for an option that is none, and for records without counts."""
        DeltaStep.check(self)
        bound = self.gate_lower_bound
        if bound is not None and not bound <= 0:
            raise ValueError(f"gate_lower_bound must be at most 0, got {bound}")


kimi_delta_step = define(
    KimiDeltaStep,
    IMPLEMENTATIONS,
    returns=like("z"),
    limited={"head_k_dim": "K", "head_v_dim": "V"},
    flops="2 * T * C * W + 6 * T * HV * V * K",
    cpp=Cpp(
        CPP_SIZES,
        CPP_VALUES
        | {
            "beta_scale": "1.0",
            "gate_lower_bound": "x.gate_lower_bound or 0.0",
            "is_bounded": "x.gate_lower_bound is not None",
            "sigmoid_gate": "False",
        },
    ),
)
