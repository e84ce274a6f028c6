"""Report of the graphs that a runner compiled and captured."""

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
    """Report of the graphs that a runner compiled and captured so far.

    Attributes:
        graphs: record of each variant's graph. Its ``layers`` counts traced and copied layers, or
            says why none is copied; its ``regions`` counts the calls of each compiled region.
        recompiles: number of graphs beyond the one that each variant needs.
        graph_breaks: number of graph breaks; it should be 0.
        captured_graphs: name of each captured bucket.
        captured_bytes: device memory that capturing took.
        captured_seconds: time that it took, with the kernels that were built for it; ``seconds`` of
            a graph's record is the time of its tracing and compiling.
        not_captured: reasons why a variant is not captured.
        pool_bytes: bytes of all pools.
        static_input_bytes: bytes of the static inputs of steps.
        overlap: which steps are cut in halves.
        overlap_trials: measurements for ``overlap``, if it was "auto".
        switches: times at which steps of compile="background" became compiled ones.
    """

    graphs: Mapping[str, GraphRecord]
    recompiles: int
    graph_breaks: int
    captured_graphs: tuple[str, ...]
    captured_bytes: int
    captured_seconds: float
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
        """Number of compiled graphs."""
        return len(self.graphs) + self.recompiles

    @property
    def ops(self) -> Mapping[str, Counter[str]]:
        """Number of calls of each ``op[implementation]`` in one step of each variant."""
        return {variant: graph.ops for variant, graph in self.graphs.items()}

    @property
    def pool_clones(self) -> tuple[PoolClone, ...]:
        """Copies of a whole pool in the compiled code; there should be none."""
        return tuple(clone for graph in self.graphs.values() for clone in graph.pool_clones)
