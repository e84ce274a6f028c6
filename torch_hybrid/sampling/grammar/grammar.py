"""Grammar that the output of a request follows, as its caller writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

MAX_BYTES = 1 << 18  # of a grammar's text: a choice of 30,000 words compiles in two seconds
Kind = Literal["json_schema", "regex", "choice", "ebnf"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """Grammar of a whole output; made by its class methods, compiled once for each tokenizer.

    Only tokens that can continue the grammar are drawn. A token that ends the request may come
    where the grammar is complete. A limit on tokens may end the output before that.

    Args:
        kind: form of the text.
        text: grammar in that form; JSON for a schema and for choices.
        whitespace: JSON may have whitespace between its parts.
        after: text, such as "</think>". The grammar begins where its tokens first stand in the
            output. Tokens before it are free, but none may end the request.

    Raises:
        TypeError: a value of a wrong type.
        ValueError: the text is longer than 256 KiB, or ``after`` is empty.
    """

    kind: Kind
    text: str
    whitespace: bool = False
    after: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"a grammar must be a text, got {self.text!r}")
        if not isinstance(self.whitespace, bool):
            raise TypeError(f"whitespace must be True or False, got {self.whitespace!r}")
        if self.after is not None and not isinstance(self.after, str):
            raise TypeError(f"after must be a text or None, got {self.after!r}")
        if self.after == "":
            raise ValueError("after must be a text or None, got ''")
        size = len(self.text.encode("utf-8", "surrogatepass"))
        if size > MAX_BYTES:
            raise ValueError(f"a grammar may have {MAX_BYTES} bytes, got {size}")

    @classmethod
    def json_schema(
        cls, schema: Mapping[str, Any] | str, *, whitespace: bool = False, after: str | None = None
    ) -> Self:
        """Make the grammar of JSON that is valid under a schema, with properties in its order.

        Args:
            schema: a JSON schema of draft 2020-12 or earlier, or its text. Keywords that the
                grammar cannot hold to are refused by name when a request is made.
            whitespace: JSON may have whitespace between its parts.
            after: see ``Grammar``.

        Raises:
            TypeError: the schema is neither a mapping nor a text.
            ValueError: the schema is no JSON, or too long.
        """
        if isinstance(schema, str):
            text = schema
        elif isinstance(schema, Mapping):
            text = _json("the schema", dict(schema))
        else:
            raise TypeError(f"the schema must be a mapping or its JSON, got {schema!r}")
        return cls(kind="json_schema", text=text, whitespace=whitespace, after=after)

    @classmethod
    def json_object(cls, *, whitespace: bool = False, after: str | None = None) -> Self:
        """Make the grammar of any JSON object."""
        return cls.json_schema({"type": "object"}, whitespace=whitespace, after=after)

    @classmethod
    def regex(cls, pattern: str, *, after: str | None = None) -> Self:
        """Make the grammar of texts that a regular expression matches as a whole.

        Its syntax is that of Rust's ``regex``: no look-around, no back-references.
        """
        return cls(kind="regex", text=pattern, after=after)

    @classmethod
    def choice(cls, options: Sequence[str], *, after: str | None = None) -> Self:
        """Make the grammar of one of several texts.

        Raises:
            TypeError: the options are no list of texts.
            ValueError: there is no option, or one is empty.
        """
        if isinstance(options, str) or not isinstance(options, Sequence):
            raise TypeError(f"choice must be a list of texts, got {options!r}")
        if not all(isinstance(option, str) for option in options):
            raise TypeError(f"choice must be a list of texts, got {options!r}")
        if not options or "" in options:
            raise ValueError(f"choice must have texts that are not empty, got {options!r}")
        return cls(kind="choice", text=_json("choice", list(options)), after=after)

    @classmethod
    def ebnf(cls, text: str, *, after: str | None = None) -> Self:
        """Make a context-free grammar from GBNF (of llama.cpp) or Lark, told by their syntax."""
        return cls(kind="ebnf", text=text, after=after)


def _json(name: str, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} must be made of JSON's types, and nested less: {error}") from None
