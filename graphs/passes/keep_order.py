"""Settings of Inductor that keep a schedule: no reordering, and no kernel of two stages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._inductor.choices import InductorChoices
from torch._inductor.virtualized import V

from torch_hybrid.graphs.passes.marks import half_of, stage_of


class KeepHalves(InductorChoices):
    """Inductor's choices, except that fusion never crosses halves or stages.

    A kernel of both halves would wait for both. A kernel of two stages would run in neither's
    place.
    """

    def uuid(self) -> str:
        """Name this class in the key under which Inductor caches code."""
        return "torch_hybrid.KeepHalves.2"

    @staticmethod
    def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        """Allow the fusions that Inductor allows, within one stage of one half."""
        if len(_places(node1) | _places(node2)) > 1:
            return False
        return bool(InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score))


def _places(scheduler_node: Any) -> set[tuple[int, int]]:
    """Find the half and stage of each part of a kernel; parts of the whole step have none.

    A part that several stages compute counts for the last of them. A part made of both halves has
    no place: it joins the halves after either.
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
        planned: the opaque ops in the graph's order (``schedule.opaque_ops``).

    Raises:
        RuntimeError: Inductor has changed the order.
    """
    found = [call["name"] for call in _OPAQUE_CALL.finditer(source)]
    remaining = iter(planned)  # an op that reads only weights stands once for both halves
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


@contextmanager
def keep_order(planned: Sequence[str]) -> Iterator[None]:
    """Make Inductor compile a scheduled graph in its order; ``planned`` are its opaque ops."""
    # Inductor reads the option once for a thread, at its first graph; a plain graph may have come
    # before. So the handler is set, too; the option is there for the cache's key.
    with torch._inductor.config.patch(KEEP_ORDER), V.set_choices_handler(KeepHalves()):
        yield
