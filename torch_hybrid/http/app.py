"""OpenAI's routes in front of an engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from importlib.resources import files
from typing import TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from torch_hybrid.errors import PromptTooLongError, UnsupportedError
from torch_hybrid.http.answer import Answer, Form, Json
from torch_hybrid.http.call import Call
from torch_hybrid.http.chat import (
    BorderTokenizer,
    ChatForm,
    Reading,
    check_images,
    read_calls,
    written,
)
from torch_hybrid.http.completions import CompletionForm
from torch_hybrid.http.errors import HttpError
from torch_hybrid.http.guard import Guard
from torch_hybrid.http.protocol import (
    BodyT,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Generation,
    TokenizeBody,
    of_value,
    read,
)
from torch_hybrid.http.splitting import END_THINK, thinking_of
from torch_hybrid.http.stepping import Stepper
from torch_hybrid.sampling import Sampling
from torch_hybrid.serving.detokenizer import Tokenizer
from torch_hybrid.serving.engine import Engine
from torch_hybrid.serving.prompts import Prompt, template_of
from torch_hybrid.serving.request import Request as Pending

ONE_TOKEN = Sampling(max_new_tokens=1)
ResultT = TypeVar("ResultT")


def create_app(
    open_engine: Callable[[], Engine],
    *,
    model: str,
    api_key: str | None = None,
    max_body: int = 32 * 2**20,
    max_wait_s: float = 300.0,
    origins: Sequence[str] = (),
    log_requests: bool = False,
) -> FastAPI:
    """Make an ASGI app that serves an engine by OpenAI's API.

    Args:
        open_engine: makes the engine, in the thread that will step it; until it returns, requests
            are refused with 503. The engine needs a tokenizer; its ``max_waiting`` bounds the
            queue.
        model: name under which the model is served.
        api_key: key that requests must bear; None asks for none.
        max_body: most bytes of a request's body.
        max_wait_s: longest time that a request waits until it runs.
        origins: web sites whose pages may call the API.
        log_requests: log one line for each request: sizes and times, no texts.

    Returns:
        The app; ``state.ended`` is a Future that has the error, if one ended the thread.
    """
    service = _Service(open_engine, model, max_wait_s, log_requests)
    app = FastAPI(lifespan=service.lifespan, openapi_url=None)
    app.state.stepper, app.state.ended = service.stepper, service.stepper.ended
    app.add_middleware(Guard, api_key=api_key, max_body=max_body)
    if origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
        )
    for kind in (HttpError, HTTPException, Exception):
        app.add_exception_handler(kind, _refuse)
    for path, method, route in (
        ("/", "GET", service.page),
        ("/health", "GET", service.health),
        ("/metrics", "GET", service.metrics),
        ("/v1/models", "GET", service.models),
        ("/v1/models/{name:path}", "GET", service.model),
        ("/v1/completions", "POST", service.complete),
        ("/v1/chat/completions", "POST", service.chat),
        ("/tokenize", "POST", service.tokenize),
        ("/detokenize", "POST", service.detokenize),
    ):
        app.add_api_route(path, route, methods=[method])
    return app


async def _refuse(_: Request, error: Exception) -> Response:
    """Answer an error with OpenAI's object."""
    if isinstance(error, HttpError):
        return error.response()
    status = error.status_code if isinstance(error, HTTPException) else 500
    return HttpError(status, HTTPStatus(status).phrase).response()


