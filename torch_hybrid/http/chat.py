"""Form of /v1/chat/completions, and checks of its messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch_hybrid.http.answer import Form, Json
from torch_hybrid.http.call import Piece
from torch_hybrid.http.errors import HttpError
from torch_hybrid.sampling import TokenLogprob


class ChatForm(Form):
    """Form of chats: messages, or deltas of them."""

    prefix = "chatcmpl"

    def opening(self) -> list[Json]:
        """Make the chunks that name the speaker of each choice."""
        said = {"role": "assistant", "content": ""}
        count = len(self.call.requests)
        return [self.chunk(_choice(n, None, None, delta=said)) for n in range(count)]

    def piece(self, piece: Piece) -> Json:
        """Make the chunk of a piece."""
        said = {"content": piece.text} if piece.text else {}
        told = self._told(piece.choice, piece.num_tokens)
        return self.chunk(_choice(piece.choice, told, piece.end, delta=said))

    def chunk(self, *choices: Json) -> Json:
        """Make a chunk."""
        return {**self.head, "object": "chat.completion.chunk", "choices": choices}

    def whole(self) -> Json:
        """Make the whole answer, when all requests have ended."""
        choices = []
        for n, output in enumerate(self.call.outputs):
            said = {"role": "assistant", "content": output.text, "refusal": None}
            told = self._told(n, len(output.tokens))
            choices.append(_choice(n, told, output.finish_reason, message=said))
        return {**self.head, "object": "chat.completion", "choices": choices}

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
