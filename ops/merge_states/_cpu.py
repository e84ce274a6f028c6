"""Implementation "cpp": the C++ kernel of _cpu.cpp."""

from pathlib import Path

from torch_hybrid.ops.core.declare import cpp_launcher
from torch_hybrid.ops.merge_states.op import MergeStates

merge_states = cpp_launcher(
    MergeStates,
    Path(__file__).with_name("_cpu.cpp"),
    integers="rows dim is_bf16 num_threads",
    sizes="Dv=dim",
    values={"rows": "x.lse_a.numel()"},
    out="out=o_a lse=lse_a",
)
