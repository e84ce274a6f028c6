"""A step between its start and its tokens, and how an engine runs ahead of the device.

    flight = launch(step n)               planned and sent; its tokens stay on the device
    next   = launch(step n + 1)           rows whose last token is not known yet take it there
    flight.finish()                         waits for step n; requests take their tokens

What the host must see between two tokens (rules on the logits, log-probabilities, drafts) does not
run ahead: such a step is ``run``, and lands before anything else starts. A request that turns out
to have ended while its next step was under way gets nothing of that one, and its sequence is freed
when that has landed too.

What a step runs for certain, its sequences hold as soon as it was started. Drafts are tried after
that, and are held as far as they are accepted when it lands:

    for each request, after its last certain token:
        draw the next token from the logits there, as without drafts
        go on while it is what was drafted

Each token is the model's own draw, by the number that its place in the output has: a draft never
becomes a token, it only spares a step where it is the same. So the tokens of a request, greedy or
drawn, are those that it gets without drafts, for each seed and whatever is drafted. A draft that
has probability p is accepted with probability p, and else the token is distributed as the others
are, which is the rule of speculative sampling for drafts that are certain of themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_hybrid.graphs.stepping.embeds import Embeds
from torch_hybrid.sampling import NOT_FINITE, Draw, sample
from torch_hybrid.serving.request import Request, TokenEvent

if TYPE_CHECKING:
    from torch_hybrid.caches.sequence import Sequence as HeldSequence
    from torch_hybrid.graphs.runner import Runner

Rows = Sequence[tuple[Request, int]]  # requests, and how many of their missing tokens are run
Drafts = Sequence[Sequence[int]]  # of each row, tried after its last token


@dataclass(slots=True, kw_only=True)
class InFlight:
    """A step that was started.

    Attributes:
        runner: holds the sequences.
        requests: whose sequences it reads and writes.
        sampled: those of them that get tokens of it, in the order of their tokens.
        drafts: of each of ``sampled``.
        launched: waits for a token of each, that the device drew; None where the host draws them.
        logits: [T, vocab_size] that it draws them from, after the last certain token and each draft
            of each of ``sampled``; None of a launched step.
        is_decode: whether it runs one token of each, and no image.
        num_accepted: drafts of each of ``sampled``, once it has landed.
    """

    runner: Runner
    requests: tuple[Request, ...]
    sampled: tuple[Request, ...]
    drafts: Drafts
    launched: Callable[[], list[int]] | None = None
    logits: Tensor | None = None
    is_decode: bool = False
    num_accepted: list[int] = field(default_factory=list)

    @property
    def was_launched(self) -> bool:
        """Whether the host need not know its tokens to start the next step."""
        return self.launched is not None

    @property
    def ended(self) -> list[Request]:
        """Those of its requests that have ended."""
        return [request for request in self.requests if request.output is not None]

    def finish(self) -> list[TokenEvent]:
        """Give their tokens to the requests that have not ended meanwhile, and have their sequences
        hold the drafts that were accepted."""
        first = list(accumulate((1 + len(drafts) for drafts in self.drafts), initial=0))
        at_once = self._draw_at_once()
        self.num_accepted = [0] * len(self.sampled)
        events: list[TokenEvent] = []
        depth, going = 0, list(range(len(self.sampled)))
        while going:
            rows = [first[n] + depth for n in going]
            tokens = self._draw(going, rows) if at_once is None else [at_once[row] for row in rows]
            accepted = []
            for n, row, token in zip(going, rows, tokens, strict=True):
                request, drafts = self.sampled[n], self.drafts[n]
                request.is_finite &= token != NOT_FINITE
                if request.output is None:
                    events.append(request.take(token, self.logits, row))
                if request.output is None and depth < len(drafts) and drafts[depth] == token:
                    accepted.append(n)
                    self.num_accepted[n] += 1
            depth, going = depth + 1, accepted
        if any(self.drafts):
            self.runner.accept(sequences_of(self.sampled), self.num_accepted)
        return events

    def _draw_at_once(self) -> list[int] | None:
        """A token after each row of the logits; None where rules want to know the one before."""
        drawn = None if self.launched is None else self.launched()
        for request in self.sampled:
            request.num_in_flight -= 1
        if self.logits is None or any(request.rules is not None for request in self.sampled):
            return drawn
        draws = [
            request.next_draw(ahead=depth)
            for request, drafts in zip(self.sampled, self.drafts, strict=True)
            for depth in range(1 + len(drafts))
        ]
        return sample(self.logits, draws)

    def _draw(self, going: Sequence[int], rows: Sequence[int]) -> list[int]:
        """The next token of some of ``sampled``, from these rows and by their own rules."""
        assert self.logits is not None
        requests = [self.sampled[n] for n in going]
        logits = _ruled(self.logits[rows], requests)
        return sample(logits, [request.next_draw() for request in requests])


def may_launch(rows: Rows) -> bool:
    """Whether no request of a step needs the host between its tokens."""
    return not any(request.needs_host for request, _ in rows)


def is_decode(rows: Rows) -> bool:
    """Whether a step runs one token of each request, and no image."""
    return all(num_new == 1 and not request.shows_images(1) for request, num_new in rows)


def launch(runner: Runner, rows: Rows) -> InFlight:
    """Start a step that samples on the device, without waiting for it.

    Args:
        runner: holds the sequences.
        rows: that ``may_launch``.
    """
    places, decodes = _sampled(rows), is_decode(rows)
    draws: list[Draw | None] = [None] * len(rows)
    for row in places:
        draws[row] = rows[row][0].next_draw()
    launched = runner.launch(
        sequences_of(request for request, _ in rows),
        [request.missing(num_new) for request, num_new in rows],
        draws,
        positions=_positions(rows),
        embeds=_embeds(rows),
    )

    def drawn() -> list[int]:
        tokens = launched.result()
        return [tokens[row] for row in places]

    return _started(runner, rows, places, is_decode=decodes, launched=drawn)


def run(runner: Runner, rows: Rows, drafts: Drafts | None = None) -> InFlight:
    """Run a step whose tokens the host draws.

    Args:
        runner: holds the sequences.
        rows: of the step.
        drafts: of each row, if it has any; all of them ``is_decode`` then.
    """
    places, decodes = _sampled(rows), is_decode(rows)
    tried = [()] * len(rows) if drafts is None else drafts
    logits = _logits(runner, rows, tried, places)
    return _started(runner, rows, places, is_decode=decodes, drafts=tried, logits=logits)


def _sampled(rows: Rows) -> list[int]:
    """The rows whose histories a step completes."""
    return [
        row
        for row, (request, num_new) in enumerate(rows)
        if request.num_held + num_new == request.num_tokens
    ]


def _started(
    runner: Runner,
    rows: Rows,
    places: Sequence[int],
    *,
    is_decode: bool,
    drafts: Drafts | None = None,
    launched: Callable[[], list[int]] | None = None,
    logits: Tensor | None = None,
) -> InFlight:
    """A step whose sequences hold its tokens now; those at ``places`` expect one of it."""
    for request, _ in rows:
        if request.images is not None:
            request.images.passed(request.sample, request.num_held)
    sampled = tuple(rows[row][0] for row in places)
    for request in sampled:
        request.num_in_flight += 1
    return InFlight(
        runner=runner,
        requests=tuple(request for request, _ in rows),
        sampled=sampled,
        drafts=[() if drafts is None else drafts[row] for row in places],
        launched=launched,
        logits=logits,
        is_decode=is_decode,
    )


def sequences_of(requests: Iterable[Request]) -> list[HeldSequence]:
    """The sequences of the requests of a step, which all have one."""
    sequences = []
    for request in requests:
        assert request.sequence is not None
        sequences.append(request.sequence)
    return sequences


def _positions(rows: Rows) -> Tensor | None:
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


def _embeds(rows: Rows) -> Embeds | None:
    """What the images of a step's requests show to its tokens; they have been loaded."""
    if all(request.images is None for request, _ in rows):
        return None
    found: list[Tensor] = []
    places: list[int] = []
    start = 0
    for request, num_new in rows:
        if request.images is not None and request.shows_images(num_new):
            own, at = request.images.rows(request.num_held, num_new)
            found.append(own)
            places += [start + place for place in at]
        start += num_new
    return Embeds(rows=torch.cat(found), places=places) if found else None


