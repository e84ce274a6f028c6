"""Implementations in C++, see _cpu_kimi.cpp and native/delta_rule.h.

"recurrent_cpp" reads and writes each head's state once a token. "chunk_cpp" walks by products of
small matrices; a few tokens go the recurrent way.
"""

from pathlib import Path

from torch_hybrid.ops.delta_rule.op import KimiDeltaAttention
from torch_hybrid.ops.native.delta_rule import delta_rule_launchers

recurrent_kimi_delta_attention, chunk_kimi_delta_attention = delta_rule_launchers(
    KimiDeltaAttention, Path(__file__).with_name("_cpu_kimi.cpp")
)
