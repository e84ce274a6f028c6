"""What runners, engines and counts show, and what an adapted model says of other ways to run."""

import pytest
import torch

import torch_hybrid as th
from tests.serving.fuzz import FAMILIES, SIZES
from tests.tiny_models import make_model


@pytest.fixture(scope="module")
def model():
    return th.adapt(make_model("qwen3_next", **FAMILIES["qwen3_next"]))


def test_a_line_and_a_table(model):
    runner = th.Runner(model, **SIZES)
    engine = th.Engine(runner)
    list(engine.generate([[1, 2], [3]], th.Sampling(max_new_tokens=2, ignore_eos=True)))
    for shown, fact in (
        (runner, "4 of 4 free"),
        (engine, "4 in 2 steps"),
        (engine.stats(), "0 running and 0 waiting"),
        (runner.report(), "recompiles: 0"),
    ):
        assert fact in repr(shown)
        assert len(repr(shown)) < 250
        assert shown._repr_html_().count("<tr>") == len(shown.facts())


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.generate(torch.tensor([[1]])),
        lambda model: model(torch.tensor([[1]])),
        lambda model: model(input_ids=torch.tensor([[1]])),
        lambda model: model.hf_model(torch.tensor([[1]])),
    ],
)
def test_an_adapted_model_says_what_runs_it(model, call):
    with pytest.raises(th.UnsupportedError, match=r"use th\.Engine\(th\.Runner"):
        call(model)


def test_an_adapted_model_says_what_can_be_saved(model, tmp_path):
    with pytest.raises(th.UnsupportedError, match="Call save_pretrained before adapt"):
        model.save_pretrained(tmp_path)
