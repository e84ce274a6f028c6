"""Implementation "cpp": the C++ kernel of _cpu_step_lightning.cpp.

Each thread takes a head of a sequence at a time; all tokens of the sequence go through a few rows
of its state together.
"""

from pathlib import Path

from torch_hybrid.ops.core.declare import cpp_launcher
from torch_hybrid.ops.ssd.op_step_lightning import LightningStep, empty_outputs


def _is_wide(name: str) -> str:
    return f"x.{name} is not None and x.{name}.dtype is float32"


lightning_step = cpp_launcher(
    LightningStep,
    Path(__file__).with_name("_cpu_step_lightning.cpp"),
    sizes="T=num_tokens N=num_seqs S=num_slots H=num_v_heads D=v_dim D=k_dim",
    integers="num_tokens num_seqs num_slots num_v_heads v_dim k_dim num_records qkv_stride "
    "gate_stride cos_stride sin_stride half silu norm_groups is_bf16 wide_q_norm wide_k_norm "
    "wide_norm state_streams num_threads",
    values={
        "silu": "x.activation == 'silu'",
        "wide_q_norm": _is_wide("q_norm_weight"),
        "wide_k_norm": _is_wide("k_norm_weight"),
        "wide_norm": _is_wide("norm_weight"),
        "num_records": "0 if x.records is None else x.records.shape[1]",
    },
    numbers="scale norm_eps",
    out=empty_outputs,
)
