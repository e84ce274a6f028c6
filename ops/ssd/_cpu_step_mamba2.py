"""Implementation "cpp": the C++ kernel of _cpu_step_mamba2.cpp.

Each thread takes whole sequences or, where they are few, a share of each part of all. All tokens of
a sequence, where it has several, go through a few rows of a state together.
"""

from pathlib import Path

from torch_hybrid.ops.core.declare import cpp_launcher
from torch_hybrid.ops.ssd.op_step_mamba2 import SsdStep, empty_outputs

ssd_step = cpp_launcher(
    SsdStep,
    Path(__file__).with_name("_cpu_step_mamba2.cpp"),
    sizes="T=num_tokens N=num_seqs S=num_slots C=channels W=width H=num_v_heads V=v_dim K=k_dim",
    integers="num_tokens num_seqs num_slots channels width num_v_heads v_dim k_dim "
    "num_records record_width xBC_stride z_stride dt_stride silu norm_before_gate norm_groups "
    "is_bf16 wide_A_log wide_dt_bias wide_D wide_norm state_streams num_threads",
    values={
        "silu": "x.activation == 'silu'",
        "wide_norm": "x.norm_weight is not None and x.norm_weight.dtype is float32",
        "num_records": "0 if x.records is None else x.records.shape[1]",
        "record_width": "0 if x.records is None else x.records.shape[2]",
    },
    numbers="dt_min dt_max norm_eps",
    out=empty_outputs,
)
