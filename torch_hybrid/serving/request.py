"""A request on its way through the engine: its options, its tokens, and its end.

Errors of one request alone (its rules on the logits, its text) are caught here and end that
request; the others of the batch continue.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from torch_hybrid.sampling import (
    NOT_FINITE,
    Draw,
    LogitsRules,
    RandomNumbers,
    Sampling,
    TokenLogprob,
    logprobs_of,
)
from torch_hybrid.sampling.grammar import Matcher
from torch_hybrid.serving.detokenizer import Detokenizer, Tokenizer

if TYPE_CHECKING:
    from torch_hybrid.caches.adapter import Adapter
    from torch_hybrid.caches.sequence import Sequence as HeldSequence
    from torch_hybrid.serving.images import Images

FinishReason = Literal["length", "stop", "cancelled", "timeout", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A finished request."""

    index: int  # index of the prompt in its call
    sample: int = 0  # index among the ``Sampling.n`` outputs of that prompt
    prompt: list[int]
    tokens: list[int]  # generated, a stop token at the end included
    text: str | None  # None without a tokenizer; ends before a stop text or stop token
    finish_reason: FinishReason
    num_cached_tokens: int = 0  # prompt tokens that came from the prefix cache
    # Tokens that came as drafts; outputs are equal whether or not some did.
    num_accepted_drafts: int = field(default=0, compare=False)
    error: str | None = None  # set when finish_reason is "error"
    logprobs: list[TokenLogprob] | None = None  # of ``tokens``, where they were asked for
    prompt_logprobs: list[TokenLogprob] | None = None  # of ``prompt[1:]``: nothing precedes the 1st


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """A prompt on its way through the engine: a ``scheduler.Job``. Only the engine changes it."""

    index: int
    sample: int = 0
    prompt: list[int]
    sampling: Sampling
    stop_token_ids: frozenset[int]
    tokenizer: Tokenizer | None
    detokenizer: Detokenizer | None
    numbers: RandomNumbers | None
    rules: LogitsRules | None
    matcher: Matcher | None = None
    history: list[int]  # prompt and generated tokens, as far as the host knows them
    packed: array[int]  # the prompt, of type "q"
    is_queued: bool = False  # or was
    num_in_flight: int = 0  # steps under way that sample a token
    num_passes: int = 0  # see ``scheduler.Job``
    message_end: int | None = None  # tokens of the prompt before the generation prompt
    num_cached_tokens: int | None = None  # prompt tokens from the prefix cache, at the first start
    num_accepted_drafts: int = 0
    num_restarts: int = 0  # steps that raised while the request ran
    is_finite: bool = True  # no step had NaN or infinite logits after its tokens
    deadline: float = math.inf  # by time.monotonic, in seconds
    images: Images | None = None  # of the prompt, shared by its samples
    adapter_name: str | None = None
    adapter: Adapter | None = None  # from the time that the request is queued
    sequence: HeldSequence | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    failure: str | None = None  # what it raised in this step
    output: Output | None = None
    on_event: Callable[[TokenEvent], object] | None = None  # this request's reader
    others: tuple[Request, ...] = ()  # of the first of ``Sampling.n``: the rest
    greedy: Draw = field(init=False)  # where sampling needs no random numbers
    most_held: int = field(init=False)  # tokens; the last token is never run

    def __post_init__(self) -> None:
        self.greedy = Draw(self.sampling)
        self.most_held = len(self.prompt) + self.sampling.max_new_tokens - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens to hold: the history, and tokens that steps under way sample."""
        return min(len(self.history) + self.num_in_flight, self.most_held)

    @property
    def num_held(self) -> int:
        """Number of tokens that the request's sequence holds."""
        return 0 if self.sequence is None else self.sequence.num_tokens

    @property
    def tokens(self) -> list[int]:
        """Tokens generated so far."""
        return self.history[len(self.prompt) :]

    @property
    def samples(self) -> tuple[Request, ...]:
        """All requests of ``Sampling.n`` if this is the first, else this request alone."""
        return (self, *self.others)

    @property
    def path(self) -> array[int]:
        """History of type "q" for the prefix cache; hashes of images replace placeholders.

        Paths of different adapters differ from the first number on.
        """
        prompt = self.packed if self.images is None else self.images.path
        path = prompt + array("q", self.tokens)
        if self.adapter is not None:
            path[0] ^= self.adapter.number << 40  # no token id is as large
        return path

    @property
    def needs_prompt_logits(self) -> bool:
        """True while log-probabilities of prompt tokens are asked for and not complete."""
        asked = self.sampling.prompt_logprobs is not None
        return asked and len(self.prompt_logprobs) < len(self.prompt) - 1

    @property
    def needs_host(self) -> bool:
        """True if the host must see each token before the next one is drawn."""
        sampling = self.sampling
        if self.rules is not None or self.matcher is not None or sampling.logprobs is not None:
            return True
        return sampling.prompt_logprobs is not None and self.needs_prompt_logits

    def shows_images(self, count: int) -> bool:
        """Tell whether any of the next ``count`` tokens to run is an image placeholder."""
        return self.images is not None and self.images.are_needed(self.num_held, count)

    def load_images(self, count: int) -> str | None:
        """Load the images of the next ``count`` tokens; return the error of the tower, if any."""
        if self.images is None or not self.shows_images(count):
            return None
        try:
            self.images.load()
        except Exception as error:  # from the tower, by the inputs of a caller's processor
            return _told("the tower", error)
        return None

    def missing(self, count: int) -> list[int] | None:
        """Return the next ``count`` tokens to run; None if a step under way still samples them."""
        if self.num_held == len(self.history):
            return None
        return self.history[self.num_held : self.num_held + count]

    def next_draw(self, *, ahead: int = 0) -> Draw:
        """Choose how to draw the token that comes ``ahead`` tokens after those in flight."""
        if self.numbers is None:
            return self.greedy
        return Draw(self.sampling, self.numbers[self._num_sampled + ahead])

    @property
    def _num_sampled(self) -> int:
        """Number of generated tokens, those in flight included."""
        return len(self.history) - len(self.prompt) + self.num_in_flight

    def note_prompt(self, logits: Tensor, first: int) -> None:
        """Record log-probabilities of prompt tokens, once each even if they run again.

        Args:
            logits: [R, vocab_size] after the tokens at ``first`` to ``first + R - 1``.
            first: position of the first of them.
        """
        if not self.needs_prompt_logits:
            return
        start = len(self.prompt_logprobs) + 1  # the next token to note, by those before it
        end = min(first + logits.shape[0] + 1, len(self.prompt))
        if start < end and first < start:
            rows = logits[start - 1 - first : end - 1 - first]
            num_top = self.sampling.prompt_logprobs or 0
            self.prompt_logprobs += logprobs_of(rows, self.prompt[start:end], num_top)

    def ruled(self, logits: Tensor) -> Tensor:
        """Apply the request's own rules to logits [vocab_size]; an error ends it in ``take``."""
        if self.rules is None:
            return logits
        try:
            return self.rules.apply(logits, self.history)
        except Exception as error:  # from the caller's own function
            self.failure = _told("the rules on its logits", error)
            return logits.float()

    def take(self, token: int, logits: Tensor | None, row: int) -> TokenEvent:
        """Append a token, and end the request if this token ends it.

        Args:
            token: the token's id.
            logits: [N, vocab_size] with the request's own ``row``; None where none are needed.
            row: row of the logits.
        """
        if self.failure is not None:
            return self.end("error", error=self.failure)
        if self.matcher is not None and (failed := self.matcher.error) is not None:
            return self.end("error", error=f"the grammar cannot go on: {failed}")
        if token == NOT_FINITE:
            error = f"the logits after {len(self.history)} tokens have NaN or infinite values"
            if self.matcher is not None:
                error += ", or rules bar all that the grammar allows"
            elif self.rules is not None:
                error += ", or rules bar all tokens"
            return self.end("error", error=error)
        self.history.append(token)
        if self.sampling.logprobs is not None and logits is not None:
            self.logprobs += logprobs_of(logits[row : row + 1], [token], self.sampling.logprobs)
        if token in self.stop_token_ids:
            return self.end("stop", token=token)
        text = ""
        if self.detokenizer is not None:
            try:
                text = self.detokenizer.add(token)
            except Exception as error:  # from the caller's tokenizer
                return self.end("error", token=token, error=_told("detokenizing", error))
            if self.detokenizer.is_stopped:
                return self.end("stop", token=token, text=text)
        if self.matcher is not None:
            self.matcher.advance(self.history)
            if self.matcher.is_finished and not self._may_end:
                return self.end("stop", token=token, text=text)
        if len(self.history) - len(self.prompt) == self.sampling.max_new_tokens:
            return self.end("length", token=token, text=text)
        return self._tell(TokenEvent(self, token, text))

    @property
    def _may_end(self) -> bool:
        """True if a token that ends the request may come next."""
        num_tokens = len(self.history) - len(self.prompt)
        return bool(self.stop_token_ids) and num_tokens >= self.sampling.min_new_tokens

    def end(
        self,
        reason: FinishReason,
        *,
        token: int | None = None,
        text: str = "",
        error: str | None = None,
    ) -> TokenEvent:
        """Set the request's output. The request holds its sequence until it is retired."""
        try:
            rest, whole = self._last_text(token)
        except Exception as raised:  # from the caller's tokenizer
            rest = "" if self.detokenizer is None else self.detokenizer.flush()
            whole = "" if self.detokenizer is None else self.detokenizer.text
            if reason != "error":
                reason, error = "error", _told("detokenizing", raised)
        if reason == "length" and self.detokenizer is not None and self.detokenizer.is_stopped:
            reason = "stop"  # by a stop text in what was held back until now
        sampling = self.sampling
        self.output = Output(
            index=self.index,
            sample=self.sample,
            prompt=self.prompt,
            tokens=self.tokens,
            text=whole,
            finish_reason=reason,
            num_cached_tokens=self.num_cached_tokens or 0,
            num_accepted_drafts=self.num_accepted_drafts,
            error=error,
            logprobs=None if sampling.logprobs is None else self.logprobs,
            prompt_logprobs=None if sampling.prompt_logprobs is None else self.prompt_logprobs,
        )
        return self._tell(TokenEvent(self, token, text + rest, self.output))

    def _last_text(self, token: int | None) -> tuple[str, str | None]:
        """Return the text that the detokenizer held back, and the whole text."""
        if self.detokenizer is not None:
            rest = self.detokenizer.finish()
            return rest, self.detokenizer.text
        if self.tokenizer is None:
            return "", None
        shown = self.tokens[:-1] if token in self.stop_token_ids else self.tokens
        return "", self.tokenizer.decode(shown, skip_special_tokens=True)

    def _tell(self, event: TokenEvent) -> TokenEvent:
        """Hand an event to the request's reader; if that raises, the request ends unread."""
        if self.on_event is None:
            return event
        try:
            self.on_event(event)
        except Exception as raised:  # from the caller's own function
            self.on_event, error = None, _told("on_event", raised)
            if event.output is None:
                return self.end("error", token=event.token, text=event.text, error=error)
            self.output = replace(event.output, finish_reason="error", error=error)
            return replace(event, output=self.output)
        return event


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One more token of a request, or its end."""

    request: Request
    token: int | None  # None: the request ended without one
    text: str  # text that became final with it; the pieces add up to the output's text
    output: Output | None = None  # set by a request's last event


def _told(what: str, error: Exception) -> str:
    return f"{what} raised {type(error).__name__}: {error}"
