"""Ray Serve application: replicas of the app, and a router that keeps conversations together.

    serve.run(application(open_engine, model="name", max_replicas=4))

The router hands a request on to one replica of the model, and its answer back as it comes. Requests
of one conversation begin alike: they go to the replica whose prefix cache has their beginning, by
consistent hashing, or to the next one where that is full. Ray starts and ends replicas by their
open requests, and replaces one whose steps fail. /metrics and /health are those of any replica.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from hashlib import sha256
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Scope

from torch_hybrid.http.app import create_app
from torch_hybrid.serving.engine import Engine

OpenEngine = Callable[[], Engine]
_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
_SCOPE = ("type", "http_version", "method", "scheme", "path", "query_string", "headers")
_MOST_CHARACTERS = 256  # or tokens, of a prompt that is no conversation
_INSTRUCTIONS = ("system", "developer")


def application(
    open_engine: OpenEngine,
    *,
    model: str,
    min_replicas: int = 1,
    max_replicas: int = 1,
    target_requests: int = 16,
    actor_options: Mapping[str, Any] | None = None,
    api_key: str | None = None,
) -> serve.Application:
    """Make a Ray Serve application of an engine; ``serve.run`` starts it.

    Args:
        open_engine: makes an engine with a tokenizer, in each replica; Ray pickles it.
        model: name under which the model is served.
        min_replicas, max_replicas: between so many are kept.
        target_requests: open requests of a replica above which Ray adds one; four times as many
            are the most that a replica takes.
        actor_options: resources of a replica, such as ``{"num_gpus": 1}``.
        api_key: key that requests must bear; None asks for none.
    """
    replicas = serve.deployment(
        Replica,
        name="replica",
        ray_actor_options=dict(actor_options or {}),
        max_ongoing_requests=4 * target_requests,
        autoscaling_config=AutoscalingConfig(
            min_replicas=min_replicas,
            max_replicas=max_replicas,
            target_ongoing_requests=target_requests,
        ),
        request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
    ).bind(open_engine, model, api_key)
    most = 4 * target_requests * max_replicas
    return serve.deployment(Router, name="router", max_ongoing_requests=most).bind(replicas)


class Router:
    """Router of requests to the replicas of a model."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas

    async def __call__(self, request: Request) -> Response:
        """Hand a request on; Ray cancels what is left of it when the client leaves."""
        body = await request.body()
        scope = {name: request.scope[name] for name in _SCOPE}
        handle = self._replicas.options(stream=True, session_id=conversation_of(body))
        messages = aiter(handle.serve.remote(scope, body))
        start = await anext(messages)
        response = StreamingResponse(_bodies(messages), start["status"])
        response.raw_headers = list(start["headers"])
        return response


class Replica:
    """Replica of the app, which is ready when its model is loaded."""

    async def __init__(self, open_engine: OpenEngine, model: str, key: str | None) -> None:  # type: ignore[misc]
        self._app = create_app(open_engine, model=model, api_key=key)
        self._stepper = self._app.state.stepper
        self._stepping = self._app.router.lifespan_context(self._app)
        await self._stepping.__aenter__()
        await asyncio.wrap_future(self._stepper.loaded)

    def check_health(self) -> None:
        """Raise RuntimeError if the last steps failed; Ray replaces the replica then."""
        if self._stepper.illness is not None:
            raise RuntimeError(self._stepper.illness)

    async def serve(self, scope: Scope, body: bytes) -> AsyncIterator[Message]:
        """Serve a request; yield the messages of its answer."""
        requests: list[Message] = [{"type": "http.request", "body": body}]
        answers: asyncio.Queue[Message | None] = asyncio.Queue()

        async def receive() -> Message:
            return requests.pop() if requests else await asyncio.Future()

        async def answer() -> None:
            try:
                await self._app(scope, receive, answers.put)
            finally:
                answers.put_nowait(None)

        work = asyncio.ensure_future(answer())
        try:
            while (message := await answers.get()) is not None:
                yield message
        finally:
            work.cancel()


async def _bodies(messages: AsyncIterator[Message]) -> AsyncIterator[bytes]:
    async for message in messages:
        yield message["body"]


def conversation_of(body: bytes) -> str:
    """Name the conversation of a body by its beginning, which later turns repeat; "" has none."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    prompt = given.get("prompt") if isinstance(given, dict) else None
    messages = given.get("messages") if isinstance(given, dict) else None
    if isinstance(messages, list):  # up to the first one that is no instruction for all users
        roles = [message.get("role") if isinstance(message, dict) else "" for message in messages]
        at = next((n for n, role in enumerate(roles) if role not in _INSTRUCTIONS), len(roles))
        prompt = messages[: at + 1]
    elif isinstance(prompt, str | list):
        prompt = prompt[:_MOST_CHARACTERS]
    return sha256(json.dumps(prompt).encode()).hexdigest() if prompt else ""
