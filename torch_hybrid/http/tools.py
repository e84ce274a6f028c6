"""Formats of tool calls in the outputs of models, chosen by the text of the chat template."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch_hybrid.sampling import Grammar

Json = dict[str, Any]
Schemas = Mapping[str, Json]  # of arguments, by the function's name
Called = tuple[str, Json]  # name of a function, and its arguments
_NAMES = {"true": True, "false": False, "null": None}


class UnfinishedError(ValueError):
    """A block of calls that ends within a string: its end is a part of the string."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A way to write calls: blocks of one call or several.

    Attributes:
        begin: text before a block; "" where the output is a block.
        end: text after a block; "" where the block reaches to the end of the output.
        read: reads the calls of a block; raises ValueError if they are malformed.
    """

    begin: str
    end: str
    read: Callable[[str, Schemas], list[Called]]


def find_format(template: str) -> Format | None:
    """Find the format that a chat template teaches; None if it names none that is known."""
    return next((form for mark, form in _FORMATS if mark in template), None)


def calls_grammar(schemas: Schemas, *, most: int | None) -> Grammar:
    """Make the grammar of ``FORCED``: a JSON list of at least one call, with valid arguments."""
    calls: list[Json] = []
    for at, (name, schema) in enumerate(schemas.items()):
        arguments = _moved(schema, f"#/items/anyOf/{at}/properties/arguments")
        shape = {"name": {"const": name}, "arguments": arguments}
        calls.append({"type": "object", "properties": shape, "required": [*shape]})
        calls[-1]["additionalProperties"] = False
    limits = {"minItems": 1} | ({} if most is None else {"maxItems": most})
    return Grammar.json_schema({"type": "array", "items": {"anyOf": calls}, **limits})


def _moved(schema: Any, path: str) -> Any:
    """Copy a schema that moves to a path; its references follow."""
    if isinstance(schema, list):
        return [_moved(part, path) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, path) for key, value in schema.items()}
    if isinstance(at := schema.get("$ref"), str) and at.startswith("#"):
        moved["$ref"] = path + at[1:]
    return moved


def _read_json(block: str, _: Schemas) -> list[Called]:
    found = _loads(block)
    return [_called(call) for call in (found if isinstance(found, list) else [found])]


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string"):
            raise UnfinishedError(str(error)) from None
        raise
    except RecursionError:
        raise ValueError("arguments must be nested less") from None


def _called(call: Any) -> Called:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError(f"a call must have a name, got {call!r}")
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError(f"arguments must be an object, got {arguments!r}")
    return call["name"], arguments


def _read_tags(
    block: str, schemas: Schemas, *, call: re.Pattern[str], parameter: re.Pattern[str] | None
) -> list[Called]:
    """Read calls between tags: JSON, or a tag for each parameter."""
    calls = []
    for name, body in call.findall(block):
        if parameter is None:
            calls.append(_called({"name": name, "arguments": body}))
            continue
        known = schemas.get(name, {}).get("properties", {})
        found = parameter.findall(body)
        if body.strip() and not found:
            raise ValueError(f"a call must have parameters in tags, got {body!r}")
        calls.append((name, {key: _value(text, known.get(key)) for key, text in found}))
    return calls


def _value(text: str, schema: Any) -> Any:
    """Read a value that a template writes as JSON, unless it is a text."""
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    try:
        return _loads(text)
    except ValueError:
        return text


class _Constants(ast.NodeTransformer):
    """Replacement of JSON's names by Python's values."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_NAMES[node.id]) if node.id in _NAMES else node


def _read_python(block: str, _: Schemas) -> list[Called]:
    """Read a list of Python's calls with literal keyword arguments."""
    try:
        found = ast.parse(block.strip(), mode="eval").body
        nodes = found.elts if isinstance(found, ast.List) else [found]
        return [_python_call(node) for node in nodes]
    except SyntaxError as error:
        kind = UnfinishedError if "unterminated string" in error.msg else ValueError
        raise kind(error.msg) from None
    except (RecursionError, MemoryError, TypeError):
        raise ValueError("arguments must be literals, and nested less") from None


def _python_call(node: ast.expr) -> Called:
    if not isinstance(node, ast.Call) or node.args or any(k.arg is None for k in node.keywords):
        raise ValueError(f"a call must have keyword arguments alone, got {ast.unparse(node)}")
    given = {
        str(keyword.arg): ast.literal_eval(_Constants().visit(keyword.value))
        for keyword in node.keywords
    }
    return ast.unparse(node.func), given


def _tags(call: str, parameter: str | None = None) -> Callable[[str, Schemas], list[Called]]:
    inner = None if parameter is None else re.compile(parameter, re.DOTALL)
    return partial(_read_tags, call=re.compile(call, re.DOTALL), parameter=inner)


FORCED = Format(begin="", end="", read=_read_json)  # by a grammar, whatever the model's own format
_FORMATS = (  # by a text in the template, the rarest first
    (
        "<|tool_calls_section_begin|>",  # Kimi
        Format(
            begin="<|tool_calls_section_begin|>",
            end="<|tool_calls_section_end|>",
            read=_tags(
                r"<\|tool_call_begin\|>\s*(?:functions\.)?([^:<\s]+)(?::\d+)?\s*"
                r"<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>"
            ),
        ),
    ),
    *(
        (mark, Format(begin="<|tool_call_start|>", end="<|tool_call_end|>", read=_read_python))
        for mark in ("<|tool_call_start|>", "<|tool_list_start|>", "List of tools: [")  # LFM2
    ),
    ("<TOOLCALL>", Format(begin="<TOOLCALL>", end="</TOOLCALL>", read=_read_json)),  # Nemotron 2
    (
        "<arg_key>",  # GLM
        Format(
            begin="<tool_call>",
            end="</tool_call>",
            read=_tags(
                r"^\s*([\w.-]+)\s*(<.*|)$",
                r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>",
            ),
        ),
    ),
    (
        "<function=",  # Qwen3.5, Qwen3-Coder, Nemotron 3
        Format(
            begin="<tool_call>",
            end="</tool_call>",
            read=_tags(
                r"<function=([^>\s]+)>(.*?)</function>",
                r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>",
            ),
        ),
    ),
    ("<|tool_call|>", Format(begin="<|tool_call|>", end="", read=_read_json)),  # Granite 3
    ("<tool_call>", Format(begin="<tool_call>", end="</tool_call>", read=_read_json)),
    # The last one is of Hermes: Qwen3-Next, Granite 4, Ling.
)
