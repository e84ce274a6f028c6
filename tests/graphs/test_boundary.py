"""What is no model, no backends, no tokens is named, with what came; what means tokens is taken."""

import copy
import pickle

import numpy
import pytest
import torch

import torch_hybrid as th
from tests.tiny_models import make_model

SIZES = {"max_seqs": 3, "max_tokens": 64, "kv_tokens": 64, "compile": False}


@pytest.fixture(scope="module")
def model():
    return th.adapt(make_model("qwen3"))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"backends": "cpp"}, TypeError, "backends must be a th.Backends or None, got 'cpp'"),
        ({"two_batch_overlap": True}, ValueError, "must be 'off', 'on', 'auto' or .* got True"),
        ({"cuda_graphs": True}, ValueError, "must be 'auto', 'on' or 'off', got True"),
        ({"page_size": 8.0}, TypeError, "page_size must be of type int, got 8.0"),
        ({"prefill": "no"}, TypeError, "prefill must be of type bool, got 'no'"),
        (
            {"passes": [len]},
            TypeError,
            "passes must be a list of torch_hybrid.graphs.passes.Pass or None, got",
        ),
        (
            {"kv_dtype": "fp8", "kv_scales": [1.0]},
            TypeError,
            "kv_scales must map layer ids to scales, got",
        ),
    ],
)
def test_refuses_options_of_another_kind(model, options, error, message):
    with pytest.raises(error, match=message):
        th.Runner(model, **SIZES, **options)


def test_refuses_a_model_that_was_not_adapted(model):
    expected = "model must come from th.from_pretrained or th.adapt, got Qwen3ForCausalLM"
    with pytest.raises(TypeError, match=expected):
        th.Runner(make_model("qwen3"), **SIZES)
    with pytest.raises(TypeError, match=r"th.from_pretrained or th.adapt, got str"):
        th.Runner("path", **SIZES)
    with pytest.raises(TypeError, match=r"th.from_pretrained or th.adapt, got OptimizedModule"):
        th.Runner(torch.compile(model), **SIZES)


@pytest.mark.parametrize("take", [copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("make", [lambda runner: runner, th.Engine])
def test_a_runner_says_that_its_model_is_what_can_be_copied(model, take, make):
    with pytest.raises(TypeError, match="copy or pickle its model, and make another runner"):
        take(make(th.Runner(model, **SIZES)))
    take(model)


@pytest.mark.parametrize(
    "tokens",
    [
        [torch.tensor([1, 2, 3])],
        torch.tensor([[1, 2, 3]]),
        [(1, 2, 3)],
        [list(numpy.array([1, 2, 3]))],
        [[torch.tensor(1), 2, 3]],
    ],
    ids=["1-D tensor", "2-D tensor", "tuple", "numpy integers", "tensor scalars"],
)
def test_tokens_may_be_integers_of_any_kind(model, tokens):
    runner = th.Runner(model, **SIZES)
    (one, other) = runner.new_sequences(2)
    assert torch.equal(runner.extend([one], [[1, 2, 3]]), runner.extend([other], tokens))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[1.0, 2.0]], r"a token must be an int, got 1.0 \(float\)"),
        ([[True]], r"a token must be an int, got True \(bool\)"),
        ([[5] * 300 + [True]], r"a token must be an int, got True \(bool\)"),
        ([[5] * 300 + [0.5]], r"a token must be an int, got 0.5 \(float\)"),
        (["ab"], "tokens must be a list of token ids for each sequence, got 'ab'"),
        ([7], "tokens must be a list of token ids for each sequence, got 7"),
        ([[[1]]], r"a token must be an int, got \[1\] \(list\)"),
        ([torch.tensor([0.5])], r"a token must be an int, got 0.5 \(float\)"),
    ],
)
def test_tokens_of_another_kind_are_named_and_nothing_changes(model, tokens, message):
    runner = th.Runner(model, **SIZES)
    seqs = runner.new_sequences(1)
    free = runner.free_pages
    with pytest.raises(TypeError, match=message):
        runner.extend(seqs, tokens)
    assert (runner.length(seqs[0]), runner.free_pages) == (0, free)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda runner: th.Speculation(num_drafts=2.0), "num_drafts must be an integer, got 2.0"),
        (lambda runner: th.PrefixCache(every=64.0), "every must be an integer, got 64.0"),
        (lambda runner: th.Engine(runner, max_waiting="9"), "max_waiting must be an integer, got"),
        (lambda runner: th.Engine(runner, eos_token_ids="ab"), "eos_token_ids must be an integer"),
        (lambda runner: th.Engine(runner, processor="path"), "as AutoProcessor.from_pretrained"),
        (lambda runner: runner.new_sequences(1.0), "count must be an integer, got 1.0"),
    ],
)
def test_arguments_of_another_kind_are_named_before_a_step_needs_them(model, make, message):
    runner = th.Runner(model, **SIZES)
    with pytest.raises(TypeError, match=message):
        make(runner)


def test_a_launch_refuses_what_is_no_draw_before_its_step(model):
    runner = th.Runner(model, **SIZES)
    seqs = runner.new_sequences(1)
    with pytest.raises(
        TypeError, match=r"draws must be torch_hybrid.sampling.Draw or None, got Sampling"
    ):
        runner.launch(seqs, [[1]], [th.Sampling()])
    runner.extend(seqs, [[1]])
