"""Compiler of grammars for one tokenizer, by llguidance.

llguidance refuses by name each keyword of a schema that it cannot hold to. Of the 383 groups in
JSON Schema's own suite of tests it compiles 168, and accepts no invalid value under any of them.
xgrammar compiles 359, and accepts invalid values under 156 to 182 of those without saying so.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.sampling.grammar.grammar import Grammar
from torch_hybrid.sampling.grammar.matcher import Matcher, Vocabulary
from torch_hybrid.sampling.grammar.trial import TRIAL
from torch_hybrid.sampling.grammar.worker import Worker

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_KEPT = 64  # compiled or refused grammars
_STEP_ITEMS = 10_000  # of the parser in one step: about half a millisecond
_COMPLETE = "<|grammar complete|>"
_Key = tuple[str, str, bool]


@runtime_checkable
class FastTokenizer(Protocol):
    """A tokenizer of transformers that runs in Rust."""

    @property
    def backend_tokenizer(self) -> _Backend: ...


class _Backend(Protocol):
    def to_str(self) -> str: ...


class Compiler:
    """Maker of matchers; keeps the latest compiled grammars. Threads that submit requests share it.

    Args:
        tokenizer: the engine's.
        vocab_size: number of the model's logits, padding included.

    Raises:
        UnsupportedError: llguidance is missing, or cannot read the tokenizer.
        ValueError: there is no tokenizer, or it has more tokens than the model.
    """

    def __init__(self, tokenizer: object, vocab_size: int) -> None:
        self._lock, self._compiling = Lock(), Lock()
        self._vocabulary = _vocabulary(tokenizer, vocab_size)
        self._compiled: OrderedDict[_Key, LLMatcher | str] = OrderedDict()  # or why it is refused

    def matcher(
        self, grammar: Grammar, *, num_prompt: int, end_token_ids: frozenset[int]
    ) -> Matcher:
        """Make the matcher of one request, and compile its grammar if that is not kept.

        One grammar compiles at a time, in milliseconds. ``trial`` bounds what may take hours.

        Args:
            grammar: grammar of the output.
            num_prompt: tokens of the prompt.
            end_token_ids: tokens within the vocabulary that end the request.

        Raises:
            ValueError: the grammar is wrong, asks for what is not supported, or takes too long.
        """
        compiled = self._compiled_or_refused(grammar)
        if isinstance(compiled, str):
            raise ValueError(compiled)
        return Matcher(
            compiled.deep_copy(),
            self._vocabulary,
            num_prompt=num_prompt,
            end_token_ids=end_token_ids,
            after=tuple(
                self._vocabulary.tokenizer.tokenize_str(grammar.after or "", parse_special=True)
            ),
        )

    def _compiled_or_refused(self, grammar: Grammar) -> LLMatcher | str:
        """Find a grammar, or compile it; those that are kept do not wait for others."""
        key = grammar.kind, grammar.text, grammar.whitespace
        if (kept := self._kept(key)) is not None:
            return kept
        with self._compiling:
            if (kept := self._kept(key)) is not None:
                return kept
            try:
                made: LLMatcher | str = self._compile(grammar)
            except ValueError as error:
                made = str(error)
        with self._lock:
            self._compiled[key] = made
            if len(self._compiled) > MAX_KEPT:
                self._compiled.popitem(last=False)
        return made

    def _kept(self, key: _Key) -> LLMatcher | str | None:
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
            return self._compiled.get(key)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        source = _unforced(_source(grammar))
        if (fault := TRIAL.fault(source)) is not None:
            raise _refusal(grammar, fault)
        limits = LLParserLimits(
            step_max_items=_STEP_ITEMS, precompute_large_lexemes=False, verbose_errors=False
        )
        compiled = LLMatcher(self._vocabulary.tokenizer, source, log_level=0, limits=limits)
        if compiled.is_error():
            raise _refusal(grammar, compiled.get_error())
        return compiled


def _refusal(grammar: Grammar, why: str) -> ValueError:
    return ValueError(f"the grammar ({grammar.kind}) is refused: {why.strip()}")


def _source(grammar: Grammar) -> str:
    """Write a grammar in the form of llguidance."""
    from llguidance import LLMatcher, grammar_from

    try:
        if grammar.kind == "json_schema":
            schema = json.loads(grammar.text)
            if not isinstance(schema, dict):
                raise ValueError(f"a schema must be an object, got {grammar.text[:40]!r}")
            # The schema cannot ask for leniency itself, by "x-guidance".
            return LLMatcher.grammar_from_json_schema(
                schema,
                overrides={
                    "whitespace_flexible": grammar.whitespace,
                    "lenient": False,
                    "coerce_one_of": False,
                },
            )
        return grammar_from(grammar.kind, grammar.text)
    except (ValueError, RecursionError) as error:
        raise _refusal(grammar, str(error)) from None


def _unforced(source: str) -> str:
    """Have llguidance force no tokens where one text alone can follow.

    It would encode that text, and fail where the tokenizer reads a special token in it.
    """
    lark = {"lark_grammar": source}
    [inner] = json.loads(source)["grammars"] if source.startswith("{") else [lark]
    outer = {"lark_grammar": '%llguidance {"no_forcing": true}\nstart: @inner'}
    return json.dumps({"grammars": [outer, {**inner, "name": "inner"}]})


def _vocabulary(tokenizer: object, vocab_size: int) -> Vocabulary:
    """Read a tokenizer, with one more token: its bit is set where a grammar is complete."""
    try:
        import llguidance  # noqa: F401
        from tokenizers import Tokenizer
    except ImportError as error:
        raise UnsupportedError(
            f"grammars need {error.name}: pip install 'torch-hybrid[serve]'"
        ) from None
    if tokenizer is None:
        raise ValueError("a grammar needs the engine's tokenizer, got none")
    if not isinstance(tokenizer, FastTokenizer):
        raise UnsupportedError(
            f"grammars need a fast tokenizer of transformers, got {type(tokenizer).__name__}"
        )
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    num_tokens = backend.get_vocab_size()
    if num_tokens > vocab_size:
        raise ValueError(
            f"a grammar needs a tokenizer of at most the model's {vocab_size} tokens, got "
            f"{num_tokens}"
        )
    backend.add_special_tokens([_COMPLETE])
    complete = backend.token_to_id(_COMPLETE)
    assert complete is not None
    return Vocabulary(
        tokenizer=_read(backend.to_str(), max(vocab_size, complete + 1), complete),
        worker=Worker(),
        complete=complete,
    )


def _read(tokenizer: str, num_tokens: int, complete: int) -> LLTokenizer:
    from llguidance import LLTokenizer

    try:
        return LLTokenizer(tokenizer, n_vocab=num_tokens, eos_token=complete)
    except ValueError as error:
        raise UnsupportedError(f"grammars cannot read the tokenizer: {error}") from None
