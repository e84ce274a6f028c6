"""Several processes that run one function together, with a hard limit on their time."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

# Children are forked from a process that has imported all of it, has compiled once, and has started
# no thread.
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(
    [
        "tests.parallel.jobs",
        "torch._dynamo",
        "torch._inductor.compile_fx",
        "transformers.models.qwen3_next.modeling_qwen3_next",
        "tests.parallel.warmed",
    ]
)


@dataclass(frozen=True)
class Ended:
    """How one process ended: a result, or what it raised, or neither if it died."""

    result: Any = None
    error: str | None = None
    seconds: float = 0.0


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    limit_s: float = 120.0,
    timeout_s: float = 60.0,
    left_out: Collection[int] = (),
    backend: str = "gloo",
) -> list[Ended]:
    """``function(*args)`` in every process of a group.

    Args:
        function: of a module, so that it can be sent.
        limit_s: after it, processes are killed and the test fails.
        timeout_s: of the group's operations.
        left_out: ranks whose end is not waited for.
        backend: of the group; with "nccl" every rank has a GPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        pipes, processes = [], []
        # CUDA does not go through a fork, and what is compiled beforehand starts it.
        context = multiprocessing.get_context("spawn") if backend == "nccl" else FORKSERVER
        for rank in range(num_ranks):
            ours, theirs = context.Pipe(duplex=False)
            options = (theirs, store, rank, num_ranks, timeout_s, backend, function, args)
            processes.append(context.Process(target=_run, args=options, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            return _collect(pipes, left_out, time.monotonic() + limit_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def results(ended: list[Ended]) -> list[Any]:
    """The results, where nothing was to go wrong."""
    errors = [end.error for end in ended if end.error]
    assert not errors, errors[0]
    return [end.result for end in ended]


def _collect(pipes: list[Connection], left_out: Collection[int], deadline: float) -> list[Ended]:
    ended = dict.fromkeys(left_out, Ended(error="not waited for"))
    while len(ended) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in ended]
        ready = wait(waiting, timeout=deadline - time.monotonic())
        assert ready, f"ranks {[r for r in range(len(pipes)) if r not in ended]} hang"
        for pipe in ready:
            try:
                ended[pipes.index(pipe)] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                ended[pipes.index(pipe)] = Ended(error="died")
    return [ended[rank] for rank in range(len(pipes))]


def _run(
    pipe: Connection,
    store: str,
    rank: int,
    num_ranks: int,
    timeout_s: float,
    backend: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    timeout = timedelta(seconds=timeout_s)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=store, rank=rank, world_size=num_ranks, timeout=timeout
    )
    start = time.monotonic()
    try:
        ended = Ended(function(*args), seconds=time.monotonic() - start)
    except Exception:
        ended = Ended(error=traceback.format_exc(), seconds=time.monotonic() - start)
    # Plain pickle: the pipe's own would keep tensors in this process.
    pipe.send_bytes(pickle.dumps(ended))
    # Without the group's own shutdown, which would wait for ranks that are gone.
    os._exit(0)
