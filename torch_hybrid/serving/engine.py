"""Engine: continuous batching on top of a runner; prompts in, tokens out.

A step ends overdue requests and runs the next batch (``step_loop``). If anything raises during a
step, every page and slot comes back: running requests wait again and are recomputed from their
tokens. An error of one request (its own rules on the logits, its text) ends that request alone.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, TypeVar, get_args, overload

from torch_hybrid.errors import CapacityError, UnsupportedError
from torch_hybrid.graphs.turn import HasTurn, Turn, in_turn
from torch_hybrid.host.ints import check_int
from torch_hybrid.host.shown import Shown
from torch_hybrid.host.surroundings import in_isolation
from torch_hybrid.sampling import GREEDY, Sampling
from torch_hybrid.serving.detokenizer import Tokenizer
from torch_hybrid.serving.intake import Intake
from torch_hybrid.serving.prefix_cache import PrefixCache, Prefixes
from torch_hybrid.serving.prompts import Processor, Prompt, as_prompts
from torch_hybrid.serving.readers import OnEvent, reader_of
from torch_hybrid.serving.request import Output, Request, TokenEvent
from torch_hybrid.serving.scheduler import Scheduler
from torch_hybrid.serving.speculation import DraftCounts, Speculation, Speculator
from torch_hybrid.serving.stats import EngineStats
from torch_hybrid.serving.step_loop import StepLoop
from torch_hybrid.serving.stream import Stream

if TYPE_CHECKING:
    import asyncio

    from torch_hybrid.caches.adapter import Adapter
    from torch_hybrid.graphs.runner import Runner

ResultT = TypeVar("ResultT")
RunAhead = Literal["auto", "on", "off"]


class Engine(Shown):
    """Server of many requests on one runner.

    Requests are served in order of arrival; one that waits for pages is passed by smaller ones, a
    bounded number of times (``scheduler.MAX_PASSES``). Several threads may submit, cancel and step:
    each call waits for the runner's lock, which a step holds from its schedule to its tokens.

    Callbacks, model hooks, signal handlers and finalizers may run inside a step. They may submit
    and cancel requests and close streams, which takes effect when the step ends; ``stats`` works at
    once. ``step``, ``close`` and the other methods raise RuntimeError there.

    Args:
        runner: holds the sequences; its other users, other engines among them, may hold some too.
        tokenizer: allows prompts to be texts and outputs to have text; stop texts need it.
        eos_token_ids: tokens that end every request which does not ignore them; by default those of
            the runner's model.
        max_waiting: the most requests that may wait for their first step; None is any number.
        run_ahead: "on" starts each step before the host knows the tokens of the previous step, so
            the host plans while the device computes. An ended request is then in one more step, and
            ignores its token. Tokens are the same, but for what other company changes (see
            ``Runner``). Requests with rules on their logits or log-probabilities do not run ahead.
            "auto" is on where steps are captured in CUDA graphs.
        prefix_cache: keep the states and pages of requests, so that requests with the same prefix
            run only the rest. True is ``PrefixCache()``. States take the runner's
            ``max_snapshots``, and pages are kept as long as no sequence needs them. ``close`` gives
            both back.
        processor: the checkpoint's processor, of transformers. It encodes conversations, whose
            messages may have images if the model was loaded with ``vision=True``. Its tokenizer is
            used if no other is given.
        speculate: draft tokens, and verify several of them in one step; the runner needs
            ``max_drafts``. Tokens are the same as without, but for what other company changes.
            Steps that may have drafts do not run ahead.
        adapters: folders of adapters (LoRA), by the names under which requests ask for them; the
            runner needs ``max_adapters``. See ``Runner.load_adapter``.

    Raises:
        TypeError: an argument is of another kind.
        UnsupportedError: the runner serves decode steps alone.
        ValueError: ``max_waiting`` or ``run_ahead`` has a value that it cannot have. Or the model
            has states and the runner keeps no snapshots, or ``speculate`` asks for more drafts than
            the runner holds.
    """

    @in_isolation
    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Iterable[int] | None = None,
        *,
        max_waiting: int | None = None,
        run_ahead: RunAhead = "auto",
        prefix_cache: bool | PrefixCache = False,
        processor: Processor | None = None,
        speculate: Speculation | None = None,
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
    ) -> None:
        if not isinstance(runner, HasTurn):
            raise TypeError(f"runner must be a th.Runner, got {type(runner).__name__}")
        for name, given in (("tokenizer", tokenizer), ("processor", processor)):
            if isinstance(given, str | os.PathLike):
                raise TypeError(
                    f"{name} must be one of transformers, as Auto{name.title()}.from_pretrained("
                    f"path) makes, or None, got {given!r}"
                )
        if not isinstance(eos_token_ids, Iterable | None):
            raise TypeError(f"eos_token_ids must be a list of tokens, got {eos_token_ids!r}")
        if max_waiting is not None:
            check_int("max_waiting", max_waiting)
        if max_waiting is not None and max_waiting < 1:
            raise ValueError(f"max_waiting must be at least 1 or None, got {max_waiting}")
        if run_ahead not in get_args(RunAhead):
            raise ValueError(f"run_ahead must be 'auto', 'on' or 'off', got {run_ahead!r}")
        if not isinstance(prefix_cache, bool | PrefixCache):
            raise TypeError(
                f"prefix_cache must be True, False or a th.PrefixCache, got {prefix_cache!r}"
            )
        if not isinstance(speculate, Speculation | None):
            raise TypeError(f"speculate must be a th.Speculation or None, got {speculate!r}")
        if not isinstance(adapters, Mapping | None):
            raise TypeError(f"adapters must map names to folders, got {adapters!r}")
        if not runner.prefill:
            raise UnsupportedError("an engine prefills prompts, got a runner with prefill=False")
        if tokenizer is None and processor is not None:
            tokenizer = processor.tokenizer
        self.runner = runner
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(
            runner.eos_token_ids if eos_token_ids is None else eos_token_ids
        )
        for token in self.eos_token_ids:
            check_int("each of eos_token_ids", token)
        self.max_waiting = max_waiting
        self.runs_ahead = run_ahead == "on" or (run_ahead == "auto" and runner.captures)
        within = runner.within()  # its calls are part of a step that is in progress
        self._prefixes: Prefixes | None = None
        if prefix_cache:
            options = PrefixCache() if prefix_cache is True else prefix_cache
            self._prefixes = Prefixes(within, options)
        self._speculator = None if speculate is None else Speculator(speculate, within)
        self._intake = Intake(
            runner,
            tokenizer,
            self.eos_token_ids,
            processor=processor,
            finds_messages=bool(prefix_cache),
        )
        self._scheduler: Scheduler[Request] = Scheduler(
            max_tokens=runner.max_tokens, page_size=runner.page_size, starts=self._prefixes
        )
        self._loop = StepLoop(
            within,
            self._scheduler,
            prefixes=self._prefixes,
            speculator=self._speculator,
            runs_ahead=self.runs_ahead,
        )
        self._arriving: deque[Request] = deque()  # queued, not yet handed to the scheduler
        self._next_deadline = math.inf  # the earliest deadline of all requests
        self._seconds = 0.0
        for name, folder in (adapters or {}).items():
            self.load_adapter(name, folder)

    def facts(self) -> Mapping[str, str]:
        """Choose the counts of ``stats`` and the model's name for ``repr``."""
        return {"runner": type(self.runner.model).__name__, **self.stats().facts()}

    @property
    def turn(self) -> Turn:
        """Turn that all users of the runner share."""
        return self.runner.turn

    @overload
    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] = ...,
        *,
        stream: Literal[False] = ...,
        timeout_s: float | None = ...,
        adapter: str | Sequence[str | None] | None = ...,
    ) -> Stream[Output]: ...

    @overload
    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] = ...,
        *,
        stream: Literal[True],
        timeout_s: float | None = ...,
        adapter: str | Sequence[str | None] | None = ...,
    ) -> Stream[TokenEvent]: ...

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] = GREEDY,
        *,
        stream: bool = False,
        timeout_s: float | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> Stream[Output] | Stream[TokenEvent]:
        """Serve prompts together; yield each output as its request finishes.

        Leaving the loop early, Ctrl-C included, cancels unfinished requests and frees them; so does
        ``close`` of the stream.

        Args:
            prompts: one prompt or several: token lists or 1-D integer tensors; with a tokenizer,
                texts, conversations (lists of messages), or what a tokenizer returned for them.
                With a processor, parts of messages may be images:
                ``{"type": "image", "image": ...}`` (of Pillow, or a path), or OpenAI's
                ``image_url``. What a processor returned is a prompt too. Parts and keys that are
                not understood are refused.
            sampling: one for all prompts, or one for each.
            stream: yield an event for each token instead; a request's last event has its output.
            timeout_s: seconds from the first iteration after which an unfinished request ends with
                the tokens that it has.
            adapter: name of a loaded adapter for all prompts, or one for each; None: the base.

        Raises:
            TypeError: a prompt or ``sampling`` is of another kind; nothing has been started then.
            ValueError: a prompt cannot be served, or an adapter is not loaded; nothing has been
                started then.
            CapacityError: while iterating: more requests than may wait, or sequences held elsewhere
                leave no room, or requests want more adapters than the runner has slots.
        """
        chosen = as_prompts(prompts)
        samplings = [sampling] * len(chosen) if not isinstance(sampling, Sequence) else sampling
        if len(samplings) != len(chosen):
            raise ValueError(f"sampling must have {len(chosen)} entries, got {len(samplings)}")
        adapters = adapter
        if isinstance(adapters, str) or not isinstance(adapters, Sequence):
            adapters = [adapters] * len(chosen)
        if len(adapters) != len(chosen):
            raise ValueError(f"adapter must have {len(chosen)} entries, got {len(adapters)}")
        _check_timeout(timeout_s)
        requests: list[Request] = []
        of_prompts = zip(chosen, samplings, adapters, strict=True)
        for index, (prompt, each, name) in enumerate(of_prompts):
            try:
                requests += self._intake.requests(
                    prompt, each, index=index, stream=stream, adapter=name
                )
            except (TypeError, ValueError) as error:
                kind = TypeError if isinstance(error, TypeError) else ValueError
                raise kind(f"prompt {index}: {error}") from error
        serve = partial(
            Stream,
            requests,
            turn=self.turn,
            queue=partial(self._queue, requests, timeout_s),
            step=self.step,
            abandon=self._abandon,
        )
        return serve(pick=_event) if stream else serve(pick=_output)

    def submit(
        self,
        prompt: Prompt,
        sampling: Sampling = GREEDY,
        *,
        stream: bool = False,
        timeout_s: float | None = None,
        on_event: OnEvent | None = None,
        queue: asyncio.Queue[TokenEvent] | None = None,
        adapter: str | None = None,
    ) -> Request:
        """Queue one prompt; ``step`` then returns its events, and its output with the last one.

        With ``Sampling(n=3)``, the request returned is the first of three: see its ``samples``.

        Args:
            prompt: one prompt, as ``generate`` takes it.
            sampling: how tokens are chosen and when the request ends.
            stream: give events their text as it comes (costs a decode for each token).
            timeout_s: seconds after which the request ends with the tokens that it has.
            on_event: called with each event, by the thread that steps and inside the step:
                ``queue.SimpleQueue().put`` wakes a thread that waits. If it raises, its request
                ends.
            queue: gets each event in the event loop that runs where ``submit`` is called. For event
                loops of other threads, use ``on_event``.
            adapter: name of a loaded adapter; None: the base.

        Returns:
            The request; its ``output`` is set when it ends.

        Raises:
            TypeError: the prompt, ``sampling``, ``on_event`` or ``queue`` is of another kind.
            ValueError: the prompt is empty, holds an unknown token or, with ``max_new_tokens``, is
                longer than a sequence can be; texts are used without a tokenizer; the grammar is
                wrong, or asks for more than is supported; the queue is bounded, no event loop runs,
                or there are two readers; or the adapter is not loaded.
            UnsupportedError: grammars need a package that is missing, or another tokenizer.
            CapacityError: ``max_waiting`` requests wait already, or others use all slots of
                adapters.
        """
        _check_timeout(timeout_s)
        reader = reader_of(on_event, queue)
        first = self.prepare(prompt, sampling, stream=stream, adapter=adapter)
        for request in first.samples:
            request.on_event = reader
        self._queue(first.samples, timeout_s)
        return first

    def prepare(
        self,
        prompt: Prompt,
        sampling: Sampling = GREEDY,
        *,
        stream: bool = False,
        adapter: str | None = None,
    ) -> Request:
        """Encode and check one prompt as ``submit`` does, without queueing it.

        It waits for no step, so threads of a server can encode prompts while another one steps.

        Args:
            prompt: one prompt, as ``generate`` takes it.
            sampling: how tokens are chosen and when the request ends.
            stream: give events their text as it comes.
            adapter: name of a loaded adapter; None: the base.

        Returns:
            The request, for one call of ``enqueue``.

        Raises:
            TypeError: the prompt or ``sampling`` is of another kind.
            ValueError: the prompt cannot be served; see ``submit``.
        """
        first, *others = self._intake.requests(
            prompt, sampling, index=0, stream=stream, adapter=adapter
        )
        first.others = tuple(others)
        return first

    def encode(self, prompt: Prompt) -> list[int]:
        """Encode one prompt as ``submit`` does; it may be longer than what can be served.

        Raises:
            TypeError: the prompt is of another kind.
            ValueError: the prompt cannot be encoded; see ``submit``.
        """
        return self._intake.encode(prompt)

    def enqueue(self, requests: Iterable[Request]) -> None:
        """Queue prepared requests with all their samples, or none; ``step`` returns their events.

        Raises:
            CapacityError: with these, more than ``max_waiting`` requests would wait, or requests
                want more adapters than the runner has slots.
            ValueError: an adapter was unloaded meanwhile, or a request was queued before.
        """
        self._queue([sample for first in requests for sample in first.samples], None)

    def cancel(self, request: Request) -> None:
        """End a request with the tokens it has, at once or when the step in progress ends.

        A finished request stays as it is.

        Raises:
            ValueError: the request belongs to another engine.
        """
        with self.turn.lock:
            if request.output is not None:
                return
            if request not in self._scheduler and request not in self._arriving:
                raise ValueError(f"request {request.index} is not one of this engine's")
            self.turn.soon(partial(self._cancel, request))

    @property
    def has_unfinished(self) -> bool:
        """True if a step would do any work."""
        return self._loop.has_unfinished or bool(self._arriving)

    @in_turn
    def step(self) -> list[TokenEvent]:
        """Run one batch and return its events; none if there is nothing to do.

        Where the engine runs ahead, the next batch is under way when ``step`` returns. An exception
        leaves the engine usable: running requests wait to be recomputed.

        Raises:
            CapacityError: sequences held elsewhere leave no room for the oldest request.
            RuntimeError: a step of the runner is in progress on this thread.
        """
        begun = time.monotonic()
        events = self._or_restart(self._advance)
        self._seconds += time.monotonic() - begun
        return self._loop.take_late_events() + events

    def _advance(self) -> list[TokenEvent]:
        self._end_late()
        return self._loop.advance()

    def _or_restart(self, change: Callable[[], ResultT]) -> ResultT:
        """Run ``change``; if it raises, all unfinished requests wait to be recomputed."""
        try:
            return change()
        except BaseException:
            self._loop.restart()
            raise

    def stats(self) -> EngineStats:
        """Count work done and work waiting, prefix cache and drafts included."""
        runner = self.runner
        with self.turn.lock:
            return EngineStats(
                num_running=len(self._scheduler.running),
                num_waiting=len(self._scheduler.waiting),
                num_steps=self._loop.num_steps,
                num_tokens=self._loop.num_tokens,
                num_preemptions=self._loop.num_preemptions,
                seconds=self._seconds,
                free_slots=runner.free_slots,
                num_pages=runner.max_seq_len // runner.page_size,
                free_pages=runner.free_pages,
                prefix_cache=None if self._prefixes is None else self._prefixes.stats,
                drafts=DraftCounts() if self._speculator is None else self._speculator.counts,
            )

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded adapters."""
        return self.runner.adapters

    def load_adapter(self, name: str, folder: str | os.PathLike[str]) -> None:
        """Load an adapter (LoRA) from a folder, between two steps; see ``Runner.load_adapter``."""
        self.runner.load_adapter(name, folder)

    def unload_adapter(self, name: str) -> None:
        """Forget a loaded adapter, between two steps.

        Raises:
            ValueError: no adapter of that name is loaded, or unfinished requests have it.
            UnsupportedError: the runner has ``max_adapters=0``.
        """
        self.runner.unload_adapter(name)

    def adapters_in_use(self) -> set[Adapter]:
        """List the adapters of unfinished requests, which stay resident."""
        requests = (*self._arriving, *self._scheduler.running, *self._scheduler.waiting)
        return {request.adapter for request in requests if request.adapter is not None}

    @in_turn
    def save_prefixes(self, path: str | os.PathLike[str]) -> int:
        """Write the prefix cache to a file, for ``load_prefixes`` of another process.

        Where ranks share the model, each writes a file of its own.

        Returns:
            The number of prefixes written.

        Raises:
            ValueError: the engine has no prefix cache.
            OSError: the file cannot be written.
        """
        return self._prefixes_for("save_prefixes").save(Path(path))

    @in_turn
    def load_prefixes(self, path: str | os.PathLike[str]) -> int:
        """Load the prefixes of a file into host memory, up to ``PrefixCache.host_bytes``.

        Returns:
            The number of prefixes kept.

        Raises:
            ValueError: the engine has no prefix cache; or the file is damaged, or of another model,
                page size or rank. Nothing is kept then.
            OSError: the file cannot be read.
        """
        return self._prefixes_for("load_prefixes").load(Path(path))

    def _prefixes_for(self, what: str) -> Prefixes:
        if self._prefixes is None:
            raise ValueError(f"{what} needs an engine with a prefix_cache")
        return self._prefixes

    @in_turn
    def close(self) -> None:
        """Cancel all unfinished requests, and free them and the prefix cache."""
        self._or_restart(self._close)

    def _close(self) -> None:
        unfinished = [*self._scheduler.running, *self._scheduler.waiting]
        self._loop.end_outside(unfinished, "cancelled")
        self._loop.finish_all()
        if self._prefixes is not None:
            self._prefixes.clear()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _queue(self, requests: Sequence[Request], timeout_s: float | None) -> None:
        """Queue requests, all or none; their timeouts start now."""
        names = {r.adapter_name: None for r in requests if r.adapter_name is not None}
        read = self.runner.read_evicted(names) if names else {}  # no step waits for it
        with self.turn.lock:
            if len({*requests}) < len(requests) or any(each.is_queued for each in requests):
                raise ValueError("a request is queued once: prepare another one")
            num_waiting = len(self._scheduler.waiting) + len(self._arriving)
            if self.max_waiting is not None and num_waiting + len(requests) > self.max_waiting:
                raise CapacityError(
                    f"{num_waiting} requests wait already and {len(requests)} more "
                    f"came: at most max_waiting = {self.max_waiting} may wait"
                )
            if names:
                used = self.runner.use_adapters(names, self, read)
                adapters = {each.name: each for each in used}
                for request in requests:
                    if request.adapter_name is not None:
                        request.adapter = adapters[request.adapter_name]
            if timeout_s is not None:
                deadline = time.monotonic() + timeout_s
                for request in requests:
                    request.deadline = deadline
            for request in requests:
                request.is_queued = True
            self._arriving += requests
            self.turn.soon(self._arrive)

    def _arrive(self) -> None:
        """Hand queued requests to the scheduler; an interrupted one is cancelled."""
        while self._arriving:
            request = self._arriving[0]
            try:
                self._next_deadline = min(self._next_deadline, request.deadline)
                if self._prefixes is not None:
                    self._prefixes.add(request)
                self._scheduler.add(request)
            except BaseException:
                self._loop.end_outside([request], "cancelled")
                raise
            finally:
                self._arriving.popleft()

    def _cancel(self, request: Request) -> None:
        if request.output is None:
            self._or_restart(partial(self._loop.end_outside, [request], "cancelled"))

    def _abandon(self, requests: Sequence[Request]) -> None:
        """End requests that nobody waits for."""

        def end() -> None:
            left = [request for request in requests if request.output is None]
            for request in left:
                request.end("cancelled")
            self._loop.retire(left)
            if not (self._scheduler.running or self._scheduler.waiting):
                self._loop.finish_all()  # nobody else would

        self._or_restart(end)

    def _end_late(self) -> None:
        """End the requests whose deadline has passed."""
        now = time.monotonic()
        if now < self._next_deadline:
            return
        requests = (*self._scheduler.running, *self._scheduler.waiting)
        late = [request for request in requests if request.deadline <= now]
        self._loop.end_outside(late, "timeout")
        self._next_deadline = min((r.deadline for r in requests if r not in late), default=math.inf)


def _check_timeout(timeout_s: float | None) -> None:
    if timeout_s is not None and not (isinstance(timeout_s, Real) and timeout_s > 0):
        raise ValueError(f"timeout_s must be above 0 or None, got {timeout_s!r}")


def _event(event: TokenEvent) -> TokenEvent:
    return event


def _output(event: TokenEvent) -> Output | None:
    return event.output
