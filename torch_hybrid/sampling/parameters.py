"""Sampling options of a request, checked when they are made, so that no step can fail on them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from torch_hybrid.errors import PromptTooLongError
from torch_hybrid.sampling.generation_config import (
    DEFAULT_MAX_NEW_TOKENS,
    counts_prompt,
    fields_of,
    not_followed,
)
from torch_hybrid.sampling.grammar.grammar import Grammar

LogitsProcessor = Callable[[Sequence[int], Tensor], Tensor]

_SEEDS = range(-(2**63), 2**64)  # what torch.Generator takes


@runtime_checkable
class HasGenerationConfig(Protocol):
    """Interface of a model that ``Sampling.of`` reads."""

    @property
    def generation_config(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Options of a request: how its tokens are chosen, and when it ends.

    The defaults are greedy, 64 tokens, whatever the checkpoint says; ``Sampling.of(model)`` reads
    its ``generation_config``. Rules on the logits are applied in the order of transformers'
    ``generate``: repetition, presence and frequency penalty, bias, ``min_new_tokens``,
    ``logits_processor``, then temperature, top-k, top-p, min-p.

    Args:
        max_new_tokens: the most tokens generated.
        min_new_tokens: until this many tokens are generated, tokens that end a request are barred;
            stop texts still end it.
        max_length: the most tokens of prompt and output together; None is any number. It applies
            beside ``max_new_tokens``.
        min_length: like ``min_new_tokens``, for prompt and output together; the larger of the two
            applies, up to the most tokens.
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: the number of likeliest tokens to draw from; 0 is all of them.
        top_p: the likeliest tokens that reach this probability together; 1 is all of them.
        min_p: tokens at least this likely, as a fraction of the likeliest; 0 is all of them.
        repetition_penalty: divides positive and multiplies negative logits of every token of the
            prompt and the output; 1 changes nothing.
        presence_penalty: subtracted from the logit of every token of the output.
        frequency_penalty: subtracted from a token's logit once for each occurrence in the output.
        logit_bias: by token id, added to the token's logit; ``-inf`` bars the token.
        logits_processor: called as ``processor(tokens, logits)`` before each draw, with the prompt
            and output so far and a float32 copy of the row, [vocab_size], on the model's device;
            returns logits of that shape. If it raises, only its own request ends.
        grammar: grammar that the output follows (needs a tokenizer, and llguidance); other tokens
            are barred after all rules. The first request of a grammar compiles it, on the thread
            that makes the request.
        logprobs: number of likeliest tokens to report beside each generated one, with natural
            log-probabilities from the model's own logits, before any rule; None reports nothing.
        prompt_logprobs: like ``logprobs``, for the tokens of the prompt.
        seed: 64-bit seed that makes draws repeatable; by default from torch's global generator.
        n: number of outputs of each prompt, with seeds ``seed``, ``seed + 1``, ...
        stop_token_ids: tokens that end the request, besides the model's own.
        stop: texts that end the request (needs a tokenizer); the output ends before them.
        ignore_eos: continue past the model's own end-of-sequence tokens.

    Raises:
        TypeError: a value of a wrong type.
        ValueError: a value out of its range.
    """

    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    min_new_tokens: int = 0
    max_length: int | None = None
    min_length: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logits_processor: LogitsProcessor | None = None
    grammar: Grammar | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    n: int = 1
    stop_token_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check_int(self, "max_new_tokens", at_least=1)
        _check_int(self, "min_new_tokens", at_least=0)
        _check_int(self, "min_length", at_least=0)
        if self.max_length is not None:
            _check_int(self, "max_length", at_least=2)
        _check_int(self, "top_k", at_least=0)
        _check_int(self, "n", at_least=1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(self, name, at_least=0)
        short = self.min_new_tokens <= self.max_new_tokens
        expected = f"at most max_new_tokens = {self.max_new_tokens}"
        _check("min_new_tokens", expected, self.min_new_tokens, short)
        _check_float(self, "temperature", "finite and at least 0", lambda value: value >= 0)
        _check_float(self, "top_p", "within (0, 1]", lambda value: 0 < value <= 1)
        _check_float(self, "min_p", "within [0, 1]", lambda value: 0 <= value <= 1)
        # Within these, logits stay finite.
        _check_float(
            self, "repetition_penalty", "within [1e-6, 1e6]", lambda value: 1e-6 <= value <= 1e6
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _check_float(self, name, "within [-1e6, 1e6]", lambda value: abs(value) <= 1e6)
        self._check_seed()
        self._check_ends()
        _set(self, "logit_bias", _checked_bias(self.logit_bias))
        if self.logits_processor is not None and not callable(self.logits_processor):
            raise _wrong_type("logits_processor", "a callable or None", self.logits_processor)
        if not isinstance(self.grammar, Grammar | None):
            raise _wrong_type("grammar", "a th.Grammar or None", self.grammar)

    def _check_seed(self) -> None:
        if self.seed is None:
            return
        _check_int(self, "seed")
        ends = self.seed in _SEEDS and self.seed + self.n - 1 in _SEEDS
        _check("seed", "a 64-bit integer, as are those of all n outputs", self.seed, ends)

    def _check_ends(self) -> None:
        if not isinstance(self.ignore_eos, bool):
            raise _wrong_type("ignore_eos", "True or False", self.ignore_eos)
        _check("stop", "a list of texts", self.stop, not isinstance(self.stop, str))
        stop = _checked_tuple("stop", self.stop, str)
        _check("stop", "made of texts that are not empty", self.stop, "" not in stop)
        _set(self, "stop", stop)
        ids = _checked_tuple("stop_token_ids", self.stop_token_ids, Integral)
        _check("stop_token_ids", "at least 0 each", ids, all(token >= 0 for token in ids))
        _set(self, "stop_token_ids", tuple(map(int, ids)))

    @classmethod
    def of(cls, model: HasGenerationConfig, **changes: Any) -> Self:
        """Read the options of the checkpoint's ``generation_config``, with ``changes``.

        They are read as transformers' ``generate`` reads them: greedy without ``do_sample``, with
        it a default ``top_k`` of 50. Tokens that end a sequence are the engine's ``eos_token_ids``.

        A warning names three kinds of fields: those that only ``generate`` follows, unknown ones,
        and lengths that count the prompt (``max_length`` and ``min_length``, which are followed).
        """
        config = model.generation_config
        fields = fields_of(config, changes)
        said = [f"asks for {', '.join(names)}: ignored"] if (names := not_followed(config)) else []
        if counted := counts_prompt(fields, changes):
            said.append(f"counts the prompt in {', '.join(counted)}")
        if said:
            warnings.warn(f"generation_config {'; it '.join(said)}", stacklevel=2)
        return cls(**fields)

    def for_prompt(self, num_tokens: int) -> Self:
        """Convert lengths that include the prompt into lengths of the output of one prompt.

        Raises:
            PromptTooLongError: the prompt leaves no token of ``max_length``.
        """
        if self.max_length is None and not self.min_length:
            return self
        most = self.max_new_tokens
        if self.max_length is not None:
            most = min(most, self.max_length - num_tokens)
            if most < 1:
                raise PromptTooLongError(
                    f"max_length must be more than the {num_tokens} tokens of the prompt, which it "
                    f"counts, got {self.max_length}",
                    num_tokens,
                )
        least = min(most, max(self.min_new_tokens, self.min_length - num_tokens))
        return replace(
            self, max_new_tokens=most, min_new_tokens=least, max_length=None, min_length=0
        )

    @property
    def filters(self) -> bool:
        """True if the draw is from less than the whole vocabulary."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def make_generator(self, sample: int = 0) -> torch.Generator | None:
        """Make the random generator of one of the ``n`` outputs; None if it draws greedily."""
        if self.temperature == 0:
            return None
        if self.seed is None:
            drawn = torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu")
            return torch.Generator("cpu").manual_seed(int(drawn))
        return torch.Generator("cpu").manual_seed(self.seed + sample)


def _set(sampling: Sampling, name: str, value: object) -> None:
    object.__setattr__(sampling, name, value)


def _check(name: str, expected: str, got: object, holds: bool) -> None:
    if not holds:
        raise ValueError(f"{name} must be {expected}, got {got!r}")


def _wrong_type(name: str, expected: str, got: object) -> TypeError:
    return TypeError(f"{name} must be {expected}, got {got!r}")


def _check_int(sampling: Sampling, name: str, *, at_least: int | None = None) -> None:
    value = getattr(sampling, name)
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise _wrong_type(name, "an integer", value)
    _set(sampling, name, int(value))
    if at_least is not None:
        _check(name, f"at least {at_least}", value, int(value) >= at_least)


def _check_float(
    sampling: Sampling, name: str, expected: str, holds: Callable[[float], bool]
) -> None:
    value = getattr(sampling, name)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _wrong_type(name, "a number", value)
    number = float(value)
    _set(sampling, name, number)
    _check(name, expected, value, math.isfinite(number) and holds(number))


def _checked_tuple(name: str, values: Any, kind: type) -> tuple[Any, ...]:
    if not isinstance(values, Sequence | set | frozenset):
        raise _wrong_type(name, "a list", values)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, kind):
            what = "texts" if kind is str else "token ids"
            raise _wrong_type(name, f"made of {what}", value)
    return tuple(values)


def _checked_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise _wrong_type("logit_bias", "a mapping from token id to a number", bias)
    for token, value in bias.items():
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise _wrong_type("logit_bias", "a mapping from token id to a number", bias)
        if isinstance(value, bool) or not isinstance(value, Real):
            raise _wrong_type("logit_bias", "a mapping from token id to a number", bias)
        _check("logit_bias", "made of token ids of at least 0", token, int(token) >= 0)
        _check("logit_bias", "at most 1e6 for each token", value, value <= 1e6)
    return {int(token): float(value) for token, value in bias.items()}


GREEDY = Sampling()
