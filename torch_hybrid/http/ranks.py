"""Commands to an engine that ranks share: rank 0 sends them before each step, so all run the same.

Rank 0 alone talks to clients and looks at clocks. Other ranks do what it did, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_hybrid.http.splitting import show_special
from torch_hybrid.sampling import RandomNumbers, Sampling
from torch_hybrid.sampling.grammar.trial import TRIAL
from torch_hybrid.serving.engine import Engine
from torch_hybrid.serving.prompts import Prompt
from torch_hybrid.serving.request import Request, TokenEvent

IDLE = timedelta(days=365)  # longest time without a step; a rank that dies ends the wait at once


class RanksError(RuntimeError):
    """Error of a step that ranks share: they may differ after it, so the server ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """A prompt with its samples, numbered from ``number`` on, and the seeds of those that draw."""

    number: int
    prompt: Prompt  # tokens, with the inputs of the tower where it has images
    sampling: Sampling
    seeds: Sequence[int | None]
    has_text: bool
    has_special: bool
    message_end: int | None
    adapter: str | None


# A prompt that is queued, the number of a request that is cancelled, or the end of the server.
Command = Queued | int | None


def steps_of(engine: Engine) -> Engine | Leader:
    """Choose how an engine is stepped: with the other ranks if they share its model."""
    ranks = engine.runner.model.ranks
    return engine if ranks is None or ranks.size == 1 else Leader(engine)


class Leader:
    """Rank 0's engine, which sends what was done to it before it steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._group = engine, _make_group()
        self._commands: list[Command] = []
        self._numbers: dict[Request, int] = {}
        self._next = 0

    def enqueue(self, requests: Iterable[Request]) -> None:
        """Queue prepared requests on all ranks, or none.

        Raises:
            CapacityError: more requests than may wait.
        """
        firsts = list(requests)
        for first in firsts:
            _share_masks(first, self._group, makes=True)
        self._engine.enqueue(firsts)
        for first in firsts:
            self._commands.append(_queued(first, self._next))
            for sample in first.samples:
                self._numbers[sample] = self._next
                self._next += 1

    def cancel(self, request: Request) -> None:
        """Cancel a request on all ranks."""
        self._engine.cancel(request)
        if request in self._numbers:
            self._commands.append(self._numbers.pop(request))

    def step(self) -> list[TokenEvent]:
        """Run a step on all ranks.

        Raises:
            RanksError: it failed, or a rank is gone.
        """
        try:
            commands, self._commands = self._commands, []
            dist.broadcast_object_list([commands], src=0, group=self._group)
            events = self._engine.step()
        except Exception as error:
            raise RanksError(f"a step of the ranks failed: {error}") from error
        for event in events:
            if event.output is not None:
                self._numbers.pop(event.request, None)
        return events

    def close(self) -> None:
        """Cancel all requests; the next step ends the other ranks."""
        self._engine.close()
        self._commands.append(None)


@dataclass(frozen=True, slots=True)
class SharedMasks:
    """Exchange of masks: rank 0 makes them, whose limit of time holds for all; see ``Shared``."""

    group: dist.ProcessGroup
    makes: bool

    def send(self, masks: Tensor, errors: list[str | None]) -> list[str | None]:
        """Send rank 0's masks and errors to the others."""
        box: list[Any] = [masks, errors]
        dist.broadcast_object_list(box, src=0, group=self.group)
        made, told = box
        masks.copy_(made)
        return list(told)


def follow(engine: Engine) -> None:
    """Do what rank 0 does to its engine, until it closes.

    Args:
        engine: made as rank 0's; it is closed at the end.

    Raises:
        RuntimeError: a step failed, or a rank is gone.
    """
    group, held = _make_group(), dict[int, Request]()
    is_open, TRIAL.is_needed = True, False  # rank 0 tries grammars
    while is_open:
        box: list[Sequence[Command]] = [()]
        dist.broadcast_object_list(box, src=0, group=group)
        for command in box[0]:
            if command is None:
                is_open = False
                engine.close()
            elif isinstance(command, Queued):
                first = _made(command, engine)
                _share_masks(first, group, makes=False)
                engine.enqueue([first])
                held |= {command.number + at: each for at, each in enumerate(first.samples)}
            elif command in held:
                engine.cancel(held.pop(command))
        ended = {event.request for event in engine.step() if event.output is not None}
        held = {number: request for number, request in held.items() if request not in ended}


def _queued(first: Request, number: int) -> Queued:
    images, text = first.images, first.detokenizer
    prompt = images and {"input_ids": [first.prompt], **images.inputs}
    return Queued(
        number=number,
        prompt=prompt or first.prompt,
        sampling=first.sampling,
        seeds=[None if each.numbers is None else each.numbers.seed for each in first.samples],
        has_text=text is not None,
        has_special=text is not None and not text.hides_special,
        message_end=first.message_end,
        adapter=first.adapter_name,
    )


def _made(queued: Queued, engine: Engine) -> Request:
    """Make the request that rank 0 queued."""
    first = engine.prepare(
        queued.prompt, queued.sampling, stream=queued.has_text, adapter=queued.adapter
    )
    if queued.has_special:
        show_special(first)
    for sample, seed in zip(first.samples, queued.seeds, strict=True):
        if seed is not None:
            sample.numbers = RandomNumbers(torch.Generator().manual_seed(seed))
        sample.message_end = queued.message_end
    return first


def _share_masks(request: Request, group: dist.ProcessGroup, *, makes: bool) -> None:
    if request.matcher is not None:
        request.matcher.vocabulary.worker.shared = SharedMasks(group, makes)


def _make_group() -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=IDLE)
    assert isinstance(group, dist.ProcessGroup)
    return group
