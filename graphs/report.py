"""What a runner compiled, as a value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch_hybrid.graphs.compiling.clone_check import PoolClone
from torch_hybrid.graphs.compiling.compile import GraphRecord
from torch_hybrid.graphs.options.measure_overlap import Trial
from torch_hybrid.graphs.stepping.background import Switches
from torch_hybrid.graphs.two_batch import OverlapPolicy
from torch_hybrid.host.shown import Shown


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report(Shown):
    """What a runner compiled so far.

    ``graphs`` is by step variant; ``recompiles`` counts graphs beyond the one that each variant
    needs; ``ops`` counts calls by ``op[implementation]`` in one step of each variant. A graph's
    ``layers`` says how many were traced and how many are copies, or why none is, and its
    ``regions`` how often each compiled region is called.
    ``captured_graphs`` names each captured bucket, ``captured_bytes`` is the device memory that
    capturing took, and ``not_captured`` says why a variant is not. ``overlap`` says which steps
    are cut in halves, and ``overlap_trials`` what was measured for that, where it was "auto".
    ``switches`` says when steps of compile="background" became compiled ones.
    """

    graphs: Mapping[str, GraphRecord]
    recompiles: int
    graph_breaks: int
    captured_graphs: tuple[str, ...]
    captured_bytes: int
    not_captured: Mapping[str, tuple[str, ...]]
    pool_bytes: int
    static_input_bytes: int
    overlap: OverlapPolicy
    overlap_trials: tuple[Trial, ...]
    switches: Switches | None = None

    def facts(self) -> Mapping[str, str]:
        """Tell the counts that say most."""
        return {
            "graphs": ", ".join(self.graphs) or "none",
            "breaks": str(self.graph_breaks),
            "recompiles": str(self.recompiles),
            "pool clones": str(len(self.pool_clones)),
            "captured": f"{len(self.captured_graphs)} buckets",
            "pools": f"{self.pool_bytes:,} bytes",
        }

    @property
    def compiles(self) -> int:
        """How many graphs were compiled."""
        return len(self.graphs) + self.recompiles

    @property
    def ops(self) -> Mapping[str, Counter[str]]:
        """Calls by op and implementation, for each variant."""
        return {variant: graph.ops for variant, graph in self.graphs.items()}

    @property
    def pool_clones(self) -> tuple[PoolClone, ...]:
        """Copies of a whole pool in the compiled code; none is right."""
        return tuple(clone for graph in self.graphs.values() for clone in graph.pool_clones)
