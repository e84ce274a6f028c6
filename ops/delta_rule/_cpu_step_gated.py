"""Implementation "cpp": the C++ kernel of _cpu_step_gated.cpp.

A thread takes the value heads of one key head of one sequence at a time. See delta_step.h and
delta_verify.h in ops/native.
"""

from pathlib import Path

from torch_hybrid.ops.delta_rule.op_step_gated import GatedDeltaStep
from torch_hybrid.ops.native.delta_step import delta_step_launcher

gated_delta_step = delta_step_launcher(
    GatedDeltaStep,
    Path(__file__).with_name("_cpu_step_gated.cpp"),
    {"gate_lower_bound": "0.0", "is_bounded": "False", "sigmoid_gate": "x.gate == 'sigmoid'"},
)
