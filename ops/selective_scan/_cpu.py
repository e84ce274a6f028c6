"""Implementation "cpp": the C++ kernel of _cpu.cpp, for both execution forms.

Channels are enough for all threads, and walking parts of a sequence side by side would compute its
exponentials twice.
"""

from pathlib import Path

from torch_hybrid.ops.core.declare import cpp_launcher
from torch_hybrid.ops.selective_scan.op import SelectiveScan

selective_scan = cpp_launcher(
    SelectiveScan,
    Path(__file__).with_name("_cpu.cpp"),
    sizes="T=num_tokens N=num_seqs S=num_slots E=channels G=num_groups M=state_dim",
    integers="num_tokens num_seqs num_slots channels num_groups state_dim "
    "x_stride dt_stride B_stride C_stride z_stride is_bf16 wide_A_log wide_D wide_dt_bias "
    "num_threads",
    out="x",
)
