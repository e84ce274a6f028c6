"""Implementation "cpp": the C++ kernel of _cpu.cpp."""

from pathlib import Path

from torch_hybrid.ops.core.declare import cpp_launcher
from torch_hybrid.ops.head_linear.op import HeadLinear

head_linear = cpp_launcher(
    HeadLinear,
    Path(__file__).with_name("_cpu.cpp"),
    integers="T H N K x_token x_head weight_head weight_row weight_column is_bf16 num_threads",
    sizes="T H N K",
    values={
        "weight_head": "x.weight.stride(0)",
        "weight_row": "x.weight.stride(1)",
        "weight_column": "x.weight.stride(2)",
    },
    out=HeadLinear.empty,
)
