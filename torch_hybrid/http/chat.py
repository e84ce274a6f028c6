"""Form of /v1/chat/completions, and its conversations as prompts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

from torch_hybrid.http.answer import Form, Json
from torch_hybrid.http.call import Call, Piece
from torch_hybrid.http.errors import HttpError
from torch_hybrid.http.splitting import END_THINK, Said, Splitter, Thinking
from torch_hybrid.http.tools import Format, Schemas
from torch_hybrid.sampling import TokenLogprob
from torch_hybrid.serving.detokenizer import Detokenizer, Tokenizer, num_alike
from torch_hybrid.serving.messages import Message, Sight, joined, read_messages
from torch_hybrid.serving.prompts import ChatTokenizer, Prompt

_BORDER = re.compile("think|tool_call|TOOLCALL|arg_")  # in the names of special tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Plan to split the outputs of a chat.

    Attributes:
        thinking: where outputs begin.
        form: format of calls; None reads none.
        schemas: schemas of the functions' arguments.
        most_calls: calls after these are left out; None is all.
        tokenizer: decodes borders that are special tokens, and so are in no text of the engine;
            None where there are none.
    """

    thinking: Thinking
    form: Format | None
    schemas: Schemas
    most_calls: int | None
    tokenizer: Tokenizer | None


class BorderTokenizer:
    """Tokenizer that decodes special tokens which are borders."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Encode a text."""
        return list(self._tokenizer.encode(text))

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Decode tokens."""
        shown = token_ids
        if skip_special_tokens:
            shown = [token for token in token_ids if not self._is_hidden(token)]
        return self._tokenizer.decode(shown, skip_special_tokens=False)

    def _is_hidden(self, token: int) -> bool:
        if self._tokenizer.decode([token], skip_special_tokens=True):
            return False
        name = self._tokenizer.decode([token], skip_special_tokens=False)
        return bool(name) and "\ufffd" not in name and not _BORDER.search(name)

    @classmethod
    def of(cls, tokenizer: Tokenizer, form: Format | None) -> BorderTokenizer | None:
        """Make one if a tokenizer hides borders."""
        borders = [END_THINK] if form is None else [END_THINK, form.begin]
        hides = [
            border
            and not tokenizer.decode(list(tokenizer.encode(border)), skip_special_tokens=True)
            for border in borders
        ]
        return cls(tokenizer) if any(hides) else None


class ChatForm(Form):
    """Form of chats: messages, or deltas of them."""

    prefix = "chatcmpl"

    def __init__(self, call: Call, model: str, tokenizer: Tokenizer, reading: Reading) -> None:
        super().__init__(call, model, tokenizer)
        self._reading, requests = reading, call.requests
        self._splitters = [
            Splitter(reading.thinking, reading.form, reading.schemas) for _ in requests
        ]
        self._num_calls, self._num_read = [0] * len(requests), [0] * len(requests)
        self._texts = (
            None
            if reading.tokenizer is None
            else [Detokenizer(reading.tokenizer, request.sampling.stop) for request in requests]
        )

    def opening(self) -> list[Json]:
        """Make the chunks that name the speaker of each choice."""
        said = {"role": "assistant", "content": ""}
        count = len(self.call.requests)
        return [self.chunk(_choice(n, None, None, delta=said)) for n in range(count)]

    def piece(self, piece: Piece) -> Json:
        """Make the chunk of a piece."""
        said, end = self._said(piece)
        told = self._told(piece.choice, piece.num_tokens)
        return self.chunk(_choice(piece.choice, told, end, delta=said))

    def chunk(self, *choices: Json) -> Json:
        """Make a chunk."""
        return {**self.head, "object": "chat.completion.chunk", "choices": choices}

    def whole(self) -> Json:
        """Make the whole answer, when all requests have ended."""
        choices = []
        for n, output in enumerate(self.call.outputs):
            num_tokens, end = len(output.tokens), output.finish_reason
            piece = Piece(choice=n, text=output.text or "", num_tokens=num_tokens, end=end)
            said, why = self._said(piece)
            has_more = said.keys() & {"tool_calls", "reasoning_content"}
            message = {"role": "assistant", "content": None if has_more else "", "refusal": None}
            for called in said.get("tool_calls", ()):
                del called["index"]
            choices.append(_choice(n, self._told(n, num_tokens), why, message=message | said))
        return {**self.head, "object": "chat.completion", "choices": choices}

    def _said(self, piece: Piece) -> tuple[Json, str | None]:
        """Split a piece into the parts of a message; also tell why its choice ended."""
        n, ends = piece.choice, piece.end is not None
        text = piece.text if self._texts is None else self._decoded(self._texts[n], piece)
        split = self._splitters[n].feed(text, ends=ends)
        said: Json = {"reasoning_content": split.reasoning} if split.reasoning else {}
        said |= {"content": split.content} if split.content else {}
        if calls := self._calls(n, split):
            said["tool_calls"] = calls
        has_called = piece.end == "stop" and self._num_calls[n] > 0
        return said, "tool_calls" if has_called else piece.end

    def _decoded(self, text: Detokenizer, piece: Piece) -> str:
        """Decode the tokens of a piece, with borders that the engine leaves out."""
        start = self._num_read[piece.choice]
        self._num_read[piece.choice] += piece.num_tokens
        tokens = self.call.requests[piece.choice].tokens[start : start + piece.num_tokens]
        given = "".join([text.add(token) for token in tokens if not text.is_stopped])
        return given if piece.end is None else given + text.finish()

    def _calls(self, n: int, split: Said) -> list[Json]:
        left, start = self._reading.most_calls, self._num_calls[n]
        calls = split.calls if left is None else split.calls[: max(0, left - start)]
        self._num_calls[n] += len(calls)
        return [
            {
                "index": start + at,
                "id": own_id or f"call_{uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(given, ensure_ascii=False)},
            }
            for at, (name, given, own_id) in enumerate(calls)
        ]

    def _told(self, n: int, count: int) -> Json | None:
        """Write the log-probabilities of a choice's next tokens."""
        entries = self.next_logprobs(n, count)
        if entries is None:
            return None
        return {"content": [self._entry(entry) for entry in entries], "refusal": None}

    def _entry(self, entry: TokenLogprob) -> Json:
        tops = [self._token(token, logprob) for token, logprob in entry.top]
        return {**self._token(entry.token, entry.logprob), "top_logprobs": tops}

    def _token(self, token: int, logprob: float) -> Json:
        text = self.text_of(token)
        whole = "\ufffd" not in text  # else the token is a part of a character
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}


