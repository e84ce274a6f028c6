"""Form of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence

from torch_hybrid.http.answer import Form, Json
from torch_hybrid.http.call import Call, Piece
from torch_hybrid.sampling import TokenLogprob
from torch_hybrid.serving.detokenizer import Tokenizer


class CompletionForm(Form):
    """Form of completions; where they echo, their texts begin with the prompts."""

    prefix, name, chunk_name = "cmpl", "text_completion", "text_completion"

    def __init__(self, call: Call, model: str, tokenizer: Tokenizer, *, echoes: bool) -> None:
        super().__init__(call, model, tokenizer)
        self._to_echo = {*range(len(call.requests))} if echoes else set()
        self._offsets = [0] * len(call.requests)  # characters of the tokens told so far

    def choice(self, piece: Piece) -> Json:
        """Make the choice of a piece's chunk; the first one of a request echoes its prompt."""
        n = piece.choice
        echo = self._echo(n) if n in self._to_echo else None
        entries = self.next_logprobs(n, piece.num_tokens)
        choice = self._choice(n, piece.text, entries, piece.end)
        if echo is not None:
            self._to_echo.remove(n)
            choice["text"] = echo["text"] + choice["text"]
            for name, values in (echo["logprobs"] or {}).items():
                choice["logprobs"][name][:0] = values
        return choice

    def _echo(self, n: int) -> Json:
        """Make a choice of a prompt; its first token has no log-probability."""
        request = self.call.requests[n]
        entries = [TokenLogprob(request.prompt[0], 0.0), *request.prompt_logprobs]
        text = self.text_of(*request.prompt)
        choice = self._choice(n, text, entries if self.has_logprobs else None, None)
        if (told := choice["logprobs"]) is not None:
            told["token_logprobs"][0] = told["top_logprobs"][0] = None
        return choice

    def _choice(
        self, n: int, text: str, entries: Sequence[TokenLogprob] | None, end: str | None
    ) -> Json:
        told = None if entries is None else self._table(n, entries)
        return {"index": n, "text": text, "logprobs": told, "finish_reason": end}

    def _table(self, n: int, entries: Sequence[TokenLogprob]) -> Json:
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
