"""Stepping thread: it alone touches the engine, beside the event loop that talks to clients.

The loop hands it actions through a queue. The thread does them between steps, and sleeps on the
queue while no request is left. The events of a step reach the loop in one call.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Thread

from torch_hybrid.errors import CapacityError, UnsupportedError
from torch_hybrid.host.frames import with_room
from torch_hybrid.http.call import Call
from torch_hybrid.http.errors import HttpError
from torch_hybrid.http.metrics import Metrics
from torch_hybrid.http.ranks import Leader, RanksError, steps_of
from torch_hybrid.sampling import GREEDY, Sampling
from torch_hybrid.sampling.parameters import HasGenerationConfig
from torch_hybrid.serving.engine import Engine
from torch_hybrid.serving.request import Request, TokenEvent
from torch_hybrid.serving.stats import EngineStats

SHARE = 0.05  # most of the loop's time that deliveries take: tokens of faster steps come together
REST_S = 0.03  # longest time between two deliveries
MOST_FAULTS = 3  # steps that raise one after the other until the server counts as ill
LOG = logging.getLogger(__name__)


class Stepper:
    """Thread of an engine, and the event loop's side of it.

    Args:
        open_engine: makes the engine, in the thread; it may load and compile.
        name: served name of the model, for metrics.
        logs: whether each call is logged.

    Attributes:
        loaded: done when the model is loaded; with the error, if it cannot be.
        ended: done when the thread has ended; with the error that ended it, if any.
        metrics: metrics, which see each event before its call does.
        defaults: the checkpoint's sampling, once the model is loaded.
    """

    def __init__(self, open_engine: Callable[[], Engine], name: str, *, logs: bool = False) -> None:
        self.loaded: Future[None] = Future()
        self.ended: Future[None] = Future()
        self.metrics, self.defaults = Metrics(name, self._stats, logs=logs), GREEDY
        self._open_engine = open_engine
        self._calls: dict[Request, Call] = {}  # the loop's: calls that are open
        self._heard: list[TokenEvent] = []  # the loop's: to be delivered
        self._rests = False  # the loop's: after a delivery
        # The thread's: the engine, on all ranks that share it, and the requests that it holds.
        self._engine: Engine | None = None
        self._steps: Engine | Leader
        self._live: set[Request] = set()
        self._actions: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._num_faults, self._is_closing = 0, False

    @property
    def engine(self) -> Engine:
        """The engine.

        Raises:
            HttpError: it is not ready yet, or the thread has ended.
        """
        if self._engine is None or self.ended.done():
            raise HttpError(503, f"the server is not ready: {self.illness}", code="not_ready")
        return self._engine

    @property
    def illness(self) -> str | None:
        """Reason why the server cannot serve now, if any."""
        if self.ended.done():
            return f"the stepping thread ended: {self.ended.exception()!r}"
        if not self.loaded.done():
            return "loading the model"
        faults = f"the last {self._num_faults} steps raised errors"
        return faults if self._num_faults >= MOST_FAULTS else None

    @property
    def num_open(self) -> int:
        """Number of requests whose clients wait."""
        return len(self._calls)

    def start(self) -> None:
        """Start the thread, for the event loop that runs here."""
        self._loop = asyncio.get_running_loop()
        Thread(target=with_room, args=[self._run], name="stepping", daemon=True).start()

    async def close(self) -> None:
        """Cancel what is left and end the thread, unless it still loads."""
        if self.loaded.done():
            self._actions.put(self._close)
            await asyncio.gather(asyncio.wrap_future(self.ended), return_exceptions=True)

    def open(self, call: Call) -> None:
        """Queue the requests of a call; its inbox gets their events, or an error."""
        self._calls |= dict.fromkeys(call.requests, call)
        self._actions.put(lambda: self._enqueue(call))

    def leave(self, call: Call) -> None:
        """Forget a call; requests of it that have not ended are cancelled between two steps."""
        for request in call.requests:
            self._calls.pop(request, None)
        if any(request.output is None for request in call.requests):
            self._actions.put(lambda: self._cancel(call.requests))
        self.metrics.left(call)

    def _hear(self, events: list[TokenEvent]) -> None:
        """Pass events on at once or, soon after others, with those that come meanwhile."""
        self._heard += events
        if not self._rests:
            self._deliver()

    def _deliver(self) -> None:
        """Hand out what was heard; rest then, the longer the more it cost."""
        begun, events, self._heard = time.thread_time(), self._heard, []
        self._rests = bool(events)
        if events:
            grouped: dict[Request, list[TokenEvent]] = {}
            for event in events:
                grouped.setdefault(event.request, []).append(event)
            for request, own in grouped.items():
                if (call := self._calls.get(request)) is not None:
                    self.metrics.saw(call, request, own)
                    call.put(request, own)
            self._loop.call_soon(self._rest, begun)  # when the calls that woke have sent

    def _rest(self, begun: float) -> None:
        cost = time.thread_time() - begun
        self._loop.call_later(min(cost / SHARE, REST_S), self._deliver)

    def _fail(self, requests: Iterable[Request], error: HttpError) -> None:
        for call in {self._calls[request] for request in requests if request in self._calls}:
            call.fail(error)

    def _stats(self) -> EngineStats | None:
        return None if self._engine is None else self._engine.stats()

    # In the thread.

    def _tell(self, hear: Callable[..., object], *args: object) -> None:
        self._loop.call_soon_threadsafe(hear, *args)

    def _run(self) -> None:
        try:
            engine = self._open_engine()
            self._steps = steps_of(engine)
            if isinstance(model := engine.runner.model, HasGenerationConfig):
                self.defaults = Sampling.of(model)
            self._engine = engine
            self.loaded.set_result(None)
            while not self._is_closing:
                self._act(may_sleep=not engine.has_unfinished)
                self._step()
        except BaseException as error:
            if not self.loaded.done():
                self.loaded.set_exception(error)
            self.ended.set_exception(error)
            self._tell(self._fail, self._calls, HttpError(500, str(self.illness)))
        else:
            self.ended.set_result(None)

    def _act(self, *, may_sleep: bool) -> None:
        """Do all actions that have come; if the thread may sleep, wait for the first one."""
        if may_sleep:
            self._actions.get()()
        while True:
            try:
                action = self._actions.get_nowait()
            except Empty:
                return
            action()

    def _step(self) -> None:
        """Run a step. If it raises, the requests that ran fail, and others go on."""
        try:
            events = self._steps.step()
        except RanksError:
            raise
        except Exception as error:  # of a kernel, of memory, of a bug: the server outlives it
            LOG.exception("a step raised")
            self._num_faults += 1
            hit = [r for r in self._live if r.num_restarts or r.output is not None]
            hit = hit or list(self._live)  # else the same step would be tried for ever
            self._tell(self._fail, hit, HttpError(500, f"a step raised {type(error).__name__}"))
            self._cancel(hit)
            return
        if events:
            self._num_faults = 0 if any(e.token is not None for e in events) else self._num_faults
            self._live -= {event.request for event in events if event.output is not None}
            self._tell(self._hear, events)

    def _enqueue(self, call: Call) -> None:
        try:
            self._steps.enqueue(call.firsts)
        except CapacityError as full:
            self._tell(call.fail, HttpError(429, str(full), code="queue_full"))
        except (UnsupportedError, ValueError) as refused:
            self._tell(call.fail, HttpError(400, str(refused)))
        else:
            self._live |= set(call.requests)

    def _cancel(self, requests: Sequence[Request]) -> None:
        for request in self._live.intersection(requests):
            self._steps.cancel(request)
        self._live -= {request for request in requests if request.output is not None}

    def _close(self) -> None:
        self._is_closing = True
        self._steps.close()
        self._tell(self._fail, self._calls, HttpError(503, "the server is stopping"))
