"""Form of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence

from torch_hybrid.http.answer import Form, Json
from torch_hybrid.http.call import Call, Piece
from torch_hybrid.sampling import TokenLogprob
from torch_hybrid.serving.detokenizer import Tokenizer


class CompletionForm(Form):
    """Form of completions; where they echo, their texts begin with the prompts."""

    prefix = "cmpl"

    def __init__(self, call: Call, model: str, tokenizer: Tokenizer, *, echoes: bool) -> None:
        super().__init__(call, model, tokenizer)
        self._echoes = echoes
        self._offsets = [0] * len(call.requests)  # characters of the tokens told so far

    def opening(self) -> list[Json]:
        """Make a chunk of each prompt, where prompts are echoed."""
        count = len(self.call.requests) if self._echoes else 0
        return [self.chunk(self._choice(n, *self._echo(n), None)) for n in range(count)]

    def piece(self, piece: Piece) -> Json:
        """Make the chunk of a piece."""
        n = piece.choice
        if self.call.is_empty:
            return self.chunk(self._choice(n, "", None, piece.end))
        table = self._table(n, self.next_logprobs(n, piece.num_tokens))
        return self.chunk(self._choice(n, piece.text, table, piece.end))

    def chunk(self, *choices: Json) -> Json:
        """Make a chunk, which is like a whole answer."""
        return {**self.head, "object": "text_completion", "choices": choices}

    def whole(self) -> Json:
        """Make the whole answer, when all requests have ended."""
        choices = []
        for n, output in enumerate(self.call.outputs):
            text, table = self._echo(n) if self._echoes else ("", None)
            if not self.call.is_empty:
                text += output.text or ""
                own = self._table(n, self.next_logprobs(n, len(output.tokens)))
                table = own and {name: (table or {}).get(name, []) + own[name] for name in own}
            choices.append(self._choice(n, text, table, output.finish_reason))
        return self.chunk(*choices)

    def _choice(self, n: int, text: str, table: Json | None, end: str | None) -> Json:
        return {"index": n, "text": text, "logprobs": table, "finish_reason": end}

    def _echo(self, n: int) -> tuple[str, Json | None]:
        """Decode a prompt; its first token has no log-probability."""
        request = self.call.requests[n]
        first = TokenLogprob(request.prompt[0], 0.0)
        table = self._table(n, [first, *request.prompt_logprobs] if self.has_logprobs else None)
        if table is not None:
            table["token_logprobs"][0] = table["top_logprobs"][0] = None
        return self.text_of(*request.prompt), table

    def _table(self, n: int, entries: Sequence[TokenLogprob] | None) -> Json | None:
        if entries is None:
            return None
        texts = [self.text_of(entry.token) for entry in entries]
        offsets = [self._offsets[n]]
        for text in texts:
            offsets.append(offsets[-1] + len(text))
        self._offsets[n] = offsets.pop()
        return {
            "tokens": texts,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """List the likeliest tokens; the token itself is among them, likely or not."""
        listed = {self.text_of(token): logprob for token, logprob in reversed(entry.top)}
        return listed | {self.text_of(entry.token): entry.logprob}
