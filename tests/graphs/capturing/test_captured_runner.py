"""A runner whose steps are captured: coarse buckets, refreshed inputs, results of their own.

On a CPU nothing is captured, but steps take the same buckets and the same way through the runner.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

import torch_hybrid as th
from tests.devices import needs_cuda
from tests.graphs.as_traced import run_as_traced
from tests.models.oracle import (
    Oracle,
    ask,
    assert_equal_logits,
    assert_serves,
    chunked,
    decoded,
    make_texts,
    mixed,
    serve,
    whole,
)
from tests.tiny_models import make_model
from torch_hybrid.graphs.capturing.cuda_graph import why_not_capturable
from torch_hybrid.graphs.stepping import stepper
from torch_hybrid.graphs.stepping.buckets import StepSizes
from torch_hybrid.models.adapt import adapt

LENGTHS = (40, 3, 70, 1)
FAMILIES = ("qwen3_next_dense", "qwen3", "deepseek_v3", "kimi_linear", "bamba", "minimax")
SIZES = {"max_seqs": 6, "max_tokens": 256, "kv_tokens": 512}
CHUNKS = th.Backends(prefix=th.PrefixPolicy(token_budget=96, absorbed="never"))


def make(family: str, **options: Any) -> tuple[th.Runner, Oracle]:
    hf_model = make_model(family, seed=4)
    oracle = ask(hf_model, make_texts(LENGTHS))
    runner = th.Runner(adapt(hf_model), **{**SIZES, "cuda_graphs": "on", **options})
    return runner, oracle


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_of_coarse_buckets(family: str):
    """A large step and then small ones: nothing of the large one is left over."""
    runner, oracle = make(family, compile=False, backends=CHUNKS)
    assert_serves(runner, oracle, whole(LENGTHS), chunked(LENGTHS, 9), mixed(LENGTHS, 1))


def test_buckets_are_few_and_named():
    runner, oracle = make("qwen3_next_dense", compile=False)
    serve(runner, oracle.texts[:3], decoded(LENGTHS[:3], 2))
    serve(runner, oracle.texts[:2], decoded((39, 3), 2))
    assert set(runner.report().captured_graphs) == {
        "extend: 128 tokens, 6 sequences of 32 pages",
        "decode: 4 sequences of 32 pages",
        "extend: 64 tokens, 6 sequences of 32 pages",
        "decode: 2 sequences of 32 pages",
    }
    assert runner.report().not_captured == {}


def test_steps_that_are_ready_enter_no_stream(monkeypatch: pytest.MonkeyPatch):
    """To wait for another stream and back takes the host of a GPU 56 us."""
    model = adapt(make_model("qwen3", num_hidden_layers=1))
    runner = th.Runner(model, **SIZES, cuda_graphs="on")
    devices: list[torch.device] = []

    def noting(device: torch.device) -> AbstractContextManager[None]:
        devices.append(device)
        return nullcontext()

    monkeypatch.setattr(stepper, "on_capture_stream", noting)
    seqs = runner.new_sequences(2)
    with run_as_traced():  # whose code the steps are is none of the stream's business
        for tokens in ([[1, 2], [3]], [[4], [5]], [[6], [7]], [[8, 9], [1]]):
            runner.extend(seqs, tokens)
    assert len(devices) == len(runner.report().graphs) == 2


def test_a_result_is_not_overwritten_by_the_next_step():
    runner, oracle = make("qwen3", compile=False)
    [seq] = runner.new_sequences(1)
    first = runner.extend([seq], [oracle.texts[0][:5]])
    kept = first.clone()
    runner.extend([seq], [oracle.texts[0][5:9]])
    assert torch.equal(first, kept)


def test_the_same_in_halves():
    runner, oracle = make("qwen3_next_dense", compile=False, two_batch_overlap="on")
    assert_serves(runner, oracle, chunked(LENGTHS, 33))


def test_sizes_end_with_the_largest():
    sizes = StepSizes.coarse(max_seqs=5, max_tokens=100, half_tokens=66, num_pages=7, page_size=16)
    assert sizes.decode_seqs == (1, 2, 4, 5)
    assert (sizes.seqs, sizes.pages) == ((5,), (7,))
    assert (sizes.tokens, sizes.half_tokens) == ((64, 100), (64, 66))
    assert sizes.chunk_rows == (64, 112)


def test_tables_grow_in_wide_strides():
    """A few short prompts copy no table of all sequences with all pages."""
    sizes = StepSizes.coarse(
        max_seqs=100, max_tokens=100, half_tokens=66, num_pages=3000, page_size=16
    )
    assert sizes.seqs == (8, 64, 100)
    assert sizes.pages == (64, 256, 1024, 3000)


def test_what_reads_lengths_on_the_host_cannot_be_captured():
    calls = ["linear[torch]", "gated_delta_rule[chunk_torch]", "paged_attention[triton]"]
    assert why_not_capturable(calls) == ("gated_delta_rule: chunk_torch reads lengths on the host",)


def test_names_of_the_option():
    with pytest.raises(ValueError, match="cuda_graphs must be 'auto', 'on' or 'off', got 'maybe'"):
        make("qwen3", cuda_graphs="maybe")


# Transformers before 5.20 normalises several groups of Bamba's at once.
OPTIONS = {"bamba": {"mamba_n_groups": 1}}
# Each kind of mixer, and of experts: those of a gate, those without one, and shared ones beside.
CAPTURED = (
    "qwen3_next",
    "qwen3_5_moe",
    "qwen3",
    "bamba",
    "deepseek_v3",
    "kimi_linear",
    "nemotron_h",
)


@needs_cuda
@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("family", CAPTURED)
def test_captured_on_a_gpu(family: str, overlap: str):
    """Decode and extend, MLA's chunks too, whole in CUDA graphs, without recompiles."""
    torch._dynamo.reset()
    hf_model = make_model(family, seed=4, **OPTIONS.get(family, {}))
    oracle = ask(hf_model, make_texts(LENGTHS))
    model = adapt(hf_model.cuda())
    runner = th.Runner(model, **SIZES, backends=CHUNKS, two_batch_overlap=overlap)
    runner.warm_up()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for steps in (whole(LENGTHS), chunked(LENGTHS, 9), mixed(LENGTHS, 1)):
            served = [logits.cpu() for logits in serve(runner, oracle.texts, steps)]
            assert_equal_logits(served, oracle)
    report = runner.report()
    assert report.not_captured == {}
    assert report.captured_graphs
    assert (report.recompiles, report.graph_breaks, report.pool_clones) == (0, 0, ())