class _Service:
    """Routes of one server; see ``create_app``."""

    def __init__(
        self,
        open_engine: Callable[[], Engine],
        name: str,
        max_wait_s: float,
        log_requests: bool,
    ) -> None:
        self._open_engine, self._name, self._max_wait_s = open_engine, name, max_wait_s
        self._created = int(time.time())
        self.stepper = Stepper(self._open, name, logs=log_requests)
        # One thread: tokenizers may not encode in several, and steps need the processor more.
        self._encoder = ThreadPoolExecutor(1, "encoding")

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Step while the server runs."""
        self.stepper.start()
        yield
        await self.stepper.close()
        self._encoder.shutdown(wait=False)

    async def page(self) -> Response:
        """Serve the page, which asks for the key itself."""
        return HTMLResponse((files("torch_hybrid.http") / "page.html").read_text("utf-8"))

    async def health(self) -> Response:
        """Tell whether requests can be served now, or what keeps the server from it."""
        illness = self.stepper.illness
        return JSONResponse({"status": illness or "ok"}, 503 if illness else 200)

    async def metrics(self) -> Response:
        """Write all metrics; the engine's counts may wait for a step to end."""
        text = await asyncio.to_thread(generate_latest, self.stepper.metrics.registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def models(self) -> Json:
        """List the model and its adapters."""
        return {"object": "list", "data": [self._model(name) for name in self._names]}

    async def model(self, name: str) -> Json:
        """Describe the model, or one of its adapters."""
        self._check_model(name)
        return self._model(name)

    async def complete(self, request: Request) -> Response:
        """Continue prompts."""
        body = await self._read(CompletionBody, request)
        body.check()
        most, num_top = body.max_tokens, body.logprobs
        sampling = self._sampling(body, len(body.prompts), most, num_top)
        if body.echo:
            sampling = replace(sampling, prompt_logprobs=num_top)
        sampling = replace(sampling, grammar=body.grammar())
        prepare = partial(
            self.stepper.engine.prepare,
            sampling=sampling,
            stream=body.stream,
            adapter=self._adapter(body),
        )
        firsts = await self._encode(lambda: [prepare(prompt) for prompt in body.prompts])
        call = Call(request.state.request_id, firsts, self._max_wait_s, is_empty=most == 0)
        form = CompletionForm(call, body.model or self._name, self._tokenizer, echoes=body.echo)
        return self._answer(body, form)

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        body = await self._read(ChatBody, request)
        body.check()
        check_images(body.messages)
        most = body.max_completion_tokens or body.max_tokens
        num_top = (body.top_logprobs or 0) if body.logprobs else None
        sampling = self._sampling(body, 1, most, num_top)
        first, reading = await self._encode(lambda: self._prepare_chat(body, sampling))
        call = Call(request.state.request_id, [first], self._max_wait_s)
        name = body.model or self._name
        return self._answer(body, ChatForm(call, name, self._tokenizer, reading))

    async def tokenize(self, request: Request) -> Json:
        """Encode a text, or a conversation by its template."""
        body = await self._read(TokenizeBody, request)
        prompt: Prompt | None = body.prompt if body.messages is None else body.messages
        if prompt is None:
            raise HttpError(400, "you must provide prompt or messages", param="prompt")
        prepare = self.stepper.engine.prepare
        tokens = (await self._encode(lambda: prepare(prompt, ONE_TOKEN))).prompt
        return {
            "count": len(tokens),
            "max_model_len": self.stepper.engine.runner.max_seq_len,
            "tokens": tokens,
        }

    async def detokenize(self, request: Request) -> Json:
        """Decode tokens, special ones included."""
        tokens = (await self._read(DetokenizeBody, request)).tokens
        last = self.stepper.engine.runner.vocab_size - 1
        if wrong := [token for token in tokens if not 0 <= token <= last]:
            expected = f"token ids must be within 0 and {last}, got {wrong[0]}"
            raise HttpError(400, expected, param="tokens")
        return {"prompt": self._tokenizer.decode(tokens, skip_special_tokens=False)}

    def _open(self) -> Engine:
        """Make the engine, in its thread."""
        engine = self._open_engine()
        if engine.tokenizer is None:
            raise ValueError("a server needs an engine with a tokenizer, got none")
        return engine

    async def _read(self, kind: type[BodyT], request: Request) -> BodyT:
        body = read(kind, await request.body(), request.headers.get("content-type", ""))
        self._check_model(body.model)
        return body

    def _sampling(
        self, body: Generation, num_prompts: int, most: int | None, num_top: int | None
    ) -> Sampling:
        engine = self.stepper.engine
        limit, count = engine.max_waiting, num_prompts * (body.n or 1)
        if limit is not None and count > limit:
            raise HttpError(400, f"a call may ask for {limit} outputs, got {count}", param="n")
        room = engine.runner.max_seq_len
        return body.sampling(self.stepper.defaults, room, most=most, num_top=num_top)

    def _prepare_chat(self, body: ChatBody, sampling: Sampling) -> tuple[Pending, Reading]:
        """Encode a conversation, and plan how its outputs are split; in the encoding thread."""
        tokenizer = self._tokenizer
        prepare = partial(self.stepper.engine.prepare, adapter=self._adapter(body))
        template = str(template_of(tokenizer) or "")
        form, grammar = body.calls_format(template), body.grammar()
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools if body.asks_tools]
        prompt, message_end = written(read_calls(body.messages), tools, tokenizer)
        first = prepare(prompt, sampling, stream=body.stream)
        prompt_end = tokenizer.decode(list(first.prompt[-16:]), skip_special_tokens=False)
        thinking = thinking_of(template, prompt_end)
        if grammar is not None:  # without open thoughts it begins at once
            thinking = "open" if thinking == "open" else "none"
            grammar = replace(grammar, after=END_THINK if thinking == "open" else None)
            first = prepare(prompt, replace(sampling, grammar=grammar), stream=body.stream)
        if message_end is not None:  # where the next turn's prompt may still be the same
            for sample in first.samples:
                sample.message_end = message_end
        splits = form is not None or thinking != "none"
        return first, Reading(
            thinking=thinking,
            form=form,
            schemas=body.schemas,
            most_calls=None if body.parallel_tool_calls else 1,
            tokenizer=BorderTokenizer.of(tokenizer, form) if splits else None,
        )

    def _answer(self, body: Generation, form: Form) -> Response:
        shows_usage = body.stream_options.include_usage
        return Answer(form, self.stepper, streams=body.stream, shows_usage=shows_usage)

    async def _encode(self, encode: Callable[[], ResultT]) -> ResultT:
        """Encode in the thread for it; a prompt that cannot be served is the client's mistake."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._encoder, encode)
        except PromptTooLongError as error:
            room = self.stepper.engine.runner.max_seq_len
            told = (
                f"This model's maximum context length is {room} tokens, and the prompt has "
                f"{error.num_tokens}"
            )
            raise HttpError(400, told, code="context_length_exceeded") from error
        except (TypeError, ValueError, UnsupportedError) as error:
            raise of_value(error) from error

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._name, *self.stepper.engine.adapters):
            served = ", ".join(map(repr, self._names))
            told = f"The model `{name}` does not exist: {served} is served"
            raise HttpError(404, told, param="model", code="model_not_found")

    @property
    def _names(self) -> list[str]:
        """Names of the model and its adapters."""
        return [self._name, *self.stepper.engine.adapters]

    def _adapter(self, body: Generation) -> str | None:
        """Return the adapter that a request's model names; None for the base."""
        return None if body.model == self._name else body.model

    def _model(self, name: str) -> Json:
        room = self.stepper.engine.runner.max_seq_len
        about: Json = {"object": "model", "owned_by": "torch_hybrid", "max_model_len": room}
        if name != self._name:
            about["parent"] = self._name
        return {"id": name, "created": self._created, **about}

    @property
    def _tokenizer(self) -> Tokenizer:
        tokenizer = self.stepper.engine.tokenizer
        assert tokenizer is not None
        return tokenizer
