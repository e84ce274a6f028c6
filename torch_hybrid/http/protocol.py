"""Bodies that clients send: of OpenAI's API, with the further options of vLLM's that are known.

An option that is neither is refused, for a client that sets it expects something of it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from torch_hybrid.http.errors import HttpError
from torch_hybrid.http.tools import Format, Schemas, calls_grammar, find_format, forced
from torch_hybrid.sampling import Grammar, Sampling

# Options that change no text: accounting, caching and tracing at OpenAI.
IGNORED = {
    *("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "prompt_cache_options"),
}
DEFAULT_MAX_TOKENS = 16  # OpenAI's, of completions
_SAMPLED = {  # fields of ``Sampling`` under their own names
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "seed", "n", "ignore_eos", "stop_token_ids"),
}
_UNIONS = {
    "prompt": "must be a text or token ids, or a list of either",
    "stop": "must be a text of 1 to 256 characters, or a list of at most 8",
}
_ENDS = ("continue_final_message", "add_generation_prompt")  # of a chat's prompt
_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}

Count = Annotated[int, Field(ge=0)]
NumTop = Annotated[int, Field(ge=0, le=20)]  # likeliest tokens to report
Key = Annotated[int, Field(strict=False)]  # JSON has texts alone
Text = Annotated[str, Field(min_length=1, max_length=256)]
BodyT = TypeVar("BodyT", bound="Body")


class Options(BaseModel):
    """Options that refuse unknown fields; null counts as absent."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return {
            name: value
            for name, value in given.items()
            if value is not None and name not in IGNORED
        }


class StreamOptions(Options):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False  # pads chunks at OpenAI; there is nothing to hide here


class JsonSchema(Options):
    """Schema of a response format; each is strict."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool = True


class ResponseFormat(Options):
    """OpenAI's form of a grammar."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def grammar(self) -> Grammar | None:
        """Make the grammar; None for text."""
        if (self.json_schema is None) == (self.type == "json_schema"):
            raise ValueError("response_format must have json_schema if that is its type")
        if self.json_schema is not None:
            return Grammar.json_schema(self.json_schema.schema_)
        return Grammar.json_object() if self.type == "json_object" else None


class StructuredOutputs(Options):
    """vLLM's form of a grammar."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar_: Annotated[str | None, Field(alias="grammar")] = None
    json_object: Literal[True] | None = None

    def grammar(self) -> Grammar:
        """Make the grammar."""
        if len(self.model_fields_set) != 1:
            count = len(self.model_fields_set)
            raise ValueError(f"structured_outputs must have one grammar, got {count}")
        if self.json_ is not None:
            return Grammar.json_schema(self.json_)
        if self.regex is not None:
            return Grammar.regex(self.regex)
        if self.choice is not None:
            return Grammar.choice(self.choice)
        return Grammar.json_object() if self.grammar_ is None else Grammar.ebnf(self.grammar_)


class Function(Options):
    """Function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Options):
    """Tool of a chat."""

    type: Literal["function"]
    function: Function


class Body(Options):
    """A whole body."""

    model: str | None = None


class Generation(Body):
    """Options of completions and chats alike."""

    max_tokens: Count | None = None
    min_tokens: Count | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[Key, float] | None = None
    seed: int | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    ignore_eos: bool | None = None
    stop: Text | Annotated[list[Text], Field(max_length=8)] = []
    stop_token_ids: list[int] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise HttpError(400, "stream_options needs stream: true", param="stream_options")
        return self

    @field_validator("top_k")
    @classmethod
    def _all_of_them(cls, given: int) -> int:
        return 0 if given == -1 else given  # as vLLM

    @field_validator("response_format", "structured_outputs")
    @classmethod
    def _made(cls, given: ResponseFormat | StructuredOutputs) -> object:
        given.grammar()  # its error has the field's name
        return given

    def grammar(self) -> Grammar | None:
        """Make the grammar of the output, if one is asked for.

        Raises:
            HttpError: there are two.
        """
        if self.response_format is not None and self.structured_outputs is not None:
            told = "response_format and structured_outputs exclude each other"
            raise HttpError(400, told, param="structured_outputs")
        given = self.response_format or self.structured_outputs
        return None if given is None else given.grammar()

    def sampling(
        self, defaults: Sampling, room: int, *, most: int | None, **options: Any
    ) -> Sampling:
        """Convert the options, with the checkpoint's own where none is given.

        Args:
            defaults: the checkpoint's sampling.
            room: tokens that a sequence can hold; outputs end there.
            most: most tokens of an output; None is all that there is room for.
            options: further fields of the sampling.

        Raises:
            HttpError: a value is out of its range.
        """
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        most = max(1, min(room, room if most is None else most))
        least = min(defaults.min_new_tokens, most) if self.min_tokens is None else self.min_tokens
        try:
            return replace(
                defaults,
                **self.model_dump(include=_SAMPLED, exclude_none=True),
                max_new_tokens=most,
                min_new_tokens=least,
                max_length=room + 1,  # the last token is never held
                stop=tuple(dict.fromkeys([*defaults.stop, *stop])),
                **options,
            )
        except ValueError as error:
            raise of_value(error) from error


