"""Grammars through an engine: what finishes is valid, with drafts and without, beside anybody."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Any

import jsonschema
import pytest
import torch

import torch_hybrid as th
from tests.models.mtp_checkpoint import make_checkpoint
from tests.sampling.grammar.schemas import make_schemas
from tests.serving.fake_runner import FakeRunner
from tests.serving.speculation.drafters import Knowing
from tests.test_fresh_process import run
from tests.tiny_tokenizers import EVERY_KIND, byte_level
from torch_hybrid.sampling.grammar import compiler, masks, trial, worker
from torch_hybrid.sampling.grammar.compiler import Compiler

TOKENIZER = byte_level()
VOCAB_SIZE = 320  # of the model, which pads that of the tokenizer
END = 0
SCHEMAS = make_schemas(200)
PROMPTS = [[1 + index % 300, index // 300 + 1] for index in range(len(SCHEMAS))]
JSON = th.Grammar.json_object()
ENDLESS = th.Grammar.json_schema(
    {
        "allOf": [
            {"type": "string", "pattern": "^(.*a.{20,200}.*b.{30,300}c)*$"},
            {"pattern": "^(.*x.{20,200}.*y.{30,300}z)*$"},
        ]
    }
)


def engine(**options: Any) -> th.Engine:
    sizes = {"max_seqs": 32, "max_tokens": 256, "num_pages": 4096, "vocab_size": VOCAB_SIZE}
    speculate = options.pop("speculate", None)
    runner = FakeRunner(**{**sizes, **options})
    return th.Engine(runner, TOKENIZER, eos_token_ids=[END], speculate=speculate)


def drafting(plain: list[th.Output], share: float = 0.8, **options: Any) -> th.Engine:
    """An engine whose drafts are mostly those of these outputs."""

    def known(request: th.Request) -> list[int]:
        return next(
            o.tokens for o in plain if (o.index, o.sample) == (request.index, request.sample)
        )

    drafter = Knowing(known, share=share, vocab_size=VOCAB_SIZE)
    speculate = th.Speculation(drafter, num_drafts=4, adapts=False)
    return engine(max_drafts=4, speculate=speculate, **options)


def served(by: th.Engine, prompts: list[list[int]], samplings: Any) -> list[th.Output]:
    outputs = sorted(by.generate(prompts, samplings), key=lambda o: (o.index, o.sample))
    assert by.runner.live == []
    return outputs


def one(grammar: th.Grammar, by: th.Engine | None = None, **options: Any) -> th.Output:
    sampling = th.Sampling(**{"max_new_tokens": 40, **options}, grammar=grammar)
    [output] = served(by or engine(), [[5, 6]], sampling)
    return output


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_outputs_are_valid_with_drafts_and_without(temperature: float):
    """All schemas in one call; greedy and drawn."""
    samplings = [
        th.Sampling(
            grammar=th.Grammar.json_schema(schema),
            max_new_tokens=150,
            temperature=temperature,
            seed=index,
        )
        for index, schema in enumerate(SCHEMAS)
    ]
    plain = served(engine(), PROMPTS, samplings)
    finished = [output for output in plain if output.finish_reason == "stop"]
    assert {output.finish_reason for output in plain} <= {"stop", "length"}
    assert len(finished) > 180
    for output in finished:
        assert output.tokens[-1] == END
        validator = jsonschema.Draft202012Validator(
            SCHEMAS[output.index],
            format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER,
        )
        validator.validate(json.loads(output.text))
    assert max(max(output.tokens) for output in plain) < len(TOKENIZER)
    by = drafting(plain)
    assert served(by, PROMPTS, samplings) == plain
    assert by.stats().drafts.accepted > 1000


def test_schemas_cover_the_keywords():
    """So that the test of all schemas tests what it says."""
    text = json.dumps(SCHEMAS)
    of_types = ["type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs"]
    of_objects = ["properties", "required", "additionalProperties", "patternProperties"]
    of_arrays = ["items", "prefixItems", "minItems", "maxItems"]
    of_strings = ["minLength", "maxLength", "pattern", "format"]
    of_numbers = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]
    for name in (*of_types, *of_objects, *of_arrays, *of_strings, *of_numbers):
        assert text.count(f'"{name}"') >= 5, name


def test_preempted_and_interrupted_requests_go_on_in_their_grammar():
    grammars = [th.Grammar.regex("[0-9]{30}"), JSON, th.Grammar.regex("(ab|cd){12}"), JSON]
    samplings = [
        th.Sampling(grammar=each, max_new_tokens=40, temperature=1.0, seed=seed, n=2)
        for seed, each in enumerate(grammars)
    ]
    plain = served(engine(), PROMPTS[:4], samplings)
    tight = engine(num_pages=26)
    assert served(tight, PROMPTS[:4], samplings) == plain
    assert tight.stats().num_steps > engine().stats().num_steps

    by = drafting(plain, num_pages=60)
    by.runner.raise_at = {3: ValueError("a step"), 5: KeyboardInterrupt()}
    requests = [
        by.submit(prompt, sampling) for prompt, sampling in zip(PROMPTS[:4], samplings, strict=True)
    ]
    while by.has_unfinished:
        try:
            by.step()
        except (ValueError, KeyboardInterrupt):
            continue
    texts = [each.output.text for request in requests for each in request.samples]
    assert texts == [output.text for output in plain]
    assert re.fullmatch("[0-9]{30}", texts[0])
    assert texts[0] != texts[1]


def test_requests_without_a_grammar_get_their_own_tokens():
    free = th.Sampling(max_new_tokens=20, temperature=1.0, seed=3)
    ruled = th.Sampling(max_new_tokens=20, repetition_penalty=1.3)
    alone = served(engine(), PROMPTS[:2], [free, ruled])
    beside = served(engine(), PROMPTS[:3], [free, ruled, th.Sampling(grammar=JSON)])
    assert beside[:2] == alone


def test_the_end_comes_where_the_grammar_is_complete_and_only_there():
    fixed = th.Grammar.regex("[ab]{4}")
    assert len(one(fixed).text) == 4
    assert one(fixed).tokens[-1] == END
    open_ended = one(th.Grammar.regex("(ab)+"), min_new_tokens=21, max_new_tokens=60)
    assert len(open_ended.tokens) > 20
    assert re.fullmatch("(ab)+", open_ended.text)
    other = one(fixed, stop_token_ids=[7], ignore_eos=True)
    assert other.tokens[-1] == 7
    assert len(other.text) == 4
    # Nothing may follow, and no token may end it.
    for options in ({"ignore_eos": True}, {"min_new_tokens": 30}):
        output = one(fixed, **options)
        assert (len(output.text), output.finish_reason) == (4, "stop")
    assert one(fixed, max_new_tokens=3).finish_reason == "length"


def begin_of(tokens: Sequence[int], border: list[int]) -> int:
    """Where a grammar begins: after the first tokens that are its border."""
    ends = range(len(border), len(tokens) + 1)
    return next(end for end in ends if [*tokens[end - len(border) : end]] == border)


@pytest.mark.parametrize("length", [1, 2])
def test_a_grammar_begins_after_its_tokens(length: int):
    """With drafts across the border; before it tokens are free, and none ends the request."""
    grammar = th.Grammar.choice(["yes", "no", "größer"], after="<|user|>" * length)
    border = TOKENIZER.convert_tokens_to_ids("<|user|>")
    samplings = [
        th.Sampling(
            grammar=grammar, max_new_tokens=200, temperature=1.0, seed=seed, logit_bias=bias
        )
        for seed in range(12 * length)
        for bias in ({}, {border: 4.0, END: 6.0})[length - 1 :]
    ]
    plain = served(engine(), PROMPTS[:24], samplings)
    ended = [output for output in plain if output.finish_reason == "stop"]
    assert len(ended) >= 12
    for output in ended:
        begun = begin_of(output.tokens, [border] * length)
        assert TOKENIZER.decode(output.tokens[begun:-1]) in ("yes", "no", "größer")
        assert output.tokens.count(END) == 1
    assert max(begin_of(output.tokens, [border] * length) for output in ended) > 4 + length
    by = drafting(plain, share=0.95)
    assert served(by, PROMPTS[:24], samplings) == plain
    assert by.stats().drafts.accepted > 100


def test_a_grammar_holds_whatever_rules_say():
    lots = one(
        th.Grammar.regex("[0-9]{8}"),
        repetition_penalty=2.0,
        logits_processor=lambda tokens, logits: torch.zeros_like(logits),
        logprobs=2,
    )
    assert re.fullmatch("[0-9]{8}", lots.text)
    digits = {token: -math.inf for token in range(VOCAB_SIZE)}
    barred = one(th.Grammar.regex("[0-9]"), logit_bias=digits)
    assert barred.finish_reason == "error"
    assert barred.error == (
        "the logits after 2 tokens have NaN or infinite values, or rules bar all that the grammar "
        "allows"
    )


def test_forms_and_whitespace():
    assert re.fullmatch("a[0-9]{2}", one(th.Grammar.ebnf('root ::= "a" b b\nb ::= [0-9]')).text)
    assert re.fullmatch("a[0-9]", one(th.Grammar.ebnf('start: "a" B\nB: /[0-9]/')).text)
    assert one(th.Grammar.choice(['a"b', "a\\n"])).text in ('a"b', "a\\n")
    schema = {"type": "array", "items": {"const": 1}, "minItems": 3, "maxItems": 3}
    assert one(th.Grammar.json_schema(json.dumps(schema))).text == "[1,1,1]"
    bias = {TOKENIZER.encode(" ")[0]: 50.0, END: 60.0}
    loose = one(th.Grammar.json_schema(schema, whitespace=True), logit_bias=bias).text
    assert loose.startswith("[ ")


def test_a_text_that_is_a_special_tokens_is_written_in_its_letters():
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<call>"]})
    runner = FakeRunner(max_tokens=64, num_pages=64, vocab_size=VOCAB_SIZE)
    by = th.Engine(runner, tokenizer, eos_token_ids=[END])
    for grammar, text in (
        (th.Grammar.regex("<call>a"), "<call>a"),
        (th.Grammar.ebnf('root ::= "<call>a"'), "<call>a"),
        (th.Grammar.json_schema({"const": "<call>"}), '"<call>"'),
    ):
        assert one(grammar, by).text == text


def test_a_step_of_too_much_work_ends_its_request(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiler, "_STEP_ITEMS", 100)
    slow = th.Grammar.ebnf('start: start start | "a" | start start start')
    samplings = [
        th.Sampling(grammar=slow, logit_bias={END: -50.0}),
        th.Sampling(max_new_tokens=5, ignore_eos=True),
    ]
    ended, other = served(engine(), PROMPTS[:2], samplings)
    assert ended.finish_reason == "error"
    assert ended.error.startswith("the grammar cannot go on: ")
    assert other.finish_reason == "length"


def test_a_mask_that_is_never_done_ends_requests_with_grammars(monkeypatch: pytest.MonkeyPatch):
    released = Event()
    monkeypatch.setattr(worker, "MAX_SECONDS", 0.1)
    by = engine()
    samplings = [th.Sampling(grammar=JSON), th.Sampling(max_new_tokens=5, ignore_eos=True)]
    with monkeypatch.context() as patched:
        patched.setattr(masks, "_fill", lambda *masks: released.wait())
        ended, other = served(by, PROMPTS[:2], samplings)
    released.set()
    assert ended.error == "the grammar cannot go on: a mask took too long"
    assert other.finish_reason == "length"
    assert one(th.Grammar.regex("ok"), by).text == "ok"


class Exchange:
    """Exchange of masks between two engines of this process, of which one makes them."""

    def __init__(self, sent: list[Any], *, makes: bool) -> None:
        self.makes, self._sent = makes, sent

    def send(self, masks: torch.Tensor, errors: list[str | None]) -> list[str | None]:
        if self.makes:
            self._sent.append((masks.clone(), errors))
            return errors
        made, errors = self._sent.pop(0)
        masks.copy_(made)
        return errors


@pytest.mark.parametrize("fault", ["", "slow mask", "much work"])
def test_engines_that_share_masks_end_alike(monkeypatch: pytest.MonkeyPatch, fault: str):
    """Limits of time and work hold for the maker alone, and their outcome for both."""
    sent: list[Any] = []
    if fault == "much work":
        monkeypatch.setattr(compiler, "_STEP_ITEMS", 100)
    slow = th.Grammar.ebnf('start: start start | "a" | start start start')
    samplings = [
        th.Sampling(grammar=slow if fault == "much work" else JSON, logit_bias={END: -50.0}),
        th.Sampling(grammar=th.Grammar.regex("ok")),
        th.Sampling(max_new_tokens=5, ignore_eos=True),
    ]
    engines, requests = [engine(), engine()], []
    for by, makes in zip(engines, (True, False), strict=True):
        requests.append([by.submit(*pair) for pair in zip(PROMPTS, samplings, strict=False)])
        vocabulary = requests[-1][0].matcher.vocabulary
        vocabulary.worker.shared = Exchange(sent, makes=makes)
    released = Event()
    if fault == "slow mask":
        monkeypatch.setattr(worker, "MAX_SECONDS", 0.1)
        monkeypatch.setattr(masks, "_fill", lambda *masks: released.wait())
    while engines[0].has_unfinished:
        for by in engines:
            by.step()
    released.set()
    assert sent == []
    assert not engines[1].has_unfinished
    first, second = ([request.output for request in own] for own in requests)
    assert first == second
    assert [output.finish_reason for output in first[1:]] == (
        ["error", "length"] if fault == "slow mask" else ["stop", "length"]
    )
    assert (first[0].finish_reason == "error") == bool(fault)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (th.Grammar.json_schema({"not": {}}), r'json_schema\) is refused: .*keys: \["not"\]'),
        (th.Grammar.json_schema({"type": "array", "uniqueItems": True}), '"uniqueItems"'),
        (th.Grammar.json_schema({"not": {}, "x-guidance": {"lenient": True}}), '"not"'),
        (th.Grammar.json_schema({"type": "string", "format": "smell"}), "format: smell"),
        (th.Grammar.json_schema({"type": "string", "pattern": "a(?=b)"}), "look-ahead"),
        (th.Grammar.json_schema("[]"), "a schema must be an object, got '\\[\\]'"),
        (th.Grammar.json_schema("{"), "is refused"),
        (th.Grammar.json_schema('{"a":' * 3000 + "1" + "}" * 3000), "recursion"),
        (th.Grammar.regex("(("), "unclosed group"),
        (th.Grammar.ebnf('root ::= "a" missing'), "missing"),
    ],
)
def test_what_is_refused(grammar: th.Grammar, message: str):
    by = engine()
    with pytest.raises(ValueError, match=message):
        by.submit([1], th.Sampling(grammar=grammar))
    assert one(th.Grammar.regex("ok"), by).text == "ok"


def test_a_grammar_that_takes_hours_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trial, "MAX_SECONDS", 1.0)
    by = engine()
    pairs = "/(.*a.{20,2000}.*b.{30,3000}c)*/ & /(.*x.{20,2000}.*y.{30,3000}z)*/"
    for endless in (ENDLESS, th.Grammar.ebnf(f"start: A\nA: {pairs}")):
        with pytest.raises(ValueError, match="refused: it takes too long, as patterns do"):
            by.submit([1], th.Sampling(grammar=endless))
    assert one(th.Grammar.ebnf("start: A\nA: /o./ & /.k/"), by).text == "ok"


def test_a_bounded_number_of_grammars_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiler, "MAX_KEPT", 2)
    compiled: list[str] = []
    compile_one = Compiler._compile
    monkeypatch.setattr(
        Compiler,
        "_compile",
        lambda self, grammar: compiled.append(grammar.text) or compile_one(self, grammar),
    )
    by = engine()
    for pattern in ("a", "b", "a", "c", "a", "b"):
        assert one(th.Grammar.regex(pattern), by).text == pattern
    assert compiled == ["a", "b", "c", "b"]
    for _ in range(2):  # what is refused is refused at once
        with pytest.raises(ValueError, match="unclosed group"):
            by.submit([1], th.Sampling(grammar=th.Grammar.regex("((")))
    assert compiled[4:] == ["(("]


def test_engines_that_have_no_tokenizer_to_read():
    with pytest.raises(ValueError, match="a grammar needs the engine's tokenizer, got none"):
        th.Engine(FakeRunner()).submit([1], th.Sampling(grammar=JSON))
    with pytest.raises(ValueError, match="at most the model's 50 tokens, got 292"):
        th.Engine(FakeRunner(), TOKENIZER).submit([1], th.Sampling(grammar=JSON))


@pytest.mark.parametrize("method", ["ngram", "mtp", None])
def test_a_model_gives_the_same_with_and_without_drafts(method: str | None, tmp_path: Path):
    """A real step that verifies, with a prefix cache and answers that repeat themselves."""
    make_checkpoint("qwen3_next_dense", tmp_path, vocab_size=VOCAB_SIZE)
    sizes = {"max_seqs": 4, "max_tokens": 48, "kv_tokens": 1024, "page_size": 8, "compile": False}
    plain = th.Engine(
        th.Runner(th.from_pretrained(tmp_path), **sizes), TOKENIZER, eos_token_ids=[END]
    )
    model = th.from_pretrained(tmp_path, mtp=method == "mtp")
    by = th.Engine(
        th.Runner(model, max_drafts=3, max_snapshots=8, **sizes),
        TOKENIZER,
        eos_token_ids=[END],
        prefix_cache=True,
        speculate=th.Speculation(method, num_drafts=3, adapts=False) if method else None,
    )
    schema = {"type": "array", "items": {"enum": ["ab", "cd"]}, "minItems": 6, "maxItems": 9}
    grammar = th.Grammar.json_schema(schema)
    samplings = [
        th.Sampling(grammar=grammar, max_new_tokens=60, temperature=t, seed=1) for t in (0.0, 1.0)
    ] * 2
    expected = [o.text for o in sorted(plain.generate(PROMPTS[:4], samplings), key=_index)]
    for _ in range(2):
        outputs = sorted(by.generate(PROMPTS[:4], samplings), key=_index)
        assert [output.text for output in outputs] == expected
    for text in expected:
        jsonschema.validate(json.loads(text), schema)
    counts = by.stats().drafts
    assert counts.drafted > 0 or method is None
    assert counts.accepted > 0 or method != "ngram"


def test_a_process_without_llguidance_is_told_what_to_install():
    code = """
        import sys, torch_hybrid as th
        from tests.serving.fake_runner import FakeRunner
        from tests.tiny_tokenizers import byte_level
        assert "llguidance" not in sys.modules
        sampling = th.Sampling(grammar=th.Grammar.json_object())
        try:
            th.Engine(FakeRunner(vocab_size=300), byte_level()).submit([1], sampling)
        except th.UnsupportedError as error:
            print(error)
    """
    expected = "grammars need llguidance: pip install 'torch-hybrid[serve]'"
    assert run(code, blocked=("llguidance",)) == expected


@pytest.mark.parametrize("make", EVERY_KIND.values(), ids=EVERY_KIND)
def test_every_kind_of_tokenizer_writes_the_grammar_or_is_refused(make: Any):
    by = th.Engine(FakeRunner(vocab_size=320), make(), eos_token_ids=[2])
    sampling = th.Sampling(grammar=th.Grammar.regex("(the|fox|ab){3}[.]"))
    if make.__name__ in ("word_pieces", "cleaned_word_pieces", "cleaned_words", "word_ends"):
        with pytest.raises(th.UnsupportedError, match="grammars cannot read the tokenizer"):
            by.submit([1], sampling)
    elif make.__name__ == "byte_by_byte":
        with pytest.raises(th.UnsupportedError, match=r"need a fast tokenizer.*ByT5Tokenizer"):
            by.submit([1], sampling)
    else:
        [output] = by.generate([1], sampling)
        assert re.fullmatch("(the|fox|ab){3}[.]", output.text)


def _index(output: th.Output) -> int:
    return output.index
