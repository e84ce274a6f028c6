"""Mamba's selective scan: its op, and how layers run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from torch_hybrid.backends.recurrent import (
    CONVOLUTION,
    At,
    RecurrentPlan,
    chunked_rule,
    rule_of,
)
from torch_hybrid.backends.replay import walk
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.ops.selective_scan import op
from torch_hybrid.specs import STATE_RECORDS

MAMBA = chunked_rule(
    "selective_scan",
    CONVOLUTION,
    recurrent=op.RECURRENT_IMPLEMENTATIONS,
    chunk=op.CHUNK_IMPLEMENTATIONS,
    sizes=lambda spec: {"state_dim": spec.state_dim},
)
_FORMS: Mapping[str, Callable[..., Tensor]] = {
    "recurrent_selective_scan": op.recurrent_selective_scan,
    "chunk_selective_scan": op.chunk_selective_scan,
}


def apply_selective_scan(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    z: Tensor,
    A_log: Tensor,
    D: Tensor,
    dt_bias: Tensor | None,
    plan: RecurrentPlan,
    cache: LayerCache,
) -> Tensor:
    """Scan x [T, channels] -> [T, channels], and advance the state in ``cache``.

    B and C [T, G, N] belong to G equal parts of the channels. Records of drafts hold dt before its
    bias.
    """
    rule, impl = rule_of(plan, _FORMS)

    def run(advancing: Sequence[Tensor], reading: Sequence[Tensor], at: At) -> Tensor:
        (x, dt, B), (C, z) = advancing, reading
        return rule(
            x,
            dt,
            B,
            C,
            z,
            A_log,
            D,
            cache["state"],
            at.cu_seqlens,
            at.initial_indices,
            at.state_indices,
            impl=impl,
            dt_bias=dt_bias,
        )

    return walk(run, [x, dt, B], [C, z], plan, cache, STATE_RECORDS)
