"""Settings of torch with which people switch its compiler off, or tune it for other models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch._inductor.config

import torch_hybrid as th
from tests.tiny_models import COMPILED_SIZES, make_hybrid
from torch_hybrid.host.progress import LOGGER

PROMPTS = [[5, 6, 7, 8, 9], [3]]


def stance() -> AbstractContextManager[object]:
    return torch.compiler.set_stance("force_eager")


def other_stance() -> AbstractContextManager[object]:
    return torch.compiler.set_stance("eager_on_recompile")


def environment() -> AbstractContextManager[object]:
    return mock.patch.dict("os.environ", TORCHDYNAMO_DISABLE="1")


def of_dynamo() -> AbstractContextManager[object]:
    return torch._dynamo.config.patch(disable=True)


@contextmanager
def told() -> Iterator[list[str]]:
    """The lines that are told meanwhile."""
    lines: list[str] = []
    with mock.patch.object(LOGGER, "info", lines.append):
        yield lines


def extend(**options: object) -> torch.Tensor:
    runner = th.Runner(make_hybrid(), **COMPILED_SIZES, **options)
    return runner.extend(runner.new_sequences(2), PROMPTS)


SETTINGS = {
    "TORCHDYNAMO_DISABLE=1": environment,
    "torch._dynamo.config.disable": of_dynamo,
    "torch.compiler.set_stance('force_eager')": stance,
    "torch.compiler.set_stance('eager_on_recompile')": other_stance,
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("compile", [True, "background"])
def test_steps_run_uncompiled_and_one_line_says_so(setting: str, compile: bool | str):
    with SETTINGS[setting](), told() as lines:
        runner = th.Runner(make_hybrid(), **COMPILED_SIZES, compile=compile)
        logits = runner.extend(runner.new_sequences(2), PROMPTS)
    assert runner.compile is False
    assert not runner.report().graphs
    assert torch.equal(logits, extend(compile=False))
    said = [line for line in lines if not line.startswith("building")]  # kernels that lack here
    assert said == [f"steps run uncompiled: {setting} switches torch.compile off"]


@pytest.mark.parametrize(
    ("options", "name"),
    [({"artefact": "steps"}, "artefact"), ({"cuda_graphs": "on"}, "cuda_graphs='on'")],
)
def test_what_needs_compiled_steps_is_refused_by_name(options: dict[str, str], name: str):
    message = rf"^{name} of a runner needs compiled steps, and TORCHDYNAMO_DISABLE=1 switches "
    with environment(), pytest.raises(th.UnsupportedError, match=message):
        th.Runner(make_hybrid(), **COMPILED_SIZES, **options)


def test_switched_off_after_the_runner_was_made():
    runner = th.Runner(make_hybrid(), **COMPILED_SIZES)
    with stance(), pytest.raises(th.UnsupportedError, match=r"set_stance\('force_eager'\) switch"):
        runner.extend(runner.new_sequences(1), [[1]])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["freezing", "cpp_wrapper"])
def test_what_others_compile_with_changes_no_step(name: str):
    """Freezing makes constants of weights; a wrapper of C++ hides what copies a pool."""
    with torch._inductor.config.patch({name: True}):
        runner = th.Runner(make_hybrid(), **COMPILED_SIZES)
        logits = runner.extend(runner.new_sequences(2), PROMPTS)
        assert getattr(torch._inductor.config, name)
    torch.testing.assert_close(logits, extend(compile=False))
    (graph,) = runner.report().graphs.values()
    assert graph.regions
    assert not graph.pool_clones
