"""Implementation "cpp": the C++ kernel of _cpu_step_kimi.cpp.

A thread takes the value heads of one key head of one sequence at a time. See delta_step.h and
delta_verify.h in ops/native.
"""

from pathlib import Path

from torch_hybrid.ops.delta_rule.op_step_kimi import KimiDeltaStep
from torch_hybrid.ops.native.delta_step import delta_step_launcher

kimi_delta_step = delta_step_launcher(
    KimiDeltaStep,
    Path(__file__).with_name("_cpu_step_kimi.cpp"),
    {
        "beta_scale": "1.0",
        "gate_lower_bound": "x.gate_lower_bound or 0.0",
        "is_bounded": "x.gate_lower_bound is not None",
        "sigmoid_gate": "False",
    },
)
