"""compile="background": eager steps first, compiled ones as they come, and nothing left behind."""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._inductor.async_compile import AsyncCompile
from torch.fx import Graph

import torch_hybrid as th
from tests.graphs.as_traced import run_as_traced
from tests.tiny_models import COMPILED_SIZES, make_hybrid
from torch_hybrid.graphs.compiling import forked
from torch_hybrid.graphs.passes import Pass
from torch_hybrid.graphs.runner import Runner
from torch_hybrid.graphs.stepping import background
from torch_hybrid.graphs.stepping.steps import be_alone
from torch_hybrid.ops.native.ahead import Builds

pytestmark = pytest.mark.skipif(not forked.can_fork(), reason="processes are forked on Linux")
DECODE: dict[str, Any] = {**COMPILED_SIZES, "prefill": False}
BOTH = DECODE | {"prefill": True}
PROMPTS = [list(range(2, 43)), [5, 7, 11], [4]]


@pytest.fixture(scope="module")
def model() -> th.HybridModel:
    return make_hybrid()


def fail(graph: Graph) -> None:
    raise RuntimeError("no such luck\nand more lines of it")


def hang(graph: Graph) -> None:
    subprocess.run(["sleep", "1000"], check=True)  # as a compiler would


def greedy(runner: Runner, seqs: list[Any], tokens: list[int], count: int) -> list[list[int]]:
    """So many decode steps after these tokens, in turn, each fed the last one's."""
    served = [tokens]
    for _ in range(count):
        logits = runner.extend(seqs, [[token] for token in served[-1]])
        served.append(logits.argmax(-1).tolist())
    return served[1:]


def generated(engine: th.Engine) -> list[list[int]]:
    sampling = th.Sampling(max_new_tokens=8, ignore_eos=True)
    outputs = engine.generate(PROMPTS, sampling)
    return [output.tokens for output in sorted(outputs, key=lambda output: output.index)]


def ends(pid: int, within: float = 60.0) -> bool:
    """Whether a process group is gone, soon."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        try:
            os.killpg(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def child_of(runner: Runner) -> int:
    assert runner._beside is not None
    assert runner._beside._child is not None
    return runner._beside._child.pid


def state_of(pid: int) -> str:
    """A process's state, as proc(5) has it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.slow
def test_a_sequence_goes_on_where_its_steps_switch(tmp_path: Path):
    path = tmp_path / "steps"
    model = make_hybrid(num_hidden_layers=1, layer_types=["linear_attention"])
    runner = Runner(model, compile="background", artefact=path, **DECODE)
    seqs, first = runner.new_sequences(3), [3, 9, 27]
    served = greedy(runner, seqs, first, 6)
    report = runner.report()
    assert report.switches == background.Switches(seconds={}, num_eager=6, failed="")
    assert not report.graphs
    runner.warm_up()
    assert ends(child_of(runner))
    served += greedy(runner, seqs, served[-1], 6)
    report = runner.report()
    assert report.switches is not None
    assert report.switches.num_eager == 6
    assert report.switches.seconds["decode"] > 0
    assert report.graphs["decode"].is_loaded  # by this process, which traced nothing
    assert (report.recompiles, report.graph_breaks) == (0, 0)
    for compile in (False, True):
        other = Runner(model, compile=compile, **DECODE)
        assert greedy(other, other.new_sequences(3), first, 12) == served
    again = Runner(model, compile="background", artefact=path, **DECODE)
    again.warm_up()
    assert again._beside is not None
    assert again._beside._child is None, "all steps are in the artefact"
    assert greedy(again, again.new_sequences(3), first, 12) == served


def test_a_thread_compiles_where_no_process_can_be_forked(
    model: th.HybridModel, monkeypatch: pytest.MonkeyPatch
):
    """As on a GPU: requests that are under way go on, and steps are captured from then on."""
    expected = generated(th.Engine(Runner(model, compile=False, **BOTH)))
    monkeypatch.setattr(background, "can_fork", lambda: False)
    with run_as_traced():
        runner = Runner(model, compile="background", cuda_graphs="on", **BOTH)
        engine = th.Engine(runner)
        requests = [engine.submit(p, th.Sampling(max_new_tokens=8)) for p in PROMPTS]
        engine.step()
        assert not runner.report().captured_graphs
        runner.warm_up()
        while engine.has_unfinished:
            engine.step()
        assert generated(engine) == expected
    assert [request.output.tokens for request in requests if request.output] == expected
    report = runner.report()
    assert report.switches is not None
    assert set(report.switches.seconds) == set(runner.variants)
    assert report.captured_graphs
    assert (report.recompiles, report.graph_breaks) == (0, 0)


def test_the_model_is_whole_while_a_thread_traces_it(model: th.HybridModel):
    """A trace takes layers out of a model: out of a copy, whose tensors are the same."""
    copied = background._same_tensors(model)
    assert isinstance(copied, th.HybridModel)
    assert copied.hf_model is not model.hf_model
    for ours, theirs in zip(copied.parameters(), model.parameters(), strict=True):
        assert ours is theirs
    for ours, theirs in zip(copied.buffers(), model.buffers(), strict=True):
        assert ours is theirs