class CompletionBody(Generation):
    """Body of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: Count = DEFAULT_MAX_TOKENS
    echo: bool = False
    logprobs: NumTop | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.prompt:
            raise HttpError(400, "prompt must not be empty", param="prompt")
        if self.max_tokens == 0 and not self.echo:
            told = "max_tokens must be at least 1 without echo, got 0"
            raise HttpError(400, told, param="max_tokens")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Prompts, each a text or tokens."""
        given = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        return [given] if isinstance(given[0], int) else given  # type: ignore[list-item,return-value]


class ChatBody(Generation):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: NumTop | None = None
    tools: list[Tool] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if 0 in (self.max_tokens, self.max_completion_tokens):
            raise HttpError(400, "max_tokens must be at least 1, got 0", param="max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise HttpError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        if self.tool_choice not in ("auto", "none") and not self.schemas:
            told = (
                "tool_choice must be 'none', 'auto', or with tools 'required' or {'type': "
                f"'function', 'function': {{'name': a tool's}}}}, got {self.tool_choice!r}"
            )
            raise HttpError(400, told, param="tool_choice")
        continues = self.messages[-1].get("role") == "assistant"
        given = self.continue_final_message, self.add_generation_prompt
        if self.model_fields_set & {*_ENDS} and given != (continues, not continues):
            told = (
                f"{' and '.join(_ENDS)} must be true and false where the last message is the "
                f"assistant's, else false and true, got {given[0]} and {given[1]}"
            )
            raise HttpError(400, told, param=_ENDS[0])
        return self

    @property
    def usable(self) -> list[Tool]:
        """Tools of which the model is told."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def variables(self) -> dict[str, Any]:
        """Variables that the chat template is told: tools, and what the client adds."""
        tools = [tool.model_dump(exclude_none=True) for tool in self.usable]
        return self.chat_template_kwargs | ({"tools": tools} if tools else {})

    @property
    def schemas(self) -> Schemas:
        """Schemas of the functions that may be called."""
        match self.tool_choice:
            case {"function": {"name": name}}:
                named = {name}
            case "auto" | "required":
                named = {tool.function.name for tool in self.tools}
            case _:
                named = set()
        return {
            tool.function.name: tool.function.parameters or {"type": "object"}
            for tool in self.tools
            if tool.function.name in named
        }

    def calls_format(self, template: str) -> Format | None:
        """Find the format of calls; None where there can be none.

        Raises:
            HttpError: a chat template teaches none that is known.
        """
        form = find_format(template)
        if not self.usable:
            return form if form is not None and form.is_always else None
        form = form if self.tool_choice == "auto" else forced(form)
        if form is None or "tools" not in template:
            told = "the chat template writes no tools, or calls in a format that is not known"
            raise HttpError(400, told, param="tools")
        return form

    def grammar(self) -> Grammar | None:
        """Make the grammar of the output: of the calls, where there must be one."""
        given = super().grammar()
        if not self.usable:
            return given
        if given is not None:
            told = "a grammar beside tools needs tool_choice: 'none'"
            raise HttpError(400, told, param="tool_choice")
        if self.tool_choice == "auto":
            return None
        is_one = self.tool_choice != "required" or not self.parallel_tool_calls
        return calls_grammar(self.schemas, most=1 if is_one else None)


class TokenizeBody(Body):
    """Body of /tokenize: a text or a conversation."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


class DetokenizeBody(Body):
    """Body of /detokenize."""

    tokens: list[int]


def read(kind: type[BodyT], body: bytes, content_type: str) -> BodyT:
    """Read a body.

    Args:
        kind: what the body should be.
        body: JSON.
        content_type: header; a form of another site's page cannot send JSON's.

    Raises:
        HttpError: it is something else; the error names the field.
    """
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise HttpError(400, f"Content-Type must be application/json, got {content_type!r}")
    try:
        return kind.model_validate_json(body)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False, include_context=False)[0]
    field = first["loc"][0] if first["loc"] else None
    if field in _UNIONS:  # else one of the alternatives would be named
        first["loc"], first["msg"] = (field,), _UNIONS[field]
    name = ".".join(map(str, first["loc"])) or None
    got = "" if name is None else f", got {reprlib.repr(first['input'])}"
    messages = {
        "extra_forbidden": f"Unrecognized request argument supplied: {name}",
        "missing": f"you must provide {name}",
        "value_error": first["msg"].removeprefix("Value error, "),
    }
    other = f"{name or 'the body'}: {first['msg']}{got}"
    raise HttpError(400, messages.get(first["type"], other), param=name)


def of_value(error: Exception) -> HttpError:
    """Make the 400 of a value that ``Sampling`` or the engine refuses."""
    text = str(error)
    word = text.partition(" ")[0]
    for ours, theirs in _RENAMED.items():
        text = text.replace(ours, theirs)
    is_field = word in _SAMPLED | _RENAMED.keys() | {"stop"}
    return HttpError(400, text, param=_RENAMED.get(word, word) if is_field else None)
