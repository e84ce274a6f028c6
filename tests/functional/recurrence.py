"""A recurrence to train with, as its tests see it: arguments, definition, somebody else's code."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import torch_hybrid as th

Tensors = list[Tensor]
Results = tuple[Tensor, Tensor]
# One token, an empty sequence, and long ones; "borders" of chunks of 32, and their neighbours.
LENGTHS = {
    "short": (1, 2, 0, 17),
    "borders": (31, 32, 33, 64, 65),
    "long": (300,),
    "mixed": (5, 100, 1, 0, 128, 66),
}


def offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def packing(lengths: Sequence[int]) -> th.Packing:
    return th.Packing(offsets(lengths), capacity=len(lengths))


@dataclass(frozen=True, kw_only=True, eq=False)
class Recurrence(ABC):
    """A function of tensors, the last of which are initial states.

    Attributes:
        function: of ``torch_hybrid.functional``.
        op: what its ops' names begin with.
        names: of the tensors.
        shared: names of those without a row for each token.
        num_optional: how many before the states may be left out.
        like: place of the one that outputs are like.
        decay: name of the one that decays.
        decays: what that may be at most and at least.
        decay_slack: error of results there, of the largest number of each.
        rounding: rtol and, of the largest number, atol of results in bfloat16.
        apart: the dimension in which rows may be slices of wider ones.
        reads_padding: names of those whose rows behind the last sequence are read.
        has_states: whether it is given initial states.
        starts_from_zeros: whether states of zeros are no other than none.
        options: given by name.
        lengths: of sequences whose gradients are compared.
        num_draws: that are compared as if they were one.
    """

    function: Callable[..., tuple[Tensor, Tensor | None]]
    op: str
    names: tuple[str, ...]
    shared: tuple[str, ...] = ()
    num_optional: int = 0
    like: int = 0
    decay: str = ""
    decays: tuple[float, ...] = ()
    decay_slack: float = 2e-6
    rounding: tuple[float, float] = (2**-7, 1e-5)
    apart: int = 1
    reads_padding: tuple[str, ...] = ()
    has_states: bool = True
    starts_from_zeros: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    lengths: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: LENGTHS)
    num_draws: int = 1

    @abstractmethod
    def inputs(self, lengths: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensors:
        """Make all tensors; those without a row for each token have the dtype of sums."""

    @abstractmethod
    def walk(self, rows: Tensors, shared: Tensors, state: Tensor | None) -> Results:
        """Walk a sequence token by token, in the dtype of its rows; return outputs and state."""

    def their_walk(self, rows: Tensors, shared: Tensors, state: Tensor | None) -> Results:
        """Compute what transformers does of a sequence; here there is nothing of theirs."""
        return self.walk(rows, shared, state)

    def weights(self, xs: Tensors) -> Tensors:
        """Make random weights of outputs and final states."""
        return [torch.randn(xs[self.like].shape), torch.randn(xs[-1].shape)]

    def op_arguments(self, xs: Tensors, cu_seqlens: Tensor) -> tuple[Tensors, dict[str, Any]]:
        """List the arguments of the op that autograd sees, and its options."""
        return [*xs[:-1], cu_seqlens, xs[-1]], {}

    @property
    def by_token(self) -> list[int]:
        """List the places of tensors with a row for each token."""
        return [at for at, name in enumerate(self.names[:-1]) if name not in self.shared]

    def run(self, xs: Tensors, lengths: Sequence[int] | None, impl: str) -> Results:
        packed = None if lengths is None else packing(lengths)
        states = xs[-1] if self.has_states else None
        out, final = self.function(*xs[:-1], packed, states, impl=impl, **self.options)
        assert final is not None
        return out, self._joined(final, xs[-1], lengths or (1,))

    def exact(self, xs: Tensors, lengths: Sequence[int]) -> Results:
        return self._by_sequence(self.walk, xs, lengths)

    def theirs(self, xs: Tensors, lengths: Sequence[int]) -> Results:
        return self._by_sequence(self.their_walk, xs, lengths)

    def _by_sequence(
        self, walk: Callable[..., Results], xs: Tensors, lengths: Sequence[int]
    ) -> Results:
        by_token = self.by_token
        shared = [x for at, x in enumerate(xs[:-1]) if at not in by_token]
        out, final = [xs[self.like].new_empty(0, *xs[self.like].shape[1:])], []
        for state, (begin, end) in zip(xs[-1], pairwise(offsets(lengths).tolist()), strict=True):
            if begin < end:
                given = state if self.has_states else None
                o, state = walk([xs[at][begin:end] for at in by_token], shared, given)
                out.append(o)
            final.append(state)
        return torch.cat(out), self._joined(torch.stack(final), xs[-1], lengths)

    def _joined(self, final: Tensor, states: Tensor, lengths: Sequence[int]) -> Tensor:
        """Give every state a gradient, and empty sequences one last state whatever computes it."""
        if self.has_states:
            return final
        is_empty = torch.tensor([n == 0 for n in lengths])
        return torch.where(is_empty.view(-1, *[1] * (final.ndim - 1)), states, final)
