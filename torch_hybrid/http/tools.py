"""Formats of tool calls in the outputs of models, chosen by the text of the chat template."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from html import unescape
from keyword import kwlist
from typing import Any, NamedTuple

from torch_hybrid.sampling import Grammar

THOUGHTS = "<think>", "</think>"
Json = dict[str, Any]
Schemas = Mapping[str, Json]  # of arguments, by the function's name
_NAMES = {"true": True, "false": False, "null": None}  # JSON's, in Python's calls
_PYTHONS = {"True": True, "False": False, "None": None}  # Python's, in tags
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number"}
_TYPES |= {dict: "object", list: "array", type(None): "null"}
_STRING = re.compile(r"""('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")""", re.DOTALL)
_KEYWORD = re.compile(rf"([(,]\s*)({'|'.join(kwlist)})(?=\s*=[^=])")  # a parameter's name
_RENAMED = "_is_no_keyword"


class Called(NamedTuple):
    """Call of a function."""

    name: str
    arguments: Json
    id: str | None = None  # the model's own, which its template writes in the next turn


class UnfinishedError(ValueError):
    """A block of calls that ends within a string: its end is a part of the string."""


@dataclass(frozen=True, slots=True)
class Format:
    """A way to write calls: blocks of one call or several.

    Attributes:
        begin: text before a block; "" where the output is a block.
        end: text after a block; "" where the block reaches to the end of the output.
        read: reads the calls of a block; raises ValueError if they are malformed.
        thoughts: text before thoughts, and after them.
        is_always: outputs have these borders without calls too.
    """

    begin: str
    end: str
    read: Callable[[str, Schemas], list[Called]]
    thoughts: tuple[str, str] = THOUGHTS
    is_always: bool = False


def find_format(template: str) -> Format | None:
    """Find the format that a chat template teaches; None if it names none that is known."""
    return next((form for mark, form in _FORMATS if mark in template), None)


def calls_grammar(schemas: Schemas, *, most: int | None) -> Grammar:
    """Make the grammar of ``forced``: a JSON list of at least one call, with valid arguments."""
    calls = []
    for name, schema in schemas.items():
        arguments = {"$id": f"tool:{name}", **schema}  # where its references begin
        shape = {"name": {"const": name}, "arguments": arguments}
        call = {"type": "object", "properties": shape, "required": [*shape]}
        calls.append({**call, "additionalProperties": False})
    limits = {"minItems": 1} | ({} if most is None else {"maxItems": most})
    return Grammar.json_schema({"type": "array", "items": {"anyOf": calls}, **limits})


def forced(form: Format | None) -> Format:
    """Make the format of calls by a grammar: the whole output, after the model's own thoughts."""
    return replace(form or _HERMES, begin="", end="", read=_read_json)


def _read_json(block: str, _: Schemas) -> list[Called]:
    found = _loads(block)
    return [_called(call) for call in (found if isinstance(found, list) else [found])]


def _read_lines(block: str, schemas: Schemas) -> list[Called]:
    return [call for line in block.strip().splitlines() for call in _read_json(line, schemas)]


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string"):
            raise UnfinishedError(str(error)) from None
        raise
    except RecursionError:
        raise ValueError("arguments must be nested less") from None


def _called(call: Any, own_id: str | None = None) -> Called:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError(f"a call must have a name, got {call!r}")
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError(f"arguments must be an object, got {arguments!r}")
    return Called(call["name"], arguments, own_id)


def _read_kimi(block: str, schemas: Schemas) -> list[Called]:
    """Read calls under ids, which name the function: "functions.find:0", or "0" if there is one."""
    calls = []
    for own_id, body in _KIMI.findall(block):
        name = own_id.removeprefix("functions.").partition(":")[0]
        if name.isdigit() and len(schemas) == 1:
            (name,) = schemas
        calls.append(_called({"name": name, "arguments": body}, own_id))
    return calls


def _read_tags(
    block: str, schemas: Schemas, *, call: re.Pattern[str], parameter: re.Pattern[str]
) -> list[Called]:
    """Read calls between tags, with a tag for each parameter."""
    calls = []
    for name, body in call.findall(block):
        known = schemas.get(name, {}).get("properties")
        found = parameter.findall(body)
        if body.strip() and not found:
            raise ValueError(f"a call must have parameters in tags, got {body!r}")
        known = known if isinstance(known, dict) else {}
        calls.append(Called(name, {key: _value(text, known.get(key)) for key, text in found}))
    return calls


def _read_channels(block: str, _: Schemas) -> list[Called]:
    """Read Kimi-K3's calls: typed arguments whose keys are escaped, or all as JSON in one tag."""
    calls = []
    for name, body in _CALL.findall(block):
        found = _ARGUMENT.findall(body)
        given: Any = {unescape(key): _value(text, {"type": kind}) for key, kind, text in found}
        if body and not found:
            given = body.partition("<|sep|>")[2].removesuffix("<|close|>json<|sep|>")
        calls.append(_called({"name": unescape(name), "arguments": given}))
    return calls


def _value(text: str, schema: Any) -> Any:
    """Read a value that a template writes as JSON, or as Python's ``str`` does; or as it is.

    A text is taken as it is where the schema allows a string, and not what the JSON would be.
    """
    types = _types_of(schema)
    if types == {"string"}:
        return text
    try:
        value = _PYTHONS[text] if text in _PYTHONS else _loads(text)
    except ValueError:
        return text
    fits = {_TYPES[type(value)]} | ({"number"} if type(value) is int else set())
    return text if "string" in types and not fits & types else value


def _types_of(schema: Any) -> set[str]:
    """Collect the names of the types that a schema allows; none if it does not say."""
    if not isinstance(schema, dict):
        return set()
    lists = {key: value for key, value in schema.items() if isinstance(value, list)}
    types = {str(name) for name in lists.get("type", [schema.get("type")])} - {"None"}
    for option in (*lists.get("anyOf", ()), *lists.get("oneOf", ())):
        types |= _types_of(option)
    return types or {_TYPES[type(value)] for value in lists.get("enum", ())}


class _Constants(ast.NodeTransformer):
    """Replacement of JSON's names by Python's values, and of sets by lists."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_NAMES[node.id]) if node.id in _NAMES else node

    def visit_Set(self, node: ast.Set) -> ast.expr:
        return ast.List(node.elts, ast.Load())


def _as_python(block: str) -> str:
    """Replace newlines in strings of Python's calls, and rename parameters that are keywords."""
    parts = _STRING.split(block.strip())
    parts[::2] = [_KEYWORD.sub(rf"\1\2{_RENAMED}", part) for part in parts[::2]]
    parts[1::2] = [part.replace("\n", "\\n").replace("\r", "\\r") for part in parts[1::2]]
    return "".join(parts)


def _read_python(block: str, schemas: Schemas) -> list[Called]:
    """Read a list of Python's calls with literal keyword arguments, or of JSON's."""
    if block.lstrip("[ \n").startswith("{"):
        return _read_json(block, schemas)
    try:
        found = ast.parse(_as_python(block), mode="eval").body
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
        str(keyword.arg).removesuffix(_RENAMED): ast.literal_eval(_Constants().visit(keyword.value))
        for keyword in node.keywords
    }
    return Called(ast.unparse(node.func), given)


