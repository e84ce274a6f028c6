"""An option of a runner is written once: all that depends on it follows from its field."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from typing import Any

import pytest

import torch_hybrid as th
from tests.tiny_models import make_hybrid
from torch_hybrid.cli import options as cli_options
from torch_hybrid.cli.commands import generate
from torch_hybrid.graphs.options.options import Options, artefact_facts, help_of

OPTIONS = [each for each in fields(Options) if each.default is not MISSING]
NAMES = [each.name for each in OPTIONS]


@pytest.mark.parametrize("name", NAMES)
def test_the_runner_shows_each_option(name: str):
    shown = inspect.signature(th.Runner).parameters[name]
    field = next(each for each in OPTIONS if each.name == name)
    assert shown.default is field.default
    assert shown.kind is inspect.Parameter.KEYWORD_ONLY
    assert f"\n        {name}: {help_of(name).split()[0]}" in (th.Runner.__doc__ or "")


def test_nothing_else_is_taken():
    assert [*inspect.signature(th.Runner).parameters] == ["model", *NAMES]
    assert "{options}" not in (th.Runner.__doc__ or "")
    with pytest.raises(TypeError, match=r"^Runner\.__init__.* argument 'max_tokenz'"):
        th.Runner(make_hybrid(), max_tokenz=3)


@pytest.mark.parametrize("field", OPTIONS, ids=NAMES)
def test_values_are_checked(field: Any):
    if (values := field.metadata["values"]) is None:
        return
    with pytest.raises(ValueError, match=f"^{field.name} must be .* or {values[-1]!r}, got 'no'$"):
        th.Runner(make_hybrid(), **{field.name: "no"})


def test_an_artefact_is_of_one_value_of_what_enters_its_graphs():
    """Options that change a graph, or a size that it has as a constant, are among its facts."""
    outside = {"max_tokens", "kv_scales", "compile", "cuda_graphs", "two_batch_overlap", "backends"}
    outside |= {"prefill", "check_batch", "passes", "artefact"}  # of no graph, or facts elsewhere
    assert {*artefact_facts(Options(make_hybrid()))} == {*NAMES} - outside


def test_the_command_line_says_what_the_runner_says():
    shown = {option.name: option for option in generate.params}
    for name in (*cli_options.PASSED_ON, "artefact"):
        assert shown[name].help == help_of(name)
