"""Backend of Dynamo: its frontend speaks HTTP, and sends tokens to this worker.

    python -m torch_hybrid.http.dynamo PATH [options of ``serve`` and of a Dynamo worker]

The frontend applies the chat template, finds stop texts, and reads tools and thoughts. The worker
steps the engine in a thread of its own, as the server does. Disaggregation is not offered: a
hybrid's recurrent state has no place in the blocks that workers exchange.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from typing import Any

import click
from dynamo._core import Context
from dynamo.common.backend import (
    EngineConfig,
    GenerateChunk,
    GenerateRequest,
    LLMEngine,
    LlmRegistration,
    WorkerConfig,
)
from dynamo.common.backend.metrics import register_engine_registry
from dynamo.common.backend.run import run
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument

from torch_hybrid.cli import options as command_line
from torch_hybrid.cli.commands import open_for_serving
from torch_hybrid.errors import PromptTooLongError, UnsupportedError
from torch_hybrid.http.call import Call, Piece
from torch_hybrid.http.errors import HttpError
from torch_hybrid.http.protocol import Generation
from torch_hybrid.http.stepping import Stepper
from torch_hybrid.sampling import Sampling
from torch_hybrid.serving.engine import Engine
from torch_hybrid.serving.request import Request

_MAX_WAITING, _MAX_WAIT_S = 4096, 3600.0  # the frontend has limits of its own
# What the frontend does itself, and its fields without a meaning here.
_ITS_OWN = {"stop", "best_of", "use_beam_search", "length_penalty", "include_stop_str_in_output"}
_NAMES = {"guided_decoding": "structured_outputs", "stop_token_ids_hidden": "stop_token_ids"}


class Backend(LLMEngine):  # type: ignore[misc]
    """Worker with one engine."""

    def __init__(self, open_engine: Callable[[], Engine], model: str, served: str | None) -> None:
        self._model, self._served = model, served or model
        self._stepper = Stepper(open_engine, self._served)
        self._calls: dict[str, Call] = {}  # by the ids of their contexts
        self._is_started = False

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Backend, WorkerConfig]:
        """Make a worker of a command line, which is not started yet."""
        made: tuple[Backend, WorkerConfig] = _from_args.main(argv, standalone_mode=False)
        return made

    async def start(self, worker_id: int) -> EngineConfig:
        """Load the model; raise EngineShutdown if it cannot be."""
        self._stepper.start()
        self._is_started = True
        try:
            await asyncio.wrap_future(self._stepper.loaded)
        except Exception as error:
            raise EngineShutdown(f"the model cannot be loaded: {error}") from error
        runner = self._stepper.engine.runner
        sizes = LlmRegistration(
            context_length=runner.max_seq_len,
            kv_cache_block_size=runner.page_size,
            total_kv_blocks=self._stepper.engine.stats().num_pages,
            max_num_seqs=runner.max_seqs,
            max_num_batched_tokens=runner.max_tokens,
        )
        return EngineConfig(model=self._model, served_model_name=self._served, llm=sizes)

    async def generate(
        self, request: GenerateRequest, context: Context
    ) -> AsyncGenerator[GenerateChunk, None]:
        """Yield tokens as they come; raise InvalidArgument for a request that is refused."""
        call = Call(context.id(), [await self._prepare(request)], _MAX_WAIT_S)
        self._calls[call.id] = call
        self._stepper.open(call)
        num_told = [0] * len(call.requests)
        try:
            async for pieces in call.pieces():
                for piece in pieces:
                    yield _chunk(call, piece, num_told[piece.choice])
                    num_told[piece.choice] += piece.num_tokens
        except HttpError as error:
            if context.is_stopped():
                return
            kind = InvalidArgument if error.status_code < 500 else EngineShutdown
            raise kind(str(error)) from error
        finally:
            del self._calls[call.id]
            self._stepper.leave(call)

    async def abort(self, context: Context) -> None:
        """End a request whose client has left."""
        if (call := self._calls.get(context.id())) is not None:
            call.fail(HttpError(503, "the client left"))

    async def cleanup(self) -> None:
        """End the thread."""
        if self._is_started:
            self._is_started = False
            await self._stepper.close()

    async def register_prometheus(self, metrics: Any) -> None:
        """Show the engine's metrics among the worker's."""
        register_engine_registry(metrics, self._stepper.metrics.registry)

    async def _prepare(self, request: GenerateRequest) -> Request:
        """Make the engine's request, in a thread: a grammar may take a while to compile."""
        engine = self._stepper.engine
        try:
            sampling = _sampling(request, engine, self._stepper.defaults)
            return await asyncio.to_thread(engine.prepare, request["token_ids"], sampling)
        except (HttpError, PromptTooLongError, UnsupportedError, ValueError) as error:
            raise InvalidArgument(str(error)) from error


def _sampling(request: Mapping[str, Any], engine: Engine, defaults: Sampling) -> Sampling:
    """Convert the options of a request; one that is not known is refused."""
    groups = [request.get("sampling_options") or {}, request.get("stop_conditions") or {}]
    given: dict[str, Any] = {}
    for name, value in (item for group in groups for item in group.items()):
        if name not in _ITS_OWN and value not in (None, []):
            given[_NAMES.get(name, name)] = value
    body = Generation.model_validate(given)
    num_top = (request.get("output_options") or {}).get("logprobs")
    room = engine.runner.max_seq_len
    options = {"logprobs": num_top, "grammar": body.grammar()}
    return body.sampling(defaults, room, most=body.max_tokens, **options)


def _chunk(call: Call, piece: Piece, start: int) -> GenerateChunk:
    """Make the chunk of a piece."""
    request = call.requests[piece.choice]
    part = slice(start, start + piece.num_tokens)
    chunk: GenerateChunk = {"token_ids": request.tokens[part], "index": piece.choice}
    if request.sampling.logprobs is not None:
        entries = request.logprobs[part]
        chunk["log_probs"] = [entry.logprob for entry in entries]
        chunk["top_logprobs"] = [
            [
                {"rank": rank, "token_id": token, "token": f"token_id:{token}", "logprob": logprob}
                for rank, (token, logprob) in enumerate(entry.top, 1)
            ]
            for entry in entries
        ]
    if piece.end is not None:
        chunk["finish_reason"] = piece.end
        if len(call.requests) == 1:
            chunk["completion_usage"] = call.usage
    return chunk


@click.command()
@command_line.model_options
@click.option("--served-model-name")
@click.option("--namespace", default="dynamo", show_default=True)
@click.option("--component", default="backend", show_default=True)
@click.option("--discovery-backend", default="etcd", show_default=True)
@click.option("--tool-call-parser")
@click.option("--reasoning-parser")
@command_line.prefix_cache_option(default=16)
@command_line.speculate_option
def _from_args(
    options: command_line.ModelOptions,
    served_model_name: str | None,
    prefix_cache: int,
    speculate: str | None,
    **worker: str | None,
) -> tuple[Backend, WorkerConfig]:
    config = WorkerConfig(model_name=options.model, served_model_name=served_model_name, **worker)
    open_engine = partial(open_for_serving, options, prefix_cache, speculate, _MAX_WAITING)
    return Backend(open_engine, options.model, served_model_name), config


if __name__ == "__main__":
    run(Backend)
