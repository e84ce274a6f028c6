"""Passes over the graph of a step, between tracing and Inductor; one pass a file.

``pipeline`` has their order and runs them. ``marks`` says to which layer and which half of the
batch a node belongs. ``values`` and ``mutation`` answer questions of passes: shapes, memory and
writes of nodes. ``own_functions`` does for a model that runs uncompiled what passes do in a graph.
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
