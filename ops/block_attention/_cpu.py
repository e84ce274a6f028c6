"""Implementation "cpp": the C++ kernel of _cpu.cpp."""

from pathlib import Path

from torch_hybrid.ops.block_attention.op import BlockAttention
from torch_hybrid.ops.core.declare import cpp_launcher

block_attention = cpp_launcher(
    BlockAttention,
    Path(__file__).with_name("_cpu.cpp"),
    tensors="cu_seqlens seq_lens page_table slot_mapping blocks q k v kv out",
    sizes="T=num_tokens N=num_seqs M=max_pages Hq=num_q_heads D=head_dim K=top_k",
    integers="page_table_row num_tokens num_seqs num_pages page_size max_pages "
    "q_token q_head k_token k_head v_token v_head "
    "num_q_heads num_kv_heads head_dim block_size top_k is_bf16 is_invariant num_threads",
    values={
        "num_pages": "x.kv.shape[0 if x.v is None else 1]",
        "page_size": "x.kv.shape[1 if x.v is None else 2]",
        "num_kv_heads": "1 if x.v is None else x.kv.shape[3]",
    },
    numbers="scale",
    out="q",
)
