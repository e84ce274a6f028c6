"""A step between its start and its tokens, and how an engine runs ahead of the device.

    flight = launch(step n)               planned and sent; its tokens stay on the device
    next   = launch(step n + 1)           rows whose last token is not known yet take it there
    flight.land()                         waits for step n; requests take their tokens

What the host must see between two tokens (rules on the logits, log-probabilities) does not run
ahead: such a step is run and sampled before anything else starts. A request that turns out to have
ended while its next step was under way gets nothing of that one, and its sequence is freed when
that has landed too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_hybrid.graphs.embeds import Embeds
from torch_hybrid.request import Request, TokenEvent
from torch_hybrid.sampling import NOT_FINITE, Draw, sample

if TYPE_CHECKING:
    from torch_hybrid.caches.sequence import Sequence as HeldSequence
    from torch_hybrid.graphs.runner import Runner

Rows = Sequence[tuple[Request, int]]  # requests, and how many of their missing tokens are run


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """A step that was started.

    Attributes:
        requests: whose sequences it reads and writes.
        sampled: those of them that get a token of it, in the order of their tokens.
        tokens: waits for them.
        logits: [N, vocab_size] that they were drawn from; None of a launched step.
        is_decode: whether it runs one token of each.
    """

    requests: tuple[Request, ...]
    sampled: tuple[Request, ...]
    tokens: Callable[[], list[int]]
    logits: Tensor | None = None
    is_decode: bool = False

    @property
    def was_launched(self) -> bool:
        """Whether the host need not know its tokens to start the next step."""
        return self.logits is None

    def land(self) -> list[TokenEvent]:
        """Wait for the tokens, and give them to the requests that have not ended meanwhile."""
        tokens = self.tokens()
        events = []
        for row, (request, token) in enumerate(zip(self.sampled, tokens, strict=True)):
            request.is_finite &= token != NOT_FINITE
            if request.output is None:
                events.append(request.take(token, self.logits, row))
        return events

    @property
    def ended(self) -> list[Request]:
        """Those of its requests that have ended."""
        return [request for request in self.requests if request.output is not None]


def may_launch(rows: Rows) -> bool:
    """Whether no request of a step needs the host between its tokens."""
    return not any(request.needs_host for request, _ in rows)


def launch(runner: Runner, rows: Rows) -> Flight:
    """Start a step that samples on the device, without waiting for it.

    Args:
        runner: holds the sequences.
        rows: that ``may_launch``.
    """
    draws = _draws(rows)
    tokens = [request.missing(num_new) for request, num_new in rows]
    launched = runner.launch(
        sequences_of(rows), tokens, draws, positions=positions_of(rows), embeds=_embeds_of(rows)
    )
    places = [row for row, draw in enumerate(draws) if draw is not None]

    def taken() -> list[int]:
        drawn = launched.result()
        return [drawn[row] for row in places]

    return Flight(
        requests=_requests(rows), sampled=_hold(rows), tokens=taken, is_decode=_is_decode(rows)
    )


def run(runner: Runner, rows: Rows) -> Flight:
    """Run a step, and sample by its logits for the requests whose history is complete."""
    logits = _extend(runner, rows)
    draws = {row: draw for row, draw in enumerate(_draws(rows)) if draw is not None}
    sampled = _hold(rows)
    if len(draws) < len(rows):
        logits = logits[list(draws)]
    tokens = sample(ruled(logits, sampled), list(draws.values()))
    return Flight(
        requests=_requests(rows),
        sampled=sampled,
        tokens=lambda: tokens,
        logits=logits,
        is_decode=_is_decode(rows),
    )


def _draws(rows: Rows) -> list[Draw | None]:
    """How the next token of each request is drawn; None where a step leaves its history short."""
    return [
        request.next_draw() if request.num_held + num_new == request.num_tokens else None
        for request, num_new in rows
    ]


def _hold(rows: Rows) -> tuple[Request, ...]:
    """Count the tokens that a step runs as held, and those that it samples as expected."""
    for request, num_new in rows:
        request.num_held += num_new
        if request.images is not None:
            request.images.passed(request.sample, request.num_held)
    sampled = [request for request, _ in rows if request.num_held == request.num_tokens]
    for request in sampled:
        request.expect()
    return tuple(sampled)


def _is_decode(rows: Rows) -> bool:
    return all(num_new == 1 for _, num_new in rows)


def _requests(rows: Rows) -> tuple[Request, ...]:
    return tuple(request for request, _ in rows)


def sequences_of(rows: Rows) -> list[HeldSequence]:
    """The sequences of the requests of a step, which all have one."""
    sequences = [request.sequence for request, _ in rows if request.sequence is not None]
    assert len(sequences) == len(rows)
    return sequences


def positions_of(rows: Rows) -> Tensor | None:
    """[3, T] rotary positions of the tokens of a step; None where each is its token's number."""
    if all(request.images is None for request, _ in rows):
        return None
    spans = [(request.images, request.num_held, num_new) for request, num_new in rows]
    given = [
        None if images is None else images.positions(first, count) for images, first, count in spans
    ]
    if all(own is None for own in given):
        return None
    counted = (
        torch.arange(first, first + count, dtype=torch.int64, device="cpu").expand(3, -1)
        for _, first, count in spans
    )
    pairs = zip(given, counted, strict=True)
    return torch.cat([plain if own is None else own for own, plain in pairs], dim=1)


def _embeds_of(rows: Rows) -> Embeds | None:
    """What the images of a step's requests show to its tokens; they have been loaded."""
    if all(request.images is None for request, _ in rows):
        return None
    found: list[Tensor] = []
    places: list[int] = []
    start = 0
    for request, num_new in rows:
        if request.images is not None and request.images.are_needed(request.num_held, num_new):
            own, at = request.images.rows(request.num_held, num_new)
            found.append(own)
            places += [start + place for place in at]
        start += num_new
    return Embeds(rows=torch.cat(found), places=places) if found else None


def _extend(runner: Runner, rows: Rows) -> Tensor:
    """[N, vocab_size] logits after each row's tokens; prompts that ask note their own."""
    sequences = sequences_of(rows)
    tokens = [request.history[request.num_held :][:num_new] for request, num_new in rows]
    positions, embeds = positions_of(rows), _embeds_of(rows)
    if not any(request.needs_prompt_logits for request, _ in rows):
        return runner.extend(sequences, tokens, logits="last", positions=positions, embeds=embeds)
    logits = runner.extend(sequences, tokens, logits="all", positions=positions, embeds=embeds)
    each = logits.split([num_new for _, num_new in rows])
    for (request, _), own in zip(rows, each, strict=True):
        request.note_prompt(own, first=request.num_held)
    last = [end - 1 for end in accumulate(num_new for _, num_new in rows)]
    return logits[last]


def ruled(logits: Tensor, requests: Iterable[Request]) -> Tensor:
    """[N, vocab_size] logits by each request's own rules."""
    if all(request.rules is None for request in requests):
        return logits
    ruled = logits.float().clone()
    for row, request in zip(ruled, requests, strict=True):
        if request.rules is not None:
            row.copy_(request.ruled(row))
    return ruled
