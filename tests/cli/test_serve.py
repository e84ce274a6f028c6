"""``torch-hybrid serve``: mistakes are one message; what it serves is in ``tests/http``."""

import signal
import socket

import pytest

pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")


def test_an_address_that_is_taken_is_told_before_anything_is_loaded(run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = run("serve", "nowhere", "--port", port)
    assert code == 2
    assert f"cannot listen on 127.0.0.1:{port}" in err


def test_an_error_of_loading_ends_the_server(run, tmp_path):
    before = signal.getsignal(signal.SIGINT)
    code, _, err = run("serve", tmp_path, "--port", 0)
    assert code == 2
    assert "listening on http://127.0.0.1:" in err
    assert str(tmp_path) in err.splitlines()[-1]
    assert signal.getsignal(signal.SIGINT) is before


def test_ranks_are_those_of_torchrun(run):
    code, _, err = run("serve", "nowhere", "--ranks")
    assert code == 2
    assert "--ranks shares the model among the processes of torchrun" in err
