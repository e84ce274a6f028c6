"""A step that verified drafts, and the tokens that came of it.

    for each request, from its certain token on:
        draw the next token from the logits there, as without drafts
        go on while it is what was drafted

Each token is the model's own draw, by the number that its place in the output has: a draft never
becomes a token, it only spares a step where it is the same. So the tokens of a request, greedy or
drawn, are those that it gets without drafts, for each seed and whatever is drafted. A draft that
has probability p is accepted with probability p, and else the token is distributed as the others
are, which is the rule of speculative sampling for drafts that are certain of themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from torch import Tensor

from torch_hybrid.flight import Rows, positions_of, ruled, sequences_of
from torch_hybrid.request import Request, TokenEvent
from torch_hybrid.sampling import NOT_FINITE, sample

if TYPE_CHECKING:
    from torch_hybrid.graphs.runner import Runner


@dataclass(slots=True, kw_only=True)
class Verified:
    """A ``Flight`` whose requests may get several tokens each.

    Attributes:
        runner: holds the sequences.
        requests: of the step.
        drafts: of each.
        logits: [T, vocab_size] after each certain token and its drafts, one request after another.
        num_accepted: drafts of each, once it has landed.
    """

    runner: Runner
    requests: tuple[Request, ...]
    drafts: Sequence[Sequence[int]]
    logits: Tensor
    num_accepted: list[int] = field(default_factory=list)

    @property
    def was_launched(self) -> bool:
        """As of a ``Flight``: the host waits for its tokens."""
        return False

    @property
    def sampled(self) -> tuple[Request, ...]:
        """As of a ``Flight``: each gets a token at least."""
        return self.requests

    @property
    def ended(self) -> list[Request]:
        """Those of its requests that have ended."""
        return [request for request in self.requests if request.output is not None]

    def land(self) -> list[TokenEvent]:
        """Give the requests their tokens, and count what was accepted as held."""
        events: list[TokenEvent] = []
        lengths = [1 + len(drafts) for drafts in self.drafts]
        first = list(accumulate(lengths, initial=0))
        at_once = self._draw_all() if all(r.rules is None for r in self.requests) else None
        self.num_accepted = [0] * len(self.requests)
        going = list(range(len(self.requests)))
        for depth in range(max(lengths)):
            rows = [first[n] + depth for n in going]
            tokens = self._draw(going, rows) if at_once is None else [at_once[row] for row in rows]
            accepted = []
            for n, row, token in zip(going, rows, tokens, strict=True):
                request, drafts = self.requests[n], self.drafts[n]
                request.is_finite &= token != NOT_FINITE
                request.num_held += 1
                request.expect()
                events.append(request.take(token, self.logits, row))
                if request.output is None and depth < len(drafts) and drafts[depth] == token:
                    accepted.append(n)
                    self.num_accepted[n] += 1
            going = accepted
            if not going:
                break
        sequences = sequences_of([(request, 1) for request in self.requests])
        self.runner.accept(sequences, self.num_accepted)
        return events

    def _draw_all(self) -> list[int]:
        """A token after each token, of requests without rules of their own."""
        draws = [
            request.next_draw(ahead=depth)
            for request, drafts in zip(self.requests, self.drafts, strict=True)
            for depth in range(1 + len(drafts))
        ]
        return sample(self.logits, draws)

    def _draw(self, going: Sequence[int], rows: Sequence[int]) -> list[int]:
        """The next token of some requests, from these rows and by their own rules."""
        requests = [self.requests[n] for n in going]
        return sample(ruled(self.logits[rows], requests), [r.next_draw() for r in requests])


def verify(runner: Runner, rows: Rows, drafts: Sequence[Sequence[int]]) -> Verified:
    """Run a step of one missing token of each request, and drafts after it."""
    tokens = [
        request.history[request.num_held :] + list(own)
        for (request, _), own in zip(rows, drafts, strict=True)
    ]
    positions = positions_of(
        [(request, len(new)) for (request, _), new in zip(rows, tokens, strict=True)]
    )
    logits = runner.verify(sequences_of(rows), tokens, positions=positions)
    return Verified(runner=runner, requests=tuple(r for r, _ in rows), drafts=drafts, logits=logits)
