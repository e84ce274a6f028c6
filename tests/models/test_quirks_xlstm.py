"""Peculiarities of xLSTM: each test fails when one is "fixed"."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

import torch_hybrid as th
from tests.models.oracle import (
    Oracle,
    ask,
    assert_serves,
    chunked,
    decoded,
    make_texts,
    serve,
    whole,
)
from tests.models.refused import refusals
from tests.tiny_models import make_model

TINY = {"max_seqs": 2, "max_tokens": 256, "kv_tokens": 256, "page_size": 16, "compile": False}
SEED = 3


def xlstm(**options: Any) -> Any:
    return make_model("xlstm", seed=SEED, **options)


def drift(oracle: Oracle, other: Oracle) -> float:
    """The largest difference of two oracles of one text, of the largest logit."""
    return (oracle.logits[0] - other.logits[0]).abs().max().item() / oracle.scale


def test_states_are_not_rounded_between_chunks():
    """Transformers cuts texts that are long in chunks, between which its states are bfloat16."""
    hf_model = xlstm()
    oracle = ask(hf_model, make_texts([90]))
    hf_model.config.max_inference_chunksize = 20
    assert drift(oracle, ask(hf_model, oracle.texts)) > 1e-3
    assert_serves(th.Runner(th.adapt(hf_model), **TINY), oracle, chunked([90], 20))


@torch.no_grad()
def test_chunks_of_bfloat16_need_no_cache():
    """Transformers' own mix dtypes: without a cache, it runs no text as long as a chunk."""
    hf_model = xlstm().bfloat16()
    [text] = make_texts([70])
    with pytest.raises(RuntimeError, match="same dtype"):
        hf_model(torch.tensor([text]), use_cache=False)
    exact = ask(xlstm(), [text])
    runner = th.Runner(th.adapt(hf_model), **TINY)
    error = (serve(runner, [text], whole([70]))[0] - exact.logits[0]).square().mean().sqrt()
    assert error < 0.1 * exact.logits[0].square().mean().sqrt()
    assert {pool.dtype for pool in runner.cache.pool_tensors()} == {torch.float32}


@torch.no_grad()
def test_widths_need_not_be_multiples_of_64():
    """As those of transformers' cache must: it rounds them up, and its layers do not."""
    hf_model = xlstm(hidden_size=60, v_dim_factor=1.0)
    oracle = ask(hf_model, make_texts([60, 3]))
    with pytest.raises((RuntimeError, ValueError)):
        hf_model(torch.tensor(oracle.texts[:1]), use_cache=True)
    runner = th.Runner(th.adapt(hf_model), **TINY)
    assert_serves(runner, oracle, chunked([60, 3], 25), decoded([60, 3], 2))


@pytest.mark.parametrize(
    "options",
    [
        {"num_heads": 1},
        {"qk_dim_factor": 2.0, "v_dim_factor": 0.5},
        {"gate_soft_cap": 30.0, "norm_eps": 0.01},
        {"eps": 1e-5},
        {"num_blocks": 2},
        {"tie_word_embeddings": True},
    ],
    ids=str,
)
def test_variants(options: dict[str, Any]):
    hf_model = xlstm(**options)
    # In float32 transformers itself is off by up to 1.6e-5 of the largest logit.
    oracle = ask(copy.deepcopy(hf_model).double(), make_texts([60, 3]))
    runner = th.Runner(th.adapt(hf_model), **TINY)
    assert_serves(runner, oracle, chunked([60, 3], 25), decoded([60, 3], 2))


def test_kernels_of_a_package_that_is_not_there(tmp_path: Path):
    """Which the config of xLSTM-7b names: transformers refuses it without that package."""
    hf_model = xlstm()
    hf_model.save_pretrained(tmp_path)
    kernels = {
        "chunkwise_kernel": "chunkwise--triton_xl_chunk",
        "sequence_kernel": "native_sequence__triton",
        "step_kernel": "triton",
    }
    (tmp_path / "config.json").write_text(json.dumps(hf_model.config.to_dict() | kernels))
    with pytest.raises(StrictDataclassError, match="chunkwise_kernel"):
        AutoConfig.from_pretrained(tmp_path)
    oracle = ask(hf_model, make_texts([60]))
    assert_serves(th.Runner(th.from_pretrained(tmp_path), **TINY), oracle, whole([60]))


def test_fused_weights_are_nothing_that_transformers_has():
    """It can neither make nor load them, as its initial biases of gates are of another shape: they
    are refused below."""
    with pytest.raises(RuntimeError, match="must match the size"):
        xlstm(weight_mode="fused")


def test_logits_are_bounded():
    model = th.adapt(xlstm(output_logit_soft_cap=2.0))
    hidden = torch.randn(7, 64) * 10
    unbounded = model.hf_model.lm_head(hidden)
    assert unbounded.abs().max() > 10
    torch.testing.assert_close(model.logits(hidden), 2 * torch.tanh(unbounded / 2))


# ---- refusals ----------------------------------------------------------------------------------

REFUSED: list[dict[str, Any]] = [
    {"use_bias": True},
    {"add_out_norm": False},
    {"weight_mode": "fused"},
    {"embedding_dim": 32},
    {"gate_soft_cap": 50.0},
    {"gate_soft_cap": 0.0},
    {"eps": 0.001},
    {"num_heads": 7},
    {"qk_dim_factor": 0.01},
]


def test_refusals(tmp_path: Path):
    assert_expected_inline(
        refusals(tmp_path, "xlstm", REFUSED),
        """\
xlstm: config field use_bias must be one of ['False'], got True
xlstm: config field add_out_norm must be one of ['True'], got False
xlstm: config field weight_mode must be one of ['single'], got 'fused'
xlstm: config field embedding_dim must be one of ['64'], got 32
xlstm: config field gate_soft_cap must be above 0 and at most 40.0, got 50.0
xlstm: config field gate_soft_cap must be above 0 and at most 40.0, got 0.0
xlstm: config field eps must be above 0 and at most 1e-05, got 0.001
xlstm: config field qk_dim_factor must give each of the 7 heads equally many of the channels, got 1.0 of 64
xlstm: config field qk_dim_factor must give each of the 4 heads equally many of the channels, got 0.01 of 64""",  # noqa: E501
    )
