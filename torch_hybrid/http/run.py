"""Server process: uvicorn around the app; SIGTERM ends it when running requests have ended."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from concurrent.futures import Future

import uvicorn
from starlette.applications import Starlette

from torch_hybrid.http.ranks import follow
from torch_hybrid.serving.engine import Engine

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run(
    app: Starlette, *, host: str, port: int, drain_s: int, listens: Callable[[str], object]
) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Args:
        app: what ``create_app`` made.
        host: name or address to listen on.
        port: 0 takes a free one.
        drain_s: longest time in seconds that running requests may take after the signal.
        listens: called with the server's URL when it listens; the model is loaded after that.

    Raises:
        ValueError: the address cannot be listened on.
        Exception: what ended the stepping thread, such as an error while it loaded the model.
    """
    ended: Future[None] = app.state.ended
    config = uvicorn.Config(app, log_config=None, access_log=False, server_header=False)
    config.timeout_graceful_shutdown = drain_s
    server = uvicorn.Server(config)
    ended.add_done_callback(lambda _: server.handle_exit(signal.SIGTERM, None))
    try:
        family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ValueError(f"cannot listen on {host}:{port}: {error}") from error
    with listener:
        # uvicorn raises them again at its end, for whoever handled them before.
        handlers = {number: signal.signal(number, _ignore) for number in SIGNALS}
        host, port = listener.getsockname()[:2]
        listens(f"http://{f'[{host}]' if ':' in host else host}:{port}")
        try:
            server.run(sockets=[listener])
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    if ended.done():
        ended.result()


def run_follower(open_engine: Callable[[], Engine]) -> None:
    """Follow rank 0 as another rank; signals are left to rank 0, whose end is this one's too."""
    for number in SIGNALS:
        signal.signal(number, _ignore)
    follow(open_engine())


def _ignore(*_: object) -> None:
    pass
