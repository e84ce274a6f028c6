"""Launchers of the delta rules' C++ steps (delta_step.h), drafts included (delta_verify.h)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch_hybrid.ops.core.declare import cpp_launcher
from torch_hybrid.ops.delta_rule.op_step import DeltaStep

_VALUES = {
    "silu": "x.activation == 'silu'",
    "wide_norm": "x.norm_weight.dtype is float32",
    "num_records": "0 if x.records is None else x.records.shape[1]",
    "record_width": "0 if x.records is None else x.records.shape[2]",
}


def delta_step_launcher(
    cls: type[DeltaStep], source: Path, values: Mapping[str, str]
) -> Callable[[Any], Any]:
    """Make the launcher of a function that TH_EXPORT_DELTA_STEP exports.

    Args:
        cls: the op's class.
        source: of the kernel.
        values: of options that another mixer has; see ``cpp_launcher``.
    """
    return cpp_launcher(
        cls,
        source,
        sizes="T=num_tokens N=num_seqs S=num_slots C=channels W=width HV=num_v_heads V=v_dim "
        "K=k_dim",
        integers="num_tokens num_seqs num_slots channels width num_v_heads v_dim k_dim "
        "num_records record_width "
        "qkv_stride z_stride b_stride a_stride silu is_bf16 wide_A_log wide_dt_bias wide_norm "
        "is_bounded sigmoid_gate state_streams num_threads",
        numbers="scale beta_scale gate_lower_bound norm_eps",
        values={**_VALUES, **values},
        out="z",
    )
