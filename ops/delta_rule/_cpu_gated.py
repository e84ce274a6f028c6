"""Implementation "cpp": both execution forms in C++, see _cpu_gated.cpp and native/delta_rule.h.

The recurrent form reads and writes each head's state once a token. The chunk form walks by products
of small matrices; a few tokens go the recurrent way.
"""

from pathlib import Path

from torch_hybrid.ops.delta_rule.op import ChunkGatedDeltaRule, RecurrentGatedDeltaRule
from torch_hybrid.ops.native.delta_rule import delta_rule_launcher

_SOURCE = Path(__file__).with_name("_cpu_gated.cpp")

recurrent_gated_delta_rule = delta_rule_launcher(RecurrentGatedDeltaRule, _SOURCE, is_chunked=False)
chunk_gated_delta_rule = delta_rule_launcher(ChunkGatedDeltaRule, _SOURCE, is_chunked=True)