def _tags(call: str, parameter: str) -> Callable[[str, Schemas], list[Called]]:
    inner = re.compile(parameter, re.DOTALL)
    return partial(_read_tags, call=re.compile(call, re.DOTALL), parameter=inner)


_KIMI = re.compile(
    r"<\|tool_call_begin\|>\s*([^<\s]+)\s*<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>",
    re.DOTALL,
)
_PYTHON = Format("<|tool_call_start|>", "<|tool_call_end|>", _read_python)
_KEYS = _tags(
    r"^\s*([\w.-]+)(?:\\n)?\s*(<.*|)$", r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>"
)
_XML = _tags(
    r"<function=([^>\s]+)>(.*?)</function>", r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>"
)
_CALL, _ARGUMENT = (
    re.compile(rf"<\|open\|>{name} {given}<\|sep\|>(.*?)<\|close\|>{name}<\|sep\|>", re.DOTALL)
    for name, given in (("call", r'tool="([^"]+)"[^<]*'), ("argument", r'key="(.*?)" type="(.*?)"'))
)
_RESPONSE = "<|open|>think<|sep|>", "<|close|>think<|sep|><|open|>response<|sep|>"
_KIMI_3 = Format("<|close|>response<|sep|>", "", _read_channels, thoughts=_RESPONSE, is_always=True)
_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_TOOL_CALL = "<tool_call>", "</tool_call>"
_HERMES = Format(*_TOOL_CALL, _read_json)
_FORMATS = (  # by a text in the template, the rarest first
    ("<|end_of_msg|>", _KIMI_3),
    ("<|tool_calls_section_begin|>", Format(*_SECTION, _read_kimi)),
    ("<|tool_call_start|>", _PYTHON),  # LFM2, like the next two
    ("<|tool_list_start|>", _PYTHON),
    ("List of tools: [", _PYTHON),
    ("<TOOLCALL>", Format("<TOOLCALL>", "</TOOLCALL>", _read_json)),  # Nemotron 2
    ("<arg_key>", Format(*_TOOL_CALL, _KEYS)),  # GLM, Ling from 2.6 on
    ("<function=", Format(*_TOOL_CALL, _XML)),  # Qwen3.5, Qwen3-Coder, Nemotron 3, Granite 4.2
    ("<|tool_call|>", Format("<|tool_call|>", "", _read_json)),  # Granite 3
    ("<tool_calls>", Format("<tool_calls>", "</tool_calls>", _read_lines)),  # MiniMax
    ("<tool_call>", _HERMES),  # Qwen3-Next, Granite 4, Ling 2
)
