"""Steps of tokens that are not certain: drafts, of which the step after them says what is accepted.

A slot of a state pool holds the state after the last certain token. Beside it lie records of the
inputs of up to D tokens after it. A step of such tokens does to each sequence:

    replay its first ``accepted`` records        as decode steps of these tokens would
    run its first new token, which is certain
    leave the state, and the last inputs of a convolution, in its slot
    run its further tokens on what is left, and leave it as it is
    leave their inputs as its records, from the first on

Nothing is rolled back: what was not certain was not stored. A sequence without new tokens is
replayed alone, and one with neither is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_hybrid.ops.composed import Parts
from torch_hybrid.ops.conv_step import check_have_slots, check_lengths
from torch_hybrid.ops.core.capability import NO_FEATURES
from torch_hybrid.ops.core.declare import TRACED, Index, Pool, StatefulOp
from torch_hybrid.ops.replay import Replay, Segments, call_twice, rows_of_replay
from torch_hybrid.ops.step_implementations import EXTEND, NO_STORE, VERIFY

# Runs a token of each sequence that has one, as a decode step: rows [M, R] of their inputs as a
# record has them, which tokens of the step they are (None: replayed ones, whose outputs nobody
# reads), pools, offsets of the sequences in the rows, and their slots. Returns outputs [M, ...].
Advance = Callable[[Tensor, Tensor | None, Sequence[Tensor], Tensor, Tensor], Tensor]


@dataclass(slots=True, repr=False, eq=False)
class StepOp(StatefulOp):
    """Step of a recurrence by one token of each sequence, or drafts after it: base of its ops.

    A step that verifies drafts is given records and how many of them are accepted, a plain one
    neither. An op declares its records once more, with their width.

    Args:
        cu_seqlens: [N + 1] int32 offsets of the sequences in T, from 0: each has one token, or
            none, which leaves its slot as it is. Implementations with the feature "extend" take
            several, of sequences that have a slot: as so many calls would, bit by bit; those with
            "no_store" also of others. Tokens at or past ``cu_seqlens[N]`` are padding.
        impl: a name among the op's implementations; with records, of one that has the feature
            "verify".
        records: [S, D, R] inputs of up to D drafts of each slot. **Mutated**.
        accepted: [N] int32, at most ``records.shape[1]``: the records in slot
            ``initial_indices[n]`` that are certain. Given where records are. Each sequence then has
            one certain token, and up to as many drafts as there are records after it. Its accepted
            records are replayed, its first token runs and its states are left; further tokens are
            run and not stored, and leave their inputs as records (``ops.verify``). In native
            implementations states have the bits that as many steps of the same tokens leave, one by
            one.
        parts: of the implementation "composed"; None leaves the choice to it.

    Raises:
        ValueError: a shape, dtype or layout is not as above, an option is unknown, or records are
            given without counts. On a CPU an index or a count is out of range, or a sequence has
            more tokens than the implementation takes.

    Attributes:
        recorded: fields that a record is made of, side by side.
        read: fields of tokens that outputs alone depend on; they may be None.
        pools: fields of the states.
    """

    recorded: ClassVar[tuple[str, ...]]
    read: ClassVar[tuple[str, ...]]
    pools: ClassVar[tuple[str, ...]]

    records: Annotated[Tensor | None, Pool("D_", "R")] = field(default=None, kw_only=True)
    accepted: Annotated[Tensor | None, Index("N")] = field(default=None, kw_only=True)
    parts: Annotated[Parts | None, TRACED] = field(default=None, kw_only=True)

    def features(self) -> frozenset[str]:
        """List what an implementation must have: "verify", where there are records."""
        return NO_FEATURES if self.records is None else VERIFY

    def check(self) -> None:
        """Raise ValueError for records without counts, or counts without records."""
        if (self.records is None) != (self.accepted is None):
            alone = "accepted" if self.records is None else "records"
            raise ValueError(f"records and accepted must be given together, got {alone} alone")

    def check_indices(self) -> None:
        """Raise ValueError for an index out of range, and for a sequence with more tokens than
        the implementation takes or than there are records."""
        StatefulOp.check_indices(self)
        features = self.implementations[self.impl].capability.features
        if self.parts is not None and self.parts.replay is not None:
            return  # whoever planned the rows has checked the counts
        if self.records is not None and self.accepted is not None:
            check_counts(self.records, self.cu_seqlens, self.initial_indices, self.accepted)
        elif not features >= EXTEND:
            check_lengths(self.cu_seqlens)
        elif not features >= NO_STORE:
            check_have_slots(self.cu_seqlens, self.state_indices)


S = TypeVar("S", bound=StepOp)


def check_counts(
    records: Tensor, cu_seqlens: Tensor, initial_indices: Tensor, accepted: Tensor
) -> None:
    """Raise ValueError unless all counts, on the host, are of records that there are."""
    most = records.shape[1]
    lengths, counts = cu_seqlens.diff().tolist(), accepted.tolist()
    if max(lengths, default=0) > most + 1:
        raise ValueError(f"a sequence must have at most {most + 1} tokens, got lengths {lengths}")
    if not all(0 <= count <= most for count in counts):
        raise ValueError(f"accepted must be within 0 and {most}, got {counts}")
    for n, (count, initial) in enumerate(zip(counts, initial_indices.tolist(), strict=True)):
        if count and not initial:
            raise ValueError(f"sequence {n} starts from the zero state and has no {count} records")


def verify_by_steps(
    advance: Advance, x: StepOp, rows: Tensor, out: Tensor, pools: Sequence[Tensor]
) -> Tensor:
    """Run a step of tokens that are not certain as the decode steps that it is made of.

    Args:
        advance: the decode step.
        x: arguments of the step, whose records are **mutated**.
        rows: [T, R] the new tokens' inputs, as a record has them.
        out: [T, ...] zeros, which receive the outputs.
        pools: [S, ...] each. **Mutated**.

    Returns:
        ``out``.
    """
    records, accepted = x.records, x.accepted
    assert records is not None
    assert accepted is not None
    if rows.device.type == "cpu":
        StatefulOp.check_indices(x)
    check_counts(records, x.cu_seqlens, x.initial_indices, accepted)
    starts, lengths = x.cu_seqlens[:-1].long(), x.cu_seqlens.diff()
    initial, slots = x.initial_indices.long(), x.state_indices.long()
    own = torch.arange(1, len(slots) + 1, dtype=torch.int32, device=slots.device)
    working = [_of_sequences(pool, initial) for pool in pools]

    def run(is_live: Tensor, given: Tensor, token: Tensor | None) -> Tensor:
        offsets = F.pad(is_live.cumsum(0), (1, 0)).int()
        return advance(given, token, working, offsets, own)

    for i in range(int(accepted.max()) if len(accepted) else 0):
        is_live = accepted > i
        run(is_live, records[initial[is_live], i], None)
    for i in range(int(lengths.max()) if len(lengths) else 0):
        if i == 1:
            _store(pools, working, slots, (lengths > 0) | (accepted > 0))
        is_live = lengths > i
        token = starts[is_live] + i
        out[token] = run(is_live, rows[token], token)
        if i:
            is_kept = slots[is_live] > 0
            records[slots[is_live][is_kept], i - 1] = rows[token[is_kept]]
    if not len(lengths) or int(lengths.max()) < 2:
        _store(pools, working, slots, (lengths > 0) | (accepted > 0))
    return out


def verify_by_calls(step: Callable[[S], Tensor], x: S, out: Tensor) -> Tensor:
    """Verify drafts by calls of a launcher of the decode step.

    Args:
        step: the launcher.
        x: arguments of the step that verifies drafts. Its pools are **mutated**.
        out: [T, ...] zeros, which receive the outputs.

    Returns:
        ``out``.
    """
    recorded, reading = _rows(x, x.recorded), _rows(x, x.read)

    def advance(
        rows: Tensor, token: Tensor | None, working: Sequence[Tensor], offsets: Tensor, own: Tensor
    ) -> Tensor:
        inputs = rows.split([part.shape[1] for part in recorded.values()], 1)
        given: dict[str, Any] = {
            **dict(zip(recorded, inputs, strict=True)),
            **dict(zip(x.pools, working, strict=True)),
        }
        for name, gate in reading.items():
            unread = gate.new_zeros(len(rows), gate.shape[1])
            given[name] = unread if token is None else gate[token]
        given |= {"cu_seqlens": offsets, "initial_indices": own, "state_indices": own}
        return step(replace(x, **given, records=None, accepted=None))

    pools = [getattr(x, name) for name in x.pools]
    return verify_by_steps(advance, x, torch.cat([*recorded.values()], 1), out, pools)


def verify_by_replay(step: Callable[[S], Tensor], x: S, replay: Replay | None = None) -> Tensor:
    """Verify drafts in two calls of a function that takes several tokens of a sequence.

    Args:
        step: makes outputs of a step without drafts.
        x: arguments of the step that verifies drafts. Its pools are **mutated**.
        replay: rows of both calls; None plans them here.
    """
    assert x.records is not None
    recorded, reading = _rows(x, x.recorded), _rows(x, x.read)

    def run(advanced: Sequence[Tensor], read_rows: Sequence[Tensor], at: Segments) -> Tensor:
        given: dict[str, Any] = {
            **dict(zip(recorded, advanced, strict=True)),
            **dict(zip(reading, read_rows, strict=True)),
            "cu_seqlens": at.cu_seqlens,
            "initial_indices": at.initial_indices,
            "state_indices": at.state_indices,
        }
        return step(replace(x, **given, records=None, accepted=None))

    return replayed(run, [*recorded.values()], [*reading.values()], x, replay)


def replayed(
    run: Callable[[Sequence[Tensor], Sequence[Tensor], Segments], Tensor],
    advancing: Sequence[Tensor],
    reading: Sequence[Tensor],
    x: StepOp,
    replay: Replay | None,
) -> Tensor:
    """Run a step that verifies drafts as two calls of an op; see ``call_twice``.

    Without ``replay``, plan both calls of a step in which each sequence has one token that is no
    draft.
    """
    assert x.records is not None
    assert x.accepted is not None
    if replay is not None:
        return call_twice(run, advancing, reading, replay, x.records)
    # One row and one null sequence more: there may be none, and records that are replayed alone.
    advancing, reading = _padded(advancing), _padded(reading)
    offsets = torch.cat([x.cu_seqlens, x.cu_seqlens[-1:]])
    lengths = offsets.diff()
    accepted, initial, slots = _padded([x.accepted, x.initial_indices, x.state_indices])
    replay = rows_of_replay(
        offsets,
        lengths,
        accepted,
        (lengths - 1).clamp(min=0),
        initial,
        slots,
        num_tokens=advancing[0].shape[0],
        num_drafts=x.records.shape[1],
        most_new=x.accepted.shape[0],
    )
    null = x.records[0, 0].clone()  # what the rows that are no drafts go to
    out = call_twice(run, advancing, reading, replay, x.records)
    x.records[0, 0] = null
    return out[:-1]


def _padded(rows: Sequence[Tensor]) -> list[Tensor]:
    """Add a row of zeros to each tensor."""
    return [torch.cat([each, each.new_zeros(1, *each.shape[1:])]) for each in rows]


def _rows(x: StepOp, names: Sequence[str]) -> dict[str, Tensor]:
    rows = {name: getattr(x, name) for name in names}
    return {name: each for name, each in rows.items() if each is not None}


def _of_sequences(pool: Tensor, initial: Tensor) -> Tensor:
    """Make a pool of what the sequences start from, in slots from 1 on."""
    started = pool[initial].where((initial > 0).view(-1, *[1] * (pool.ndim - 1)), 0.0)
    return torch.cat([torch.zeros_like(pool[:1]), started])


def _store(
    pools: Sequence[Tensor], working: Sequence[Tensor], slots: Tensor, has_run: Tensor
) -> None:
    is_left = has_run & (slots > 0)
    for pool, left in zip(pools, working, strict=True):
        pool[slots[is_left]] = left[1:][is_left]
