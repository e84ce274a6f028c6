"""Numerical quirks of the Mamba families: each test fails when its quirk is "fixed"."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import torch_hybrid as th
from tests.errors import error_text
from tests.models.oracle import (
    ask,
    assert_equal_logits,
    assert_serves,
    chunked,
    decoded,
    make_texts,
    serve,
    whole,
)
from tests.tiny_models import make_model
from torch_hybrid.models.families import FAMILIES, architecture_of

TINY = {"max_seqs": 4, "max_tokens": 256, "kv_tokens": 256, "compile": False}
ATTRIBUTES = {"mamba": "mixer", "falcon_mamba": "mixer", "jamba": "mamba"}
FAMILIES_OF_MAMBA = (*ATTRIBUTES, "zamba")
ALONE = ("mamba", "falcon_mamba")  # without attention


def first_mixers(family: str) -> tuple[Any, Any]:
    """The first mixer of transformers, and ours of its weights."""
    theirs, ours = make_model(family), th.adapt(make_model(family))
    return tuple(getattr(m.layers[0], ATTRIBUTES[family]) for m in (theirs.base_model, ours))


@torch.no_grad()
def cached(hf_model: Any, text: list[int], sizes: list[int]) -> Tensor:
    """The logits of transformers' own cache, of a prompt in pieces."""
    name = "cache_params" if hf_model.config.model_type in ALONE else "past_key_values"
    cache, logits, start = {}, [], 0
    for size in sizes:
        piece = slice(start, start + size)
        positions = torch.arange(start, start + size)[None]
        out = hf_model(torch.tensor([text[piece]]), position_ids=positions, use_cache=True, **cache)
        cache, start = {name: out[name]}, start + size
        logits.append(out.logits[0])
    return torch.cat(logits)


@pytest.mark.parametrize("family", FAMILIES_OF_MAMBA)
def test_a_second_piece_of_a_prompt_starts_from_the_states_of_the_first(family: str):
    """In transformers it starts from zero states; token by token, from those that are there."""
    hf_model = make_model(family)
    oracle = ask(hf_model, make_texts([40]))
    [text], [logits] = oracle.texts, oracle.logits
    in_tokens = cached(hf_model, text, [20] + [1] * 20)
    assert (in_tokens - logits).abs().max() < 2e-5 * oracle.scale
    in_pieces = cached(hf_model, text, [20, 20])
    assert (in_pieces - logits).abs().max() > 0.05 * oracle.scale
    assert_serves(th.Runner(th.adapt(hf_model), **TINY), oracle, chunked([40], 20))


@pytest.mark.parametrize("family", ALONE)
def test_limits_of_steps_are_of_fresh_weights_alone(family: str):
    """No forward looks at them; those of Mamba2 bound every step."""
    limits = {"time_step_min": 0.4, "time_step_max": 0.5, "time_step_floor": 0.45}
    oracle = ask(make_model(family), make_texts([30]))
    runner = th.Runner(th.adapt(make_model(family, **limits)), **TINY)
    assert_serves(runner, oracle, whole([30]), decoded([30], 20))


@pytest.mark.parametrize("in_float32", [True, False])
@pytest.mark.parametrize("family", ALONE)
def test_residuals_are_float32_where_the_config_says_so(family: str, in_float32: bool):
    model = th.adapt(make_model(family, residual_in_fp32=in_float32).bfloat16())
    seen: list[torch.dtype] = []
    model.layers[1].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    serve(th.Runner(model, **TINY), make_texts([5]), whole([5]))
    assert seen == [torch.float32 if in_float32 else torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ATTRIBUTES)
def test_norms_of_what_selects(family: str, dtype: torch.dtype):
    """None in Mamba; with weights in Jamba, and without in Falcon-Mamba."""
    theirs, ours = (mixer.to(dtype) for mixer in first_mixers(family))
    norms = [ours.mixer.dt_norm, ours.mixer.B_norm, ours.mixer.C_norm]
    if family == "mamba":
        assert all(type(norm) is nn.Identity for norm in norms)
        return
    for norm, name in zip(norms, ("dt", "b", "c"), strict=True):
        other = getattr(theirs, f"{name}_layernorm")
        assert bool(list(norm.parameters())) == (family == "jamba")
        width = {"dt": theirs.time_step_rank}.get(name, theirs.ssm_state_size)
        x = 0.1 * torch.randn(9, width, generator=torch.Generator().manual_seed(0)).to(dtype)
        torch.testing.assert_close(norm(x), other(x), rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_falcon_normed_by_another_number():
    """Its norms have an eps of their own, which is not that of the residuals'."""
    hf_model = make_model("falcon_mamba", mixer_rms_eps=0.5, layer_norm_epsilon=1e-5)
    oracle = ask(hf_model, make_texts([20]))
    assert_serves(th.Runner(th.adapt(hf_model), **TINY), oracle, whole([20]))


def test_jamba_has_attention_and_experts_by_period():
    config = make_model("jamba", attn_layer_period=3, attn_layer_offset=2).config
    kinds = [layer[0].kind for layer in architecture_of(config).table.layers]
    assert kinds == ["mamba", "mamba", "paged_attention", "mamba"]
    hf_model = make_model("jamba", num_experts=1)
    oracle = ask(hf_model, make_texts([40]))
    assert_serves(th.Runner(th.adapt(hf_model), **TINY), oracle, chunked([40], 16))


def test_jamba_does_not_know_where_its_tokens_stand():
    oracle = ask(make_model("jamba"), make_texts([12]))
    runner = th.Runner(th.adapt(make_model("jamba")), **TINY)
    seqs, apart = runner.new_sequences(1), torch.arange(12) * 7 + 3
    logits = runner.extend(seqs, oracle.texts, logits="all", positions=apart)
    assert_equal_logits([logits], oracle)


def refusal(family: str, **options: Any) -> str:
    config = make_model(family).config
    for name, value in options.items():
        setattr(config, name, value)
    return error_text(th.UnsupportedError, FAMILIES[family].specs, config)


def test_refusals():
    refusals = [
        refusal("mamba", hidden_act="gelu"),
        refusal("falcon_mamba", hidden_act="relu"),
        refusal("jamba", hidden_act="gelu"),
        refusal("jamba", sliding_window=64),
    ]
    assert_expected_inline(
        "\n".join(refusals),
        """\
mamba: config field hidden_act must be one of ['silu'], got 'gelu'
falcon_mamba: config field hidden_act must be one of ['silu'], got 'relu'
jamba: config field hidden_act must be one of ['silu'], got 'gelu'
jamba: config field sliding_window must be one of ['None'], got 64""",
    )