def served_uncompiled(runner: Runner) -> None:
    [seq] = runner.new_sequences(1)
    assert runner.extend([seq], [[5]]).isfinite().all()
    runner.free([seq])


@pytest.fixture
def hanging(model: th.HybridModel) -> Iterator[SimpleNamespace]:
    """A runner of which nothing is ever compiled."""
    holder = SimpleNamespace()
    holder.runner = Runner(model, compile="background", passes=(Pass("hang", hang),), **DECODE)
    yield holder
    if runner := vars(holder).get("runner"):
        runner.close()


def test_what_fails_is_told_once_and_steps_stay_uncompiled(model: th.HybridModel):
    runner = Runner(model, compile="background", passes=(Pass("unlucky", fail),), **DECODE)
    assert runner._beside is not None
    runner._beside._is_over.wait()
    message = "steps stay uncompiled: RuntimeError: pass unlucky failed: no such luck"
    with pytest.warns(UserWarning, match=f"^{message}$"):
        served_uncompiled(runner)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        served_uncompiled(runner)
    switches = runner.report().switches
    assert switches == background.Switches(seconds={}, num_eager=2, failed=message)
    with pytest.raises(th.UnsupportedError, match="pass unlucky failed"):
        runner.warm_up()
    assert ends(child_of(runner))


def tell_config(graph: Graph) -> None:
    raise RuntimeError(f"limit {torch._dynamo.config.accumulated_recompile_limit}")


@pytest.mark.parametrize("can_fork", [True, False])
def test_steps_are_compiled_with_the_configs_of_the_caller(
    can_fork: bool, model: th.HybridModel, monkeypatch: pytest.MonkeyPatch
):
    """torch keeps configs by context, which neither a thread nor a fork has of itself."""
    monkeypatch.setattr(background, "can_fork", lambda: can_fork)
    with torch._dynamo.config.patch(accumulated_recompile_limit=777):
        runner = Runner(model, compile="background", passes=(Pass("tell", tell_config),), **DECODE)
    with pytest.raises(th.UnsupportedError, match="pass tell failed: limit 777"):
        runner.warm_up()
    runner.close()


