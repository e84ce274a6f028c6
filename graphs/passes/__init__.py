"""What is rewritten in the graph of a step between tracing and compiling, one pass a file.

``pipeline`` has their order and runs them, ``marks`` says what a node is of (a layer, a half of the
batch), and ``values`` and ``mutation`` are what passes ask of a graph.
"""

from torch_hybrid.graphs.passes.pipeline import (
    DEFAULT_PASSES,
    Pass,
    PassRecord,
    apply_passes,
    graph_text,
    with_text,
    without,
)

__all__ = [
    "DEFAULT_PASSES",
    "Pass",
    "PassRecord",
    "apply_passes",
    "graph_text",
    "with_text",
    "without",
]
