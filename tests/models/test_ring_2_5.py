"""Ring-2.5, loaded from the published layout, against a slow reference in float64."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_hybrid as th
from tests.graphs.as_traced import run_as_traced
from tests.models.oracle import (
    Oracle,
    assert_equal_logits,
    chunked,
    decoded,
    make_texts,
    mixed,
    serve,
    whole,
)
from tests.models.ring_checkpoint import CONFIG, make_weights, save
from tests.models.ring_reference import reference_logits

LENGTHS = (33, 66, 100)
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.3,
    "mscale_all_dim": 0.7,
}
CASES: dict[str, dict[str, Any]] = {
    "as published": {},
    "queries of full rank": {"q_lora_rank": None},
    "silu": {"linear_silu": True},
    "no norm of q and k": {"use_qk_norm": False},
    "tied embeddings": {"tie_word_embeddings": True},
    "yarn": {"rope_scaling": YARN},
    "one group of channels": {"group_norm_size": 1},
    "eight heads": {"num_attention_heads": 8, "group_norm_size": 4},
    "two dense layers": {"first_k_dense_replace": 2, "num_shared_experts": 2},
}
# Weights without a near tie of routers, which the reference looks for.
SEEDS = {"queries of full rank": 1, "one group of channels": 1}


def make_oracle(config: dict[str, Any], weights: dict[str, Tensor]) -> Oracle:
    texts = make_texts(LENGTHS)
    logits = [reference_logits(config, weights, text).float() for text in texts]
    return Oracle(texts, logits)


def load(folder: Path, **options: Any) -> th.Runner:
    model = th.from_pretrained(folder, **options)
    return th.Runner(model, max_seqs=4, max_tokens=512, kv_tokens=512, compile=False)


@pytest.mark.parametrize("case", CASES)
def test_logits(case: str, tmp_path: Path):
    config = {**CONFIG, **CASES[case]}
    weights = make_weights(config, seed=SEEDS.get(case, 0))
    save(tmp_path, config, weights)
    runner, oracle = load(tmp_path), make_oracle(config, weights)
    for steps in (
        whole(LENGTHS),
        chunked(LENGTHS, 17),
        decoded(LENGTHS, 32),
        mixed(LENGTHS, seed=0),
    ):
        assert_equal_logits(serve(runner, oracle.texts, steps), oracle)


def test_bfloat16_weights_are_taken_as_they_are(tmp_path: Path):
    config = {**CONFIG, "torch_dtype": "bfloat16", "n_group": 1, "topk_group": 1}
    config |= {"num_experts": 3, "num_experts_per_tok": 3}  # rounding tips no router over
    weights = {name: weight.bfloat16() for name, weight in make_weights(config, 0).items()}
    save(tmp_path, config, weights)
    runner, oracle = load(tmp_path), make_oracle(config, weights)
    assert runner.model.dtype is torch.bfloat16
    served = serve(runner, oracle.texts, chunked(LENGTHS, 40))
    error = (torch.cat(served) - torch.cat(oracle.logits)).square().mean().sqrt()
    eps = torch.finfo(torch.bfloat16).eps
    assert error < 8 * eps * torch.cat(oracle.logits).square().mean().sqrt()


@pytest.mark.slow
def test_as_traced(tmp_path: Path):
    """Its mixers are those that ``test_compiled`` has in Inductor's code."""
    config = {**CONFIG, "num_hidden_layers": 2}
    weights = make_weights(config, seed=0)
    save(tmp_path, config, weights)
    oracle = make_oracle(config, weights)
    runner = th.Runner(th.from_pretrained(tmp_path), max_seqs=3, max_tokens=256, kv_tokens=320)
    with run_as_traced():
        for steps in (chunked(LENGTHS, 50), decoded(LENGTHS, 4), mixed(LENGTHS, seed=0)):
            assert_equal_logits(serve(runner, oracle.texts, steps), oracle)
    report = runner.report()
    assert (report.recompiles, report.graph_breaks) == (0, 0)


def test_layers_are_copied(tmp_path: Path):
    config = {**CONFIG, "num_hidden_layers": 12}
    save(tmp_path, config, make_weights(config, seed=0))
    model = th.from_pretrained(tmp_path)
    outputs = []
    with run_as_traced():
        for compile in (False, True):
            runner = th.Runner(model, max_seqs=3, kv_tokens=320, prefill=False, compile=compile)
            seqs = runner.new_sequences(2)
            outputs.append(torch.cat([runner.extend(seqs, [[i], [7]]) for i in range(4)]))
    [graph] = runner.report().graphs.values()
    assert graph.layers.copied >= 4
    eager, compiled = outputs
    assert (compiled - eager).abs().max() < 2e-5 * eager.abs().max()


def refusal(folder: Path, error: type[Exception], **fields: Any) -> str:
    """What loading a model of other config fields says, without the folder's name."""
    save(folder, {**CONFIG, **fields}, make_weights(CONFIG, seed=0))
    with pytest.raises(error) as caught:
        th.from_pretrained(folder)
    return str(caught.value).replace(str(folder), "PATH")


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("score_function", "softmax", "sigmoid"),
        ("use_qkv_bias", True, "False"),
        ("rope_interleave", False, "True"),
        ("hidden_act", "gelu", "silu"),
        ("norm_topk_prob", False, "True"),
    ],
)
def test_config_field_that_is_not_served(tmp_path: Path, field: str, value: object, allowed: str):
    assert refusal(tmp_path, th.UnsupportedError, **{field: value}) == (
        f"bailing_hybrid: config field {field} must be one of [{allowed!r}], got {value!r}"
    )


def test_rope_of_another_type(tmp_path: Path):
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    text = refusal(tmp_path, th.UnsupportedError, rope_scaling=scaling)
    assert "config field rope_parameters.rope_type must be one of ['default'" in text


def test_latent_rank_that_does_not_match_the_checkpoint(tmp_path: Path):
    text = refusal(tmp_path, ValueError, kv_lora_rank=48)
    assert "mismatched keys: [\"('model.layers.1.self_attn.kv_a_layernorm.weight'" in text


def edited(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> str:
    weights = make_weights(CONFIG, seed=0)
    edit(weights)
    save(folder, CONFIG, weights)
    with pytest.raises(ValueError, match=r"weight|keys") as caught:
        th.from_pretrained(folder)
    return str(caught.value).replace(str(folder), "PATH")


def test_missing_weight(tmp_path: Path):
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    text = edited(tmp_path, lambda weights: weights.pop(name))
    assert text == f"the checkpoint PATH has missing keys: ['{name}']"


def test_weight_that_is_not_finite(tmp_path: Path):
    name = "model.layers.0.attention.g_norm.weight"
    text = edited(tmp_path, lambda weights: weights[name][-1].fill_(float("nan")))
    assert text == f"weight {name} has 1 NaN or infinite values"


def test_no_weights(tmp_path: Path):
    save(tmp_path, CONFIG, make_weights(CONFIG, seed=0))
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(ValueError, match=re.escape(f"cannot read the weights in {tmp_path}: no")):
        th.from_pretrained(tmp_path)


def test_tokens_that_end_a_sequence(tmp_path: Path):
    save(tmp_path, CONFIG, make_weights(CONFIG, seed=0))
    assert th.from_pretrained(tmp_path).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    assert th.from_pretrained(tmp_path).eos_token_ids == (3, 5)