def test_without_a_compiler_steps_stay_uncompiled(
    model: th.HybridModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    from torch._inductor.cpp_builder import cpp_compiler_search

    cpp_compiler_search.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    runner = Runner(model, compile="background", **DECODE)
    with pytest.raises(th.UnsupportedError) as caught:
        runner.warm_up()
    assert str(caught.value).startswith("steps stay uncompiled: no C++ compiler (g++ does not run)")
    served_uncompiled(runner)


def test_the_first_step_has_the_machine_to_itself(hanging: SimpleNamespace):
    runner = hanging.runner
    states = []

    def look(*args: object) -> None:
        child, deadline = child_of(runner), time.monotonic() + 5.0
        # It stops when its core is next given to it.
        while not states and state_of(child) != "T" and time.monotonic() < deadline:
            time.sleep(0.001)
        states.append(state_of(child))

    handle = runner._beside._model.hf_model.model.norm.register_forward_pre_hook(look)
    for _ in range(2):
        served_uncompiled(runner)
    handle.remove()
    assert states[0] == "T", "it is stopped"
    assert states[1] != "T"


def test_a_process_that_is_killed_is_told_of(hanging: SimpleNamespace):
    os.killpg(child_of(hanging.runner), signal.SIGKILL)
    with pytest.raises(th.UnsupportedError, match="process that compiles was ended from elsewhere"):
        hanging.runner.warm_up()
    served_uncompiled(hanging.runner)


def test_closing_leaves_no_process_and_no_thread(hanging: SimpleNamespace):
    runner, pid = hanging.runner, child_of(hanging.runner)
    runner.close()
    assert ends(pid)
    assert not runner._beside._thread.is_alive()
    assert not Path(runner._beside._folder.name).exists()
    with pytest.raises(th.UnsupportedError, match="the runner was closed"):
        runner.warm_up()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        served_uncompiled(runner)
    runner.close()


def test_a_runner_that_is_dropped_leaves_no_process(hanging: SimpleNamespace):
    pid = child_of(hanging.runner)
    del hanging.runner
    gc.collect()
    assert ends(pid)


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """One that waits for ``hang`` does not end in time."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


def test_the_end_of_the_program_is_clean_and_waits_for_nothing():
    code = """
        import time
        import torch_hybrid as th
        from tests.graphs.compiling import test_background as here
        from tests.tiny_models import make_hybrid
        passes = (here.Pass("hang", here.hang),)
        runner = th.Runner(make_hybrid(), compile="background", passes=passes, **here.DECODE)
        here.served_uncompiled(runner)
        time.sleep(0.5)
        print(here.child_of(runner))
    """
    done = run_python(code)
    told = "torch_hybrid: steps run uncompiled until they are compiled beside them, in about 60 s\n"
    assert (done.returncode, done.stderr) == (0, told)
    assert ends(int(done.stdout))


@pytest.mark.parametrize("around", ["contextlib.nullcontext()", "child.paused()"])
def test_a_fork_ends_with_its_parent_however_that_ends(around: str):
    code = f"""
        import contextlib, importlib.util, os, signal, time
        spec = importlib.util.spec_from_file_location("forked", {forked.__file__!r})
        forked = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(forked)
        def work():
            yield "begun"
            time.sleep(1000)
        child = forked.Forked(work)
        assert child.receive() == "begun"
        print(child.pid, flush=True)
        with {around}:
            os.kill(os.getpid(), signal.SIGKILL)
    """
    done = run_python(code)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert ends(int(done.stdout))


def test_a_fork_holds_no_pipe_of_another_thread():
    """Who reads one to its end would wait for the fork: a compiler that has just been started."""
    ours, theirs = os.pipe()

    def work() -> Iterator[str]:
        yield "begun"
        time.sleep(1000)

    child = forked.Forked(work)
    try:
        with child.paused(), open(ours, "rb", buffering=0) as end:
            os.close(theirs)
            assert select.select([end], [], [], 10.0)[0], "the pipe has no end"
            assert end.read(1) == b""
        assert child.receive() == "begun"
    finally:
        child.close()


def test_a_fork_is_paused_until_nobody_has_it_paused():
    def work() -> Iterator[int]:
        yield from range(3)

    child = forked.Forked(work)
    try:
        with child.paused():
            with child.paused():
                pass
            deadline = time.monotonic() + 5.0
            while state_of(child.pid) != "T" and time.monotonic() < deadline:
                time.sleep(0.001)
            assert state_of(child.pid) == "T"
        assert [child.receive() for _ in range(3)] == [0, 1, 2]
    finally:
        child.close()


def test_a_paused_fork_ends_at_once():
    child = forked.Forked(lambda: iter([1]))
    with child.paused():
        start = time.monotonic()
        child.close()
        assert time.monotonic() - start < forked._PATIENCE / 2


def test_compiling_waits_for_the_kernels_that_are_built(model: th.HybridModel):
    """Which the first steps wait for: both cores are theirs."""
    future: Future[None] = Future()
    with (
        patch.object(background, "tell") as told,
        patch.object(Builds, "are_done", property(lambda builds: future.done())),
    ):
        runner = Runner(model, compile="background", passes=(Pass("hang", hang),), **DECODE)
        pid = child_of(runner)
        served_uncompiled(runner)
        deadline = time.monotonic() + 5.0
        while state_of(pid) != "T" and time.monotonic() < deadline:
            time.sleep(0.001)
        assert state_of(pid) == "T"
        future.set_result(None)
        while state_of(pid) == "T" and time.monotonic() < deadline:
            time.sleep(0.001)
        assert state_of(pid) != "T"
        runner.close()
    expected = "steps run uncompiled until they are compiled beside them, in about 60 s"
    assert [call.args for call in told.mock_calls] == [(expected,)]


def test_a_fork_has_compiling_threads_of_its_own():
    """Those that this process has compiled with are not there."""

    def submit() -> object:
        with torch._inductor.config.patch(compile_threads=2):  # where there is one core, too
            return AsyncCompile.submit(int).result(timeout=60)

    submit()  # starts one, which then waits for more to do

    def work() -> Iterator[object]:
        be_alone()
        yield submit()

    child = forked.Forked(work)
    assert child.receive() == 0
    child.close()


def test_a_fork_can_use_the_threads_of_torch():
    """OpenMP's threads do not survive a fork, and whoever forks believes that they do."""
    x = torch.ones(1 << 20)
    assert x.sum() == x.numel()  # starts them

    def work() -> Iterator[object]:
        yield float((x + x).sum())

    child = forked.Forked(work)
    assert child.receive() == 2 * x.numel()
    with pytest.raises(EOFError):
        child.receive()
    child.close()


def test_what_a_fork_raises_and_sends():
    def work() -> Iterator[object]:
        yield 1
        raise ValueError("of its own")

    child = forked.Forked(work)
    assert child.receive() == 1
    with pytest.raises(forked.ForkedError, match="of its own"):
        child.receive()
    child.close()


def test_a_fork_leaves_others_filters_of_warnings():
    """Python 3.12 tells of a fork beside threads; other warnings are told as before."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        child = forked.Forked(lambda: iter([1]))
        warnings.warn("of another module", DeprecationWarning, stacklevel=1)
        warnings.warn_explicit("fork", DeprecationWarning, "forked.py", 1, module=forked.__name__)
    child.close()
    assert [str(warning.message) for warning in told] == ["of another module"]


def test_values_that_are_refused(model: th.HybridModel):
    with pytest.raises(ValueError, match="compile must be True, False or 'background', got 'soon'"):
        Runner(model, compile="soon", **DECODE)  # type: ignore[arg-type]
    sharded = SimpleNamespace(ranks=SimpleNamespace(size=2))
    with pytest.raises(th.UnsupportedError, match="serves a model of one rank, got 2"):
        background.check_compile("background", sharded)  # type: ignore[arg-type]
