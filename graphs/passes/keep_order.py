"""What keeps a schedule through Inductor: no reordering, and no kernel of two stages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._inductor.choices import InductorChoices
from torch._inductor.virtualized import V

from torch_hybrid.graphs.passes.marks import half_of, stage_of
from torch_hybrid.ops.core.side_stream import JOIN


class KeepHalves(InductorChoices):
    """Inductor's choices, but for fusion: never across halves or stages.

    A kernel of both halves would wait for both, and one of two stages would be in neither place.
    """

    def uuid(self) -> str:
        """Part of the key under which Inductor caches code."""
        return "torch_hybrid.KeepHalves.2"

    @staticmethod
    def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        """As Inductor decides, within one stage of one half."""
        if len(_places(node1) | _places(node2)) > 1:
            return False
        return bool(InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score))


def _places(scheduler_node: Any) -> set[tuple[int, int]]:
    """Half and stage of each part of a kernel; parts that belong to the whole step have none.

    A part may repeat what an earlier stage computes too: it stands at the last of its stages. What
    is made of both halves is where they are joined, after either.
    """
    places = set()
    for part in scheduler_node.get_nodes():
        origins = [] if part.node is None else part.node.get_origins()
        marks = {(half_of(origin), stage_of(origin)) for origin in origins}
        placed = [(half, stage) for half, stage in marks if half is not None and stage is not None]
        if len({half for half, _ in placed}) == 1:
            places.add(max(placed))
    return places


_OPAQUE_CALL = re.compile(r"torch\.ops\.(?P<name>(?:torch_hybrid|_c10d_functional)\.\w+?)_?\.\w+\(")


def check_order(source: str, planned: Sequence[str]) -> None:
    """Raise unless generated code calls the opaque ops in the order of the schedule.

    Args:
        source: Inductor's code of a scheduled graph.
        planned: the ops in the graph's order, from ``schedule.opaque_ops``.

    Raises:
        RuntimeError: Inductor has undone the schedule.
    """
    found = [call["name"] for call in _OPAQUE_CALL.finditer(source)]
    remaining = iter(planned)  # an op of weights alone is there once for both halves
    if not all(name in remaining for name in found):
        raise RuntimeError(
            f"compiled code must keep the schedule's order of ops, {list(planned)}; it has {found}"
        )


# Inductor's own reordering would run one half after the other again.
KEEP_ORDER: dict[str, Any] = {
    "reorder_for_locality": False,
    "reorder_for_peak_memory": False,
    "inductor_choices_class": KeepHalves,
}


# Inductor reuses a buffer after the last call that reads it: too early where that only starts.
KEEP_BUFFERS: dict[str, Any] = {"allow_buffer_reuse": False, "inplace_buffers": False}


@contextmanager
def keep_order(planned: Sequence[str]) -> Iterator[None]:
    """Let Inductor compile a scheduled graph as it stands; ``planned`` are its opaque ops."""
    # Inductor makes its choices once for a thread, as the option is at its first graph: a plain
    # graph before this one would have left its own. The option alone is part of the cache's key.
    options = KEEP_ORDER | (KEEP_BUFFERS if JOIN in planned else {})
    with torch._inductor.config.patch(options), V.set_choices_handler(KeepHalves()):
        yield
