"""Steps that verify drafts by ops that do not replay records themselves; see ``ops.replay``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from torch_hybrid.backends.mode import Mode
from torch_hybrid.batch import Batch
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.ops.replay import Replay, Segments, call_twice, rows_of_replay
from torch_hybrid.pytrees import register_value
from torch_hybrid.specs import RECORDS

register_value(Segments)
register_value(Replay)


def plan_replay(batch: Batch, mode: Mode) -> Replay:
    """Plan both calls for a batch on the host, padded to its bucket."""
    assert batch.accepted is not None
    assert batch.num_drafts is not None
    return rows_of_replay(
        batch.cu_seqlens,
        batch.seq_lens,
        batch.accepted,
        batch.num_drafts,
        batch.initial_indices,
        batch.state_indices,
        num_tokens=batch.num_tokens,
        num_drafts=mode.num_drafts,
        most_new=batch.num_tokens if mode.tokens_per_seq is None else batch.num_seqs,
    )


class _Plan(Protocol):
    @property
    def replay(self) -> Replay | None: ...


PlanT = TypeVar("PlanT", bound=_Plan)


def walk(
    run: Callable[[Sequence[Tensor], Sequence[Tensor], PlanT | Segments], Tensor],
    advancing: Sequence[Tensor],
    reading: Sequence[Tensor],
    plan: PlanT,
    cache: LayerCache,
    records: str = RECORDS,
) -> Tensor:
    """Run an op over a step's tokens: in one call, or in two if the step verifies drafts.

    Args:
        run: calls the op on rows of ``advancing`` and ``reading``, with the sequences and slots of
            the plan or of one of the two calls.
        advancing: [T, ...] each, inputs that states depend on; records have them side by side.
        reading: [T, ...] each, inputs that outputs alone depend on.
        plan: plan of the step.
        cache: the layer's pools. Mutated at the slots that the plan names.
        records: name of the pool of draft records.

    Returns:
        [T, ...] outputs; rows of padding are what ``run`` makes of padding.
    """
    if plan.replay is None:
        return run(advancing, reading, plan)
    return call_twice(run, advancing, reading, plan.replay, cache[records])
