"""OpenAI's routes in front of an engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from importlib.resources import files
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from torch_hybrid.errors import PromptTooLongError, UnsupportedError
from torch_hybrid.http.answer import Answer, Form, Json
from torch_hybrid.http.call import Call
from torch_hybrid.http.chat import ChatForm, check_images, read_calls, with_variables
from torch_hybrid.http.completions import CompletionForm
from torch_hybrid.http.errors import HttpError, refuse
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
from torch_hybrid.http.splitting import (
    Splitter,
    hides_borders,
    show_special,
    thinking_of,
)
from torch_hybrid.http.stepping import Stepper
from torch_hybrid.http.tools import THOUGHTS
from torch_hybrid.sampling import Sampling
from torch_hybrid.serving.detokenizer import Tokenizer
from torch_hybrid.serving.engine import Engine
from torch_hybrid.serving.prompts import Prompt, message_tokens, prompt_tokens, template_of
from torch_hybrid.serving.request import Request as Pending

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
) -> Starlette:
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
    guard = Middleware(Guard, api_key=api_key, max_body=max_body)
    every = ["*"]
    cors = Middleware(
        CORSMiddleware, allow_origins=origins, allow_methods=every, allow_headers=every
    )
    app = Starlette(
        routes=[
            Route("/", service.page),
            Route("/health", service.health),
            Route("/metrics", service.metrics),
            Route("/v1/models", service.models),
            Route("/v1/models/{name:path}", service.model),
            Route("/v1/completions", service.complete, methods=["POST"]),
            Route("/v1/chat/completions", service.chat, methods=["POST"]),
            Route("/tokenize", service.tokenize, methods=["POST"]),
            Route("/detokenize", service.detokenize, methods=["POST"]),
        ],
        middleware=[cors, guard] if origins else [guard],
        exception_handlers={HTTPException: refuse, Exception: refuse},
        lifespan=service.lifespan,
    )
    app.state.stepper, app.state.ended = service.stepper, service.stepper.ended
    return app


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
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Step while the server runs."""
        self.stepper.start()
        yield
        await self.stepper.close()
        self._encoder.shutdown(wait=False)

    async def page(self, _: Request) -> Response:
        """Serve the page, which asks for the key itself."""
        return HTMLResponse((files("torch_hybrid.http") / "page.html").read_text("utf-8"))

    async def health(self, _: Request) -> Response:
        """Tell whether requests can be served now, or what keeps the server from it."""
        illness = self.stepper.illness
        return JSONResponse({"status": illness or "ok"}, 503 if illness else 200)

    async def metrics(self, _: Request) -> Response:
        """Write all metrics; the engine's counts may wait for a step to end."""
        text = await asyncio.to_thread(generate_latest, self.stepper.metrics.registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def models(self, _: Request) -> Response:
        """List the model and its adapters."""
        return JSONResponse({"object": "list", "data": [*map(self._model, self._names)]})

    async def model(self, request: Request) -> Response:
        """Describe the model, or one of its adapters."""
        name = request.path_params["name"]
        self._check_model(name)
        return JSONResponse(self._model(name))

    async def complete(self, request: Request) -> Response:
        """Continue prompts."""
        body = await self._read(CompletionBody, request)
        told = body.logprobs if body.echo else None
        options = {"logprobs": body.logprobs, "prompt_logprobs": told, "grammar": body.grammar()}
        sampling = self._sampling(body, len(body.prompts), body.max_tokens, **options)
        prepare = self._prepare_by(body)
        firsts = await self._encode(lambda: [prepare(each, sampling) for each in body.prompts])
        is_empty = body.max_tokens == 0
        call = Call(request.state.request_id, firsts, self._max_wait_s, is_empty=is_empty)
        form = CompletionForm(call, body.model or self._name, self._tokenizer, echoes=body.echo)
        return self._answer(body, form)

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        body = await self._read(ChatBody, request)
        check_images(body.messages, has_variables=bool(body.variables))
        most = body.max_completion_tokens or body.max_tokens
        num_top = (body.top_logprobs or 0) if body.logprobs else None
        sampling = self._sampling(body, 1, most, logprobs=num_top)
        first, make_splitter = await self._encode(lambda: self._prepare_chat(body, sampling))
        call = Call(request.state.request_id, [first], self._max_wait_s)
        form = ChatForm(call, body.model or self._name, self._tokenizer, make_splitter)
        return self._answer(body, form)

    async def tokenize(self, request: Request) -> Response:
        """Encode a text, or a conversation by its template."""
        body = await self._read(TokenizeBody, request)
        prompt: Prompt | None = body.prompt if body.messages is None else body.messages
        if prompt is None:
            raise HttpError(400, "you must provide prompt or messages", param="prompt")
        tokens = await self._encode(partial(self.stepper.engine.encode, prompt))
        room = self.stepper.engine.runner.max_seq_len
        return JSONResponse({"count": len(tokens), "max_model_len": room, "tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        """Decode tokens, special ones included."""
        tokens = (await self._read(DetokenizeBody, request)).tokens
        last = self.stepper.engine.runner.vocab_size - 1
        if wrong := [token for token in tokens if not 0 <= token <= last]:
            expected = f"token ids must be within 0 and {last}, got {wrong[0]}"
            raise HttpError(400, expected, param="tokens")
        prompt = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": prompt})

    def _open(self) -> Engine:
        """Make the engine, in its thread; its adapters and the model need names of their own."""
        engine = self._open_engine()
        if engine.tokenizer is None:
            raise ValueError("a server needs an engine with a tokenizer, got none")
        if self._name in engine.adapters:
            raise ValueError(f"the model and an adapter are both called {self._name!r}")
        return engine

    async def _read(self, kind: type[BodyT], request: Request) -> BodyT:
        body = read(kind, request.state.body, request.headers.get("content-type", ""))
        self._check_model(body.model)
        return body

    def _sampling(
        self, body: Generation, num_prompts: int, most: int | None, **options: Any
    ) -> Sampling:
        engine = self.stepper.engine
        limit, count = engine.max_waiting, num_prompts * body.n
        if limit is not None and count > limit:
            raise HttpError(400, f"a call may ask for {limit} outputs, got {count}", param="n")
        room = engine.runner.max_seq_len
        return body.sampling(self.stepper.defaults, room, most=most, **options)

    def _prepare_by(self, body: Generation) -> Callable[[Prompt, Sampling], Pending]:
        """Make the function that encodes a prompt of a body."""
        adapter = None if body.model == self._name else body.model
        return partial(self.stepper.engine.prepare, stream=body.stream, adapter=adapter)

    def _prepare_chat(
        self, body: ChatBody, sampling: Sampling
    ) -> tuple[Pending, Callable[[], Splitter]]:
        """Encode a conversation, and plan how its outputs are split; in the encoding thread."""
        tokenizer, prepare = self._tokenizer, self._prepare_by(body)
        template = str(template_of(tokenizer) or "")
        form, grammar = body.calls_format(template), body.grammar()
        prompt, message_end = self._written(body)
        first = prepare(prompt, sampling)
        prompt_end = tokenizer.decode(list(first.prompt[-16:]), skip_special_tokens=False)
        thinking = thinking_of(template, prompt_end, form)
        if grammar is not None:  # without open thoughts it begins at once
            thinking = "open" if thinking == "open" else "none"
            end = (THOUGHTS if form is None else form.thoughts)[1]
            grammar = replace(grammar, after=end if thinking == "open" else None)
            first = prepare(prompt, replace(sampling, grammar=grammar))
        for sample in first.samples if message_end is not None else ():
            sample.message_end = message_end
        if (form is not None or thinking != "none") and hides_borders(tokenizer, form):
            show_special(first)
        most = (None if body.parallel_tool_calls else 1) if body.usable else 0
        return first, partial(Splitter, thinking, form, body.schemas, most)

    def _written(self, body: ChatBody) -> tuple[Prompt, int | None]:
        """Write a conversation with variables as tokens; a number may be the next turn's too.

        A conversation without variables is left to the engine.
        """
        messages = read_calls(body.messages)
        if not body.variables:
            return messages, None
        tokenizer = with_variables(self._tokenizer, body.variables)
        tokens = prompt_tokens(messages, tokenizer)
        return tokens, message_tokens(messages, tokens, tokenizer)

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
        if name not in (None, *self._names):
            served = ", ".join(map(repr, self._names))
            told = f"The model `{name}` does not exist: {served} is served"
            raise HttpError(404, told, param="model", code="model_not_found")

    @property
    def _names(self) -> list[str]:
        """Names of the model and its adapters."""
        return [self._name, *self.stepper.engine.adapters]

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