def _logits(runner: Runner, rows: Rows, drafts: Drafts, places: Sequence[int]) -> Tensor:
    """[T, vocab_size] after the last token of each row at ``places`` and each of its drafts;
    prompts that ask note their own."""
    sequences = sequences_of(request for request, _ in rows)
    first = [request.num_held for request, _ in rows]
    tokens = [
        [*request.history[held : held + num_new], *tried]
        for (request, num_new), held, tried in zip(rows, first, drafts, strict=True)
    ]
    lengths = list(map(len, tokens))
    positions = _positions([(request, n) for (request, _), n in zip(rows, lengths, strict=True)])
    if any(drafts):
        return runner.verify(sequences, tokens, positions=positions)
    embeds = _embeds(rows)
    if any(request.needs_prompt_logits for request, _ in rows):
        logits = runner.extend(sequences, tokens, logits="all", positions=positions, embeds=embeds)
        for (request, _), held, own in zip(rows, first, logits.split(lengths), strict=True):
            request.note_prompt(own, first=held)
        logits = logits[[end - 1 for end in accumulate(lengths)]]
    else:
        logits = runner.extend(sequences, tokens, logits="last", positions=positions, embeds=embeds)
    return logits if len(places) == len(rows) else logits[places]


def _ruled(logits: Tensor, requests: Iterable[Request]) -> Tensor:
    """[N, vocab_size] logits by each request's own rules."""
    if all(request.rules is None for request in requests):
        return logits
    ruled = logits.float().clone()
    for row, request in zip(ruled, requests, strict=True):
        if request.rules is not None:
            row.copy_(request.ruled(row))
    return ruled
