"""The gated delta rule against the memory (decode) and against a matrix product (prefill).

    python -m benchmarks.gated_delta_rule [--threads N] [--seconds S] [--cpu-time]

How it is measured is said in delta_rule.py. Heads are those of Qwen3-Next (16 and 32), and as many
key heads as value heads.
"""

from __future__ import annotations

from benchmarks.delta_rule import Rule, main
from tests.ops.delta_rule.gated import make_inputs
from torch_hybrid.ops.delta_rule import gated_delta_rule

GATED_DELTA_RULE = Rule(
    op=gated_delta_rule,
    make_inputs=make_inputs,
    heads=((16, 16), (16, 32)),
)

if __name__ == "__main__":
    main(GATED_DELTA_RULE, __doc__.splitlines()[0])
