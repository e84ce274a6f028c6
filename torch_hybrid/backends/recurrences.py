"""Recurrences with several execution forms: the ops that the layers of each kind call."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Protocol

from torch_hybrid.backends.recurrent import CONVOLUTION, OpChoice, Recurrence, chunked_rule
from torch_hybrid.ops.delta_rule import op as delta_rule
from torch_hybrid.ops.delta_rule import op_step_gated, op_step_kimi
from torch_hybrid.ops.selective_scan import op as selective_scan
from torch_hybrid.ops.ssd import op as ssd
from torch_hybrid.ops.ssd import op_step_lightning, op_step_mamba2


class _HasStates(Protocol):
    @property
    def state_shape(self) -> tuple[int, int, int]: ...


def sizes_of(spec: _HasStates) -> dict[str, int]:
    """Return the sizes of a layer's states, which implementations may limit."""
    num_v_heads, head_v_dim, head_k_dim = spec.state_shape
    return {"head_k_dim": head_k_dim, "head_v_dim": head_v_dim, "num_v_heads": num_v_heads}


_choice = partial(OpChoice, sizes=sizes_of)
_rule = partial(chunked_rule, sizes=sizes_of)
_gated = partial(_rule, "gated_delta_rule", implementations=delta_rule.GATED_IMPLEMENTATIONS)
_ssd = partial(_rule, "ssd", implementations=ssd.IMPLEMENTATIONS)

RECURRENCES: Mapping[str, Recurrence] = {  # by kind of layer
    "gated_delta_rule": _gated(
        CONVOLUTION,
        mixer=_choice(name="gated_delta_step", implementations=op_step_gated.IMPLEMENTATIONS),
        timed={"head_k_dim": (128,), "head_v_dim": (128,)},
    ),
    "kimi_delta_attention": _rule(
        "kimi_delta_attention",
        CONVOLUTION,
        implementations=delta_rule.KIMI_IMPLEMENTATIONS,
        mixer=_choice(name="kimi_delta_step", implementations=op_step_kimi.IMPLEMENTATIONS),
        timed={"head_k_dim": (128,), "head_v_dim": (128,)},
        opened_from=16,
    ),
    "jet_block": _gated(CONVOLUTION),
    "mamba2": _ssd(
        CONVOLUTION,
        mixer=_choice(name="ssd_step", implementations=op_step_mamba2.IMPLEMENTATIONS),
        timed={"head_k_dim": (128, 256), "head_v_dim": (64,)},
    ),
    "mamba": chunked_rule(
        "selective_scan",
        CONVOLUTION,
        implementations=selective_scan.IMPLEMENTATIONS,
        sizes=lambda spec: {"state_dim": spec.state_dim},
    ),
    "lightning_attention": _ssd(
        mixer=_choice(name="lightning_step", implementations=op_step_lightning.IMPLEMENTATIONS),
        timed={"head_k_dim": (128,)},
        opened_from=8,
    ),
    "mlstm": _ssd(),
}