def _choice(n: int, logprobs: Json | None, end: str | None, **said: Json) -> Json:
    return {"index": n, **said, "logprobs": logprobs, "finish_reason": end}


def check_images(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse images that the server itself would have to read from a path or an address.

    Raises:
        HttpError: a part of a message names one.
    """
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    for part in parts:
        if not isinstance(part, Mapping) or isinstance(part.get("text"), str):
            continue  # the engine refuses what else is beside a text
        given = part.get("image_url")
        url = given.get("url") if isinstance(given, Mapping) else given
        if not (isinstance(url, str) and url.startswith("data:image/")):
            raise HttpError(
                400,
                "an image must be a part {'type': 'image_url', 'image_url': {'url': "
                "'data:image/...;base64,...'}}: the server reads no files or addresses",
                param="messages",
            )


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


def written(
    messages: Sequence[Message], tools: list[Json], tokenizer: Tokenizer
) -> tuple[Prompt, int | None]:
    """Write a conversation with tools by the chat template, as tokens; others stay messages.

    Returns:
        The prompt, and the number of its tokens before the generation prompt, if it is written.

    Raises:
        TypeError: see ``read_messages``.
        ValueError: the template refuses it.
    """
    if not tools:
        return messages, None
    from jinja2 import TemplateError

    if not isinstance(tokenizer, ChatTokenizer):
        raise ValueError("tools need a tokenizer with a chat template")
    blind = Sight(otherwise="images beside tools are not served")
    checked = joined(read_messages(messages, tokenizer.chat_template, blind))
    is_continued = checked[-1]["role"] == "assistant"
    write = partial(tokenizer.apply_chat_template, checked, tools=tools, return_dict=False)
    try:
        alone: list[int] = write(continue_final_message=is_continued)
        tokens: list[int] = alone if is_continued else write(add_generation_prompt=True)
    except (TemplateError, TypeError) as error:
        raise ValueError(f"the chat template refuses the conversation: {error}") from error
    length = num_alike(alone, tokens)
    return tokens, length if 0 < length < len(tokens) else None
