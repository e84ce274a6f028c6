"""Grammars as their callers make them: forms, and mistakes that are named at once."""

import pytest

import torch_hybrid as th
from torch_hybrid.sampling.grammar.grammar import MAX_BYTES


def test_a_schema_is_the_same_as_its_text():
    schema = {"type": "string", "maxLength": 3}
    as_text = th.Grammar.json_schema('{"type": "string", "maxLength": 3}')
    assert th.Grammar.json_schema(schema) == as_text
    assert th.Grammar.json_object() == th.Grammar.json_schema({"type": "object"})
    assert hash(as_text) != hash(th.Grammar.json_schema(schema, whitespace=True))


def _nested() -> list:
    nested: list = []
    for _ in range(100_000):
        nested = [nested]
    return nested


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: th.Grammar.json_schema(7), TypeError, "a mapping or its JSON, got 7"),
        (lambda: th.Grammar.json_schema({"const": {1}}), ValueError, "made of JSON's types"),
        (lambda: th.Grammar.json_schema({"const": float("nan")}), ValueError, "JSON's types"),
        (lambda: th.Grammar.json_schema({"const": _nested()}), ValueError, "nested less"),
        (lambda: th.Grammar.json_object(whitespace=1), TypeError, "whitespace must be True or"),
        (lambda: th.Grammar.regex(None), TypeError, "a grammar must be a text, got None"),
        (lambda: th.Grammar.regex("a", after=7), TypeError, "after must be a text or None"),
        (lambda: th.Grammar.regex("a", after=""), ValueError, "or None, got ''"),
        (lambda: th.Grammar.ebnf("é" * (MAX_BYTES // 2 + 1)), ValueError, "may have 262144 bytes"),
        (lambda: th.Grammar.choice("yes"), TypeError, "choice must be a list of texts"),
        (lambda: th.Grammar.choice([1]), TypeError, "choice must be a list of texts"),
        (lambda: th.Grammar.choice([]), ValueError, "choice must have texts"),
        (lambda: th.Grammar.choice(["a", ""]), ValueError, "choice must have texts"),
        (lambda: th.Sampling(grammar="[0-9]"), TypeError, "grammar must be a th.Grammar or None"),
    ],
)
def test_mistakes_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()
