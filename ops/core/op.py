"""Base classes of ops that are declared: the arguments of one call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from torch_hybrid.ops.core.capability import NO_FEATURES, Implementation
from torch_hybrid.ops.core.state_bounds import check_offsets


@dataclass(slots=True, repr=False, eq=False)
class Op:
    """Arguments of one call of an op; subclasses declare them as fields.

    A launcher may hand its value on to another implementation: ``scale(x, impl="torch")``. What
    follows stands in the docstring of every op that says nothing else of it.

    Args:
        impl: a name among the op's implementations.
        planned: for an implementation that plans, what its planner made for these lengths: its
            tensors, and its values as a tensor on the host.

    Raises:
        ValueError: a shape, dtype, layout or option is not as above, or ``impl`` is unknown or
            does not take these. Or, where reading it is free (on a CPU), an index is out of range.

    Attributes:
        implementations: those that ``define`` is given, by name.
    """

    implementations: ClassVar[Mapping[str, Implementation]]

    impl: str = field(kw_only=True)

    def features(self) -> frozenset[str] | None:
        """List the features that an implementation must have for these arguments.

        None asks for nothing: those that an implementation is made for need not be there either.
        """
        return NO_FEATURES

    def check_form(self) -> None:
        """Raise ValueError, in words of the op's own, for forms that the fields refuse too; no
        other check comes before."""

    def check(self) -> None:
        """Raise ValueError for values that no kind of field can refuse; kinds hold by now."""

    def check_indices(self) -> None:
        """Raise ValueError for an index out of range; tensors are on the host."""


class StatefulOp(Op):
    """Op that reads and writes states of sequences in slots of a pool.

    Args:
        cu_seqlens: [N + 1] int32 offsets of the sequences in T, from 0. Tokens at or past
            ``cu_seqlens[N]`` are padding. An empty sequence leaves its slot as it is.
        initial_indices: [N] int32 slot that each sequence starts from; 0, the null slot, is the
            zero state. Several may start from one slot, which no other one may then write.
        state_indices: [N] int32 slot that receives the state of each sequence, distinct except
            for 0: that state is not stored.

    Attributes:
        pool_name: of the field that is the pool.
    """

    __slots__ = ()
    pool_name: ClassVar[str] = "state"

    if TYPE_CHECKING:
        cu_seqlens: Tensor
        initial_indices: Tensor
        state_indices: Tensor

    def each_sequence(self) -> Iterator[tuple[range, int, int]]:
        """Yield the tokens of each sequence that has some, and the slots it reads and writes."""
        offsets = pairwise(self.cu_seqlens.tolist())
        slots = self.initial_indices.tolist(), self.state_indices.tolist()
        for (begin, end), initial, slot in zip(offsets, *slots, strict=True):
            if begin < end:
                yield range(begin, end), initial, slot

    def check_indices(self) -> None:
        """Raise ValueError unless sequences are among the rows of the first field, slots in a pool.

        No sequence may start from a slot that another one writes.
        """
        first = next(each for each in fields(self) if not each.kw_only)
        check_offsets(self.cu_seqlens, num_tokens=getattr(self, first.name).shape[0])
        num_slots = getattr(self, self.pool_name).shape[0]
        read, written = self.initial_indices.tolist(), self.state_indices.tolist()
        for name, slots in {"initial_indices": read, "state_indices": written}.items():
            for slot in slots:
                if not 0 <= slot < num_slots:
                    raise ValueError(f"{name} must be in [0, {num_slots}), got {slot}")
        is_live = self.cu_seqlens.diff().tolist()
        taken = {slot: n for n, slot in enumerate(written) if is_live[n]}
        for n, slot in enumerate(read):
            if slot and is_live[n] and taken.get(slot, n) != n:
                raise ValueError(
                    f"sequence {n} must not start from slot {slot}, which sequence {taken[slot]} "
                    "writes"
                )
