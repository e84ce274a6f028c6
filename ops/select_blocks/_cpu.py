"""Implementation "cpp": the C++ kernel of _cpu.cpp."""

from pathlib import Path

from torch_hybrid.ops.core.declare import cpp_launcher
from torch_hybrid.ops.select_blocks.op import SelectBlocks

select_blocks = cpp_launcher(
    SelectBlocks,
    Path(__file__).with_name("_cpu.cpp"),
    tensors="cu_seqlens seq_lens page_table slot_mapping q keys weights block_keys chosen",
    sizes="T=num_tokens N=num_seqs S=num_pages M=max_pages H=num_heads D=index_dim",
    integers="page_table_row num_tokens num_seqs num_pages page_size max_pages "
    "q_token q_head key_token num_heads index_dim block_size top_k is_bf16 num_threads",
    values={"page_size": "x.block_keys.shape[1] * x.block_size", "key_token": "x.keys.stride(0)"},
    out=SelectBlocks.new_chosen,
    results="chosen",
)
