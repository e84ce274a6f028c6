"""Form of /v1/chat/completions, and its conversations as prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from inspect import signature
from typing import Any
from uuid import uuid4

from torch_hybrid.http.answer import Form, Json
from torch_hybrid.http.call import Call, Piece
from torch_hybrid.http.errors import HttpError
from torch_hybrid.http.splitting import Splitter
from torch_hybrid.http.tools import Called
from torch_hybrid.sampling import TokenLogprob
from torch_hybrid.serving.detokenizer import Tokenizer
from torch_hybrid.serving.messages import Message
from torch_hybrid.serving.prompts import ChatTokenizer


class ChatForm(Form):
    """Form of chats: messages, or deltas of them."""

    prefix, name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, call: Call, model: str, tokenizer: Tokenizer, make_splitter: Callable[[], Splitter]
    ) -> None:
        super().__init__(call, model, tokenizer)
        self._splitters = [make_splitter() for _ in call.requests]
        self._num_calls = [0] * len(call.requests)

    def opening(self) -> list[Json]:
        """Make the choices that name the speaker."""
        said = {"role": "assistant", "content": ""}
        return [_choice(n, said, None, None) for n in range(len(self.call.requests))]

    def choice(self, piece: Piece) -> Json:
        n, ends = piece.choice, piece.end is not None
        split = self._splitters[n].feed(piece.text, ends=ends)
        said: Json = {"reasoning_content": split.reasoning} if split.reasoning else {}
        said |= {"content": split.content} if split.content else {}
        if split.calls:
            said["tool_calls"] = [self._call(n, called) for called in split.calls]
        has_called = piece.end == "stop" and self._num_calls[n] > 0
        entries = self.next_logprobs(n, piece.num_tokens)
        told = None if entries is None else {"content": [*map(self._entry, entries)]}
        return _choice(n, said, told, "tool_calls" if has_called else piece.end)

    def whole_choice(self, piece: Piece) -> Json:
        choice = self.choice(piece)
        said = choice.pop("delta")
        for called in said.get("tool_calls", ()):
            del called["index"]
        has_more = said.keys() & {"tool_calls", "reasoning_content"}
        message = {"role": "assistant", "content": None if has_more else "", "refusal": None}
        return choice | {"message": message | said}

    def _call(self, n: int, called: Called) -> Json:
        arguments = json.dumps(called.arguments, ensure_ascii=False)
        self._num_calls[n] += 1
        return {
            "index": self._num_calls[n] - 1,
            "id": called.id or f"call_{uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": called.name, "arguments": arguments},
        }

    def _entry(self, entry: TokenLogprob) -> Json:
        tops = [self._token(token, logprob) for token, logprob in entry.top]
        return {**self._token(entry.token, entry.logprob), "top_logprobs": tops}

    def _token(self, token: int, logprob: float) -> Json:
        text = self.text_of(token)
        whole = "\ufffd" not in text  # else the token is a part of a character
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}


def _choice(n: int, said: Json, logprobs: Json | None, end: str | None) -> Json:
    return {"index": n, "delta": said, "logprobs": logprobs, "finish_reason": end}


def with_variables(tokenizer: Tokenizer, variables: Json) -> ChatTokenizer:
    """Make a tokenizer whose chat template is told of tools and other variables.

    Raises:
        ValueError: there is no chat template, or it has no such variable.
    """
    if not isinstance(tokenizer, ChatTokenizer):
        raise ValueError("tools and variables need a tokenizer with a chat template")
    told, write = copy(tokenizer), tokenizer.apply_chat_template
    reserved = {*signature(write).parameters, "messages"} - {"tools"}
    for name in variables:
        if name in reserved or name not in str(tokenizer.chat_template):
            raise ValueError(f"chat_template_kwargs must be variables of the template, got {name}")
    told.apply_chat_template = partial(write, **variables)  # type: ignore[method-assign]
    return told


def check_images(messages: Sequence[Mapping[str, Any]], *, has_variables: bool) -> None:
    """Refuse images that the server itself would have to read from a path or an address.

    Raises:
        HttpError: a part of a message names one, or is an image beside tools or variables.
    """
    contents = [message.get("content") for message in messages]
    told = (
        "a part must be a text or an image {'type': 'image_url', 'image_url': {'url': "
        "'data:image/...;base64,...'}}: the server reads no files or addresses"
    )
    for part in [part for parts in contents if isinstance(parts, list) for part in parts]:
        match part:
            case {"text": str()}:
                pass  # the engine refuses what else is beside a text
            case {"image_url": str(url) | {"url": str(url)}} if url.startswith("data:image/"):
                if has_variables:
                    both = "images beside tools or chat_template_kwargs are not served"
                    raise HttpError(400, both, param="messages")
            case {}:
                raise HttpError(400, told, param="messages")


def read_calls(messages: Sequence[Message]) -> list[Message]:
    """Read the JSON of earlier calls' arguments, which templates take as mappings.

    Raises:
        HttpError: arguments are no JSON object.
    """
    return [
        {**message, "tool_calls": [_read_call(call) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def _read_call(call: Any) -> Json:
    try:
        arguments = call["function"]["arguments"]
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
        if isinstance(given, dict):
            return {**call, "function": {**call["function"], "arguments": given}}
    except (TypeError, KeyError, ValueError, RecursionError):
        pass
    told = f"a tool call must have a function with arguments, a JSON object; got {str(call)[:100]}"
    raise HttpError(400, told, param="messages")
