"""Implementation "cpp": the C++ kernel of _cpu.cpp, which copies rows of any dtype."""

from pathlib import Path

from torch_hybrid.ops.core.declare import cpp_launcher
from torch_hybrid.ops.previous_rows.op import PreviousRows

previous_rows = cpp_launcher(
    PreviousRows,
    Path(__file__).with_name("_cpu.cpp"),
    integers="num_tokens num_seqs num_slots num_kept row_bytes num_threads",
    sizes="T=num_tokens N=num_seqs S=num_slots R=num_kept",
    values={"row_bytes": "x.x.shape[1] * x.x.element_size()"},
    out="x",
)
