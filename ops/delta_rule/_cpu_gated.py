"""Implementations in C++, see _cpu_gated.cpp and native/delta_rule.h.

"recurrent_cpp" reads and writes each head's state once a token. "chunk_cpp" walks by products of
small matrices; a few tokens go the recurrent way.
"""

from pathlib import Path

from torch_hybrid.ops.delta_rule.op import GatedDeltaRule
from torch_hybrid.ops.native.delta_rule import delta_rule_launchers

recurrent_gated_delta_rule, chunk_gated_delta_rule = delta_rule_launchers(
    GatedDeltaRule, Path(__file__).with_name("_cpu_gated.cpp")
)
