"""A step between its start and its tokens: how an engine runs ahead of the device.

    flight = launch(step n)               planned and sent; its tokens stay on the device
    next   = launch(step n + 1)           rows whose last token is not known yet take it there
    flight.finish()                       waits for step n; requests take their tokens

A request does not run ahead if the host must act between its tokens: rules on the logits,
log-probabilities, grammars, drafts. Its step is ``run``, and finishes before another starts. A
request may end while its next step is under way: it ignores that step's token. Its sequence is
freed when that step finishes.

Sequences hold the committed tokens of a step as soon as it starts. They hold accepted drafts only
when it finishes:

    for each request, after its last committed token:
        draw the next token from the logits there, as without drafts
        continue while it equals the draft

Each token is the model's own draw, with the random number of its place in the output. A draft only
spares a step where it equals that token, so outputs are the same with and without drafts, for each
seed. A draft of probability p is accepted with probability p; a rejected one is replaced by the
drawn token. That is speculative sampling for deterministic drafts.
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
from torch_hybrid.sampling.grammar import apply_masks, make_masks
from torch_hybrid.serving.request import Request, TokenEvent

if TYPE_CHECKING:
    from torch_hybrid.caches.sequence import Sequence as HeldSequence
    from torch_hybrid.graphs.runner import Runner

Rows = Sequence[tuple[Request, int]]  # each request, and how many of its missing tokens run
Drafts = Sequence[Sequence[int]]  # of each row, verified after the row's last token


@dataclass(slots=True, kw_only=True)
class InFlight:
    """A started step.

    Attributes:
        runner: holds the sequences.
        requests: whose sequences the step reads and writes.
        sampled: requests that get tokens from the step, in the order of those tokens.
        drafts: the drafts of each request of ``sampled``.
        launched: waits for one token per request, drawn on the device; None where the host draws.
        logits: [T, vocab_size] after the last committed token and after each draft, per request of
            ``sampled``; None where the device draws.
        masks: [T, W] int32 on the host, what grammars allow after each; None without grammars.
        is_decode: whether the step runs one token of each request, and no image.
        num_accepted: accepted drafts of each request of ``sampled``, once the step has finished.
    """

    runner: Runner
    requests: tuple[Request, ...]
    sampled: tuple[Request, ...]
    drafts: Drafts
    launched: Callable[[], list[int]] | None = None
    logits: Tensor | None = None
    masks: Tensor | None = None
    is_decode: bool = False
    num_accepted: list[int] = field(default_factory=list)

    @property
    def was_launched(self) -> bool:
        """True if the next step can start before the host knows this step's tokens."""
        return self.launched is not None

    @property
    def ended(self) -> list[Request]:
        """Requests of the step that have ended."""
        return [request for request in self.requests if request.output is not None]

    def finish(self) -> list[TokenEvent]:
        """Give tokens to the requests that have not ended meanwhile, and commit accepted drafts."""
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
                    request.num_accepted_drafts += 1
            depth, going = depth + 1, accepted
        if any(self.drafts):
            self.runner.accept(sequences_of(self.sampled), self.num_accepted)
        return events

    def _draw_at_once(self) -> list[int] | None:
        """Draw a token after each row of the logits.

        None where a request's rules need its previous token first.
        """
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
        logits = self.logits if self.masks is None else apply_masks(self.logits, self.masks)
        return sample(logits, draws)

    def _draw(self, going: Sequence[int], rows: Sequence[int]) -> list[int]:
        """Draw the next token of some requests of ``sampled`` from these rows, with their rules."""
        assert self.logits is not None
        requests = [self.sampled[n] for n in going]
        logits = _ruled(self.logits[rows], requests)
        if self.masks is not None:
            logits = apply_masks(logits, self.masks[rows])
        return sample(logits, [request.next_draw() for request in requests])


def may_launch(rows: Rows) -> bool:
    """Tell whether no request of a step needs the host between its tokens."""
    return not any(request.needs_host for request, _ in rows)


def is_decode(rows: Rows) -> bool:
    """Tell whether a step runs one token of each request, and no image."""
    return all(num_new == 1 and not request.shows_images(1) for request, num_new in rows)


def launch(runner: Runner, rows: Rows) -> InFlight:
    """Start a step that samples on the device, without waiting for it.

    Args:
        runner: holds the sequences.
        rows: rows of the step, for which ``may_launch`` is true.
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
        rows: rows of the step.
        drafts: drafts of each row, if any; ``is_decode(rows)`` is true then.
    """
    places, decodes = _sampled(rows), is_decode(rows)
    tried = [()] * len(rows) if drafts is None else drafts
    logits = _logits(runner, rows, tried, places)
    masks = make_masks([(rows[row][0].matcher, tried[row]) for row in places])  # a GPU still runs
    return _started(
        runner, rows, places, is_decode=decodes, drafts=tried, logits=logits, masks=masks
    )


def _sampled(rows: Rows) -> list[int]:
    """Find the rows whose histories a step completes."""
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
    masks: Tensor | None = None,
) -> InFlight:
    """Record a step that has started; requests at ``places`` each get a token from it."""
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
        masks=masks,
        is_decode=is_decode,
    )


def sequences_of(requests: Iterable[Request]) -> list[HeldSequence]:
    """List the sequences of a step's requests, which all have one."""
    sequences = []
    for request in requests:
        assert request.sequence is not None
        sequences.append(request.sequence)
    return sequences


def _positions(rows: Rows) -> Tensor | None:
    """Join the rotary positions [3, T] of a step's tokens; None where each is the token's index."""
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
    """Gather the image rows of a step; the images are loaded already."""
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
    """Run a step: logits [T, vocab_size] after the last token and each draft of ``places``.

    Requests that ask for log-probabilities of their prompts record them here.
    """
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
    """Apply each request's own rules to its row of logits [N, vocab_size]."""
    if all(request.rules is None for request in requests):
        return logits
    ruled = logits.float().clone()
    for row, request in zip(ruled, requests, strict=True):
        if request.rules is not None:
            row.copy_(request.ruled(row))
    return ruled
