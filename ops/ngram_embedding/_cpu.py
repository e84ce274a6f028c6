"""Implementation "cpp": the C++ kernel of _cpu.cpp, which copies rows of any dtype."""

from pathlib import Path

from torch_hybrid.ops.core.declare import cpp_launcher
from torch_hybrid.ops.ngram_embedding.op import NgramEmbedding

ngram_embedding = cpp_launcher(
    NgramEmbedding,
    Path(__file__).with_name("_cpu.cpp"),
    integers="num_tokens num_seqs num_slots num_rows row_bytes num_back num_heads eos num_threads",
    sizes="T=num_tokens N=num_seqs S=num_slots R=num_rows H=num_heads",
    values={
        "row_bytes": "x.table.shape[1] * x.table.element_size()",
        "num_back": "x.history.shape[1]",
        "eos": "x.eos",
    },
    out=NgramEmbedding.empty,
)
