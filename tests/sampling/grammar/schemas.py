"""Random schemas over the keywords that JSON Schema's own suite of tests is about."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
NAMES = ["id", "name", "größe", "is ok", 'quo"te', "n", "tags"]
PATTERNS = ["^[a-c]{2,4}$", "^(yes|no)$", r"^\d{3}-\d{2}$", "^x?y*z$"]
LETTERS = "abcd"


def make_schemas(count: int, *, seed: int = 0) -> list[Schema]:
    """Schemas whose values are short, every second one an object of several keywords."""
    rng = random.Random(seed)
    return [_whole(rng) if n % 2 else _any(rng, 2) for n in range(count)]


def _whole(rng: random.Random) -> Schema:
    """An object with definitions, some of which refer to themselves."""
    item = {"$ref": "#/$defs/item"}
    tree = {
        "type": "object",
        "properties": {"v": item, "sub": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
        "required": ["v"],
        "additionalProperties": False,
    }
    tree["properties"]["sub"]["maxItems"] = rng.choice([1, 2])  # type: ignore[index]
    properties = {name: _any(rng, 1) for name in rng.sample(NAMES, rng.randint(0, 3))}
    properties["ref"] = rng.choice([item, {"$ref": "#/$defs/tree"}])
    return {
        "$defs": {"item": _any(rng, 0), "tree": tree},
        **_object_of(rng, properties),
    }


def _any(rng: random.Random, depth: int) -> Schema:
    leaves: list[Callable[[random.Random], Schema]] = [_string, _number, _constant]
    nested: list[Callable[[random.Random, int], Schema]] = [_array, _object, _several]
    if depth and rng.random() < 0.7:
        return rng.choice(nested)(rng, depth - 1)
    return rng.choice(leaves)(rng)


def _string(rng: random.Random) -> Schema:
    shortest = rng.randint(0, 3)
    return rng.choice(
        [
            {"type": "string", "maxLength": rng.randint(0, 5)},
            {"type": "string", "minLength": shortest, "maxLength": shortest + rng.randint(0, 4)},
            {"type": "string", "pattern": rng.choice(PATTERNS)},
            {"type": "string", "format": rng.choice(["uuid", "ipv4"])},
        ]
    )


def _number(rng: random.Random) -> Schema:
    low = rng.randint(-50, 50)
    high = low + rng.randint(0, 400)
    return rng.choice(
        [
            {"type": "integer", "minimum": low, "maximum": high},
            {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high + 2},
            {"type": "integer", "minimum": low, "maximum": high + 7, "multipleOf": 7},
            {"type": "number", "minimum": low, "maximum": high + 0.5},
            {"type": "number", "exclusiveMinimum": low},
            {"type": ["integer", "null"], "minimum": low},
        ]
    )


def _constant(rng: random.Random) -> Schema:
    values = ["a", "é\n", 'say "x"', 7, -1.5, True, None, [1, {"k": 0}], {"deep": [None]}]
    return rng.choice(
        [
            {"const": rng.choice(values)},
            {"enum": rng.sample(values, rng.randint(1, 5))},
            {"type": rng.choice(["boolean", "null"])},
        ]
    )


def _array(rng: random.Random, depth: int) -> Schema:
    shortest = rng.randint(0, 2)
    bounds = {"minItems": shortest, "maxItems": shortest + rng.randint(0, 2)}
    first = [_any(rng, depth) for _ in range(rng.randint(1, 2))]
    return rng.choice(
        [
            {"type": "array", "items": _any(rng, depth), **bounds},
            {"type": "array", "prefixItems": first, "items": False},
            {"type": "array", "prefixItems": first, "items": _any(rng, 0), "maxItems": 3},
        ]
    )


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(0, 3))
    return _object_of(rng, {name: _any(rng, depth) for name in names})


def _object_of(rng: random.Random, properties: Schema) -> Schema:
    required = [name for name in properties if rng.random() < 0.6]
    shape = {"type": "object", "properties": properties, "required": required}
    if rng.random() < 0.2:  # further names of a few letters
        named = {"patternProperties": {f"^[{LETTERS}]{{2}}$": {"type": "boolean"}}}
        return {**shape, **named, "additionalProperties": False}
    return {**shape, "additionalProperties": False}


def _several(rng: random.Random, depth: int) -> Schema:
    kinds = [{"type": "integer", "maximum": 99}, {"type": "string", "maxLength": 3}]
    tagged = [
        _object_of(rng, {"kind": {"const": kind}, "x": _any(rng, depth)}) for kind in ("p", "q")
    ]
    for each in tagged:
        each["required"] = ["kind"]
    return rng.choice(
        [
            {"anyOf": [_any(rng, depth), _any(rng, 0)]},
            {"oneOf": kinds},
            {"oneOf": tagged},
            {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": rng.randint(5, 900)}]},
        ]
    )
