"""Recurrences with a scalar decay, of Mamba2, lightning attention and mLSTM: choices of ops, and
calls of them."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from torch_hybrid.backends.recurrent import (
    CONVOLUTION,
    At,
    OpChoice,
    RecurrentPlan,
    chunked_rule,
)
from torch_hybrid.ops.ssd import op
from torch_hybrid.ops.ssd import op_step_lightning as lightning_step
from torch_hybrid.ops.ssd import op_step_mamba2 as step
from torch_hybrid.specs import LightningSpec, Mamba2Spec


def sizes_of(spec: Mamba2Spec) -> dict[str, int]:
    """Return the sizes of a Mamba2 layer that implementations may limit."""
    return {"head_k_dim": spec.state_dim, "head_v_dim": spec.head_dim}


def lightning_sizes(spec: LightningSpec) -> dict[str, int]:
    """Return the sizes of a lightning layer that implementations may limit."""
    return {"head_k_dim": spec.head_dim, "head_v_dim": spec.head_dim}


_RULE = partial(chunked_rule, implementations=op.IMPLEMENTATIONS)
MAMBA2 = _RULE(
    "ssd",
    CONVOLUTION,
    sizes=sizes_of,
    mixer=OpChoice(name="ssd_step", implementations=step.IMPLEMENTATIONS, sizes=sizes_of),
    timed={"head_k_dim": (128, 256), "head_v_dim": (64,)},
)
LIGHTNING_ATTENTION = _RULE(
    "ssd",
    sizes=lightning_sizes,
    mixer=OpChoice(
        name="lightning_step",
        implementations=lightning_step.IMPLEMENTATIONS,
        sizes=lightning_sizes,
    ),
    timed={"head_k_dim": (128,)},
    opened_from=8,
)
MLSTM = _RULE(
    "ssd", sizes=lambda spec: {"head_k_dim": spec.head_k_dim, "head_v_dim": spec.memory_dim}
)


def apply_ssd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    dt: Tensor,
    plan: RecurrentPlan,
    at: At,
    state: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Apply the scalar-decay recurrence to q, k [T, G, K] and v [T, H, V] -> [T, H, V].

    Mutates the pool ``state`` at the slots that ``at`` names: the plan, or one of its two calls.
    """
    index = (at.cu_seqlens, at.initial_indices, at.state_indices)
    impl = plan.statics.impl("ssd")
    return op.ssd(q, k, v, g, dt, None, state, *index, scale=scale, impl=impl)
