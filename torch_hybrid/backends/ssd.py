"""Recurrences with a scalar decay, of Mamba2, lightning attention and mLSTM: choices of ops, and
calls of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from torch_hybrid.backends.recurrent import (
    CONVOLUTION,
    OpChoice,
    RecurrentPlan,
    chunked_rule,
    rule_of,
)
from torch_hybrid.ops.ssd import op
from torch_hybrid.ops.ssd import op_step_lightning as lightning_step
from torch_hybrid.ops.ssd import op_step_mamba2 as step
from torch_hybrid.specs import LightningSpec, Mamba2Spec, MlstmSpec


def _sizes(spec: Mamba2Spec) -> dict[str, int]:
    return {"head_k_dim": spec.state_dim, "head_v_dim": spec.head_dim}


def _lightning_sizes(spec: LightningSpec) -> dict[str, int]:
    return {"head_k_dim": spec.head_dim, "head_v_dim": spec.head_dim}


def _mlstm_sizes(spec: MlstmSpec) -> dict[str, int]:
    return {"head_k_dim": spec.head_k_dim, "head_v_dim": spec.memory_dim}


STEP, LIGHTNING_STEP = "ssd_step", "lightning_step"

_RULE = partial(
    chunked_rule,
    recurrent=op.RECURRENT_IMPLEMENTATIONS,
    chunk=op.CHUNK_IMPLEMENTATIONS,
)
MAMBA2 = _RULE(
    "ssd",
    CONVOLUTION,
    sizes=_sizes,
    whole=OpChoice(name=STEP, implementations=step.IMPLEMENTATIONS, sizes=_sizes),
    timed={"head_k_dim": (128, 256), "head_v_dim": (64,)},
)
LIGHTNING_ATTENTION = _RULE(
    "ssd",
    sizes=_lightning_sizes,
    whole=OpChoice(
        name=LIGHTNING_STEP,
        implementations=lightning_step.IMPLEMENTATIONS,
        sizes=_lightning_sizes,
    ),
    timed={"head_k_dim": (128,)},
)
MLSTM = _RULE("ssd", sizes=_mlstm_sizes)
_FORMS: Mapping[str, Callable[..., Tensor]] = {
    "recurrent_ssd": op.recurrent_ssd,
    "chunk_ssd": op.chunk_ssd,
}


def apply_ssd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    dt: Tensor | None,
    D: Tensor | None,
    plan: RecurrentPlan,
    state: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Apply the scalar-decay recurrence to q, k [T, G, K] and v [T, H, V] -> [T, H, V].

    Mutates the pool ``state`` at the slots that the plan names.
    """
    rule, impl = rule_of(plan, _FORMS)
    return rule(
        q,
        k,
        v,
        g,
        dt,
        D,
        state,
        plan.cu_seqlens,
        plan.initial_indices,
        plan.state_indices,
        scale=scale,
        impl=impl,
    )
