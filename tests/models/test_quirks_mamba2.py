"""Numerical quirks of the Mamba2 families: each test fails when its quirk is "fixed"."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

import torch_hybrid as th
from tests.errors import error_text
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
from tests.tiny_models import make_model
from torch_hybrid.layers.mamba2 import Mamba2
from torch_hybrid.models.families import FAMILIES

TINY = {"max_seqs": 4, "max_tokens": 256, "kv_tokens": 256, "compile": False}
SEEDS = {"granitemoehybrid": 1}  # without a near tie of routers
GATES = {
    "bamba": "before_norm",
    "granitemoehybrid": "before_norm",
    "nemotron_h": "before_norm",
    "mamba2": "before_norm",
    "zamba2": "before_norm",
    "falcon_h1_norm": "after_norm",
    "falcon_h1": "no_norm",
}
ATTRIBUTES = {"nemotron_h": "mixer", "mamba2": "mixer"}


def make(family: str, **options: Any) -> Any:
    return make_model(family, seed=SEEDS.get(family, 0), **options)


def spec_of(hf_model: Any) -> th.Mamba2Spec:
    """The facts of the first Mamba2 mixer."""
    specs = FAMILIES[hf_model.config.model_type].specs(hf_model.config)
    return th.LayerTable.from_specs(specs).of_kind("mamba2")[0].spec


def first_mixers(family: str) -> tuple[Any, Mamba2]:
    """The first Mamba2 mixer of transformers, and ours of its weights."""
    attribute = ATTRIBUTES.get(family, "mamba")
    theirs = getattr(make(family).base_model.layers[0], attribute)
    ours = getattr(th.adapt(make(family)).layers[0], attribute)
    return theirs, ours.mixer


# ---- the limits of the step size ---------------------------------------------------------------


@torch.no_grad()
def continued(hf_model: Any, text: list[int], num_held: int) -> Tensor:
    """The logits of transformers' own cache: a prompt, then token by token."""
    tokens = torch.tensor([text])
    positions = torch.arange(len(text))[None]
    out = hf_model(tokens[:, :num_held], position_ids=positions[:, :num_held], use_cache=True)
    logits = [out.logits[0]]
    name = "cache_params" if hf_model.config.model_type == "mamba2" else "past_key_values"
    for t in range(num_held, len(text)):
        out = hf_model(
            tokens[:, t : t + 1],
            position_ids=positions[:, t : t + 1],
            use_cache=True,
            **{name: out[name]},
        )
        logits.append(out.logits[0])
    return torch.cat(logits)


LIMITED = {
    "bamba": {"time_step_limit": (0.01, 0.2)},
    "granitemoehybrid_dense": {"time_step_limit": (0.01, 0.2)},
    "falcon_h1": {"time_step_limit": (0.01, 0.2)},
    "mamba2": {"time_step_limit": (0.01, 0.2)},
    "nemotron_h": {"time_step_min": 0.01, "layer_types": ["linear_attention", "full_attention"]},
    "zamba2": {"time_step_min": 0.01},
}


@pytest.mark.parametrize("family", LIMITED)
def test_step_sizes_are_clamped_in_decode_too(family: str):
    """Transformers clamps them where a forward has several tokens, and not where it has one."""
    hf_model = make(family, **LIMITED[family])
    oracle = ask(hf_model, make_texts([60]))
    drift = (continued(hf_model, oracle.texts[0], 20) - oracle.logits[0])[20:]
    assert drift.abs().max() > 1e-3 * oracle.scale
    runner = th.Runner(th.adapt(hf_model), **TINY)
    assert_serves(runner, oracle, whole([60]), chunked([60], 7), decoded([60], 40))


@pytest.mark.parametrize("family", GATES)
def test_limits_that_configs_leave_open(family: str):
    spec = spec_of(make(family))
    lowest = 0.001 if family in ("nemotron_h", "zamba2") else 0.0
    assert (spec.dt_min, spec.dt_max) == (lowest, float("inf"))


def test_nemotron_takes_its_lower_limit_from_another_field():
    hf_model = make("nemotron_h", time_step_limit=(0.5, 0.6), time_step_min=0.02, time_step_max=0.1)
    spec = spec_of(hf_model)
    assert (spec.dt_min, spec.dt_max) == (0.02, float("inf"))


@pytest.mark.parametrize("in_float32", [True, False])
def test_residuals_of_mamba2_are_float32_where_its_config_says_so(in_float32: bool):
    model = th.adapt(make("mamba2", residual_in_fp32=in_float32).bfloat16())
    seen: list[torch.dtype] = []
    model.layers[1].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    serve(th.Runner(model, **TINY), make_texts([5]), whole([5]))
    assert seen == [torch.float32 if in_float32 else torch.bfloat16]


# ---- gate and norm -----------------------------------------------------------------------------


def gated_by(module: Any, o: Tensor, z: Tensor) -> Tensor:
    """What transformers makes of a float32 output of its recurrence, in z's dtype."""
    if isinstance(module.norm, torch.nn.Identity):
        return (o.float() * torch.nn.functional.silu(z.float())).to(z.dtype)
    return module.norm(o.float()[None], z[None])[0].to(z.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", GATES)
def test_gate_and_norm(family: str, dtype: torch.dtype):
    """Bit by bit those of transformers' prefill, which rounds once, after the norm's weight."""
    theirs, ours = (mixer.to(dtype) for mixer in first_mixers(family))
    generator = torch.Generator().manual_seed(0)
    o, z = torch.randn(2, 9, ours.spec.inner_dim, generator=generator).to(dtype)
    expected = gated_by(theirs, o, z)
    assert ours.spec.gate == GATES[family]
    assert torch.equal(ours._gate(o, z), expected)
    for change in ({"gate": "after_norm"}, {"gate": "before_norm"}, {"norm_groups": 1}):
        other = replace(ours.spec, **change)
        if ours.norm_weight is not None and other != ours.spec:
            ours.spec, kept = other, ours.spec
            assert (ours._gate(o, z) - expected).abs().max() > 0.1
            ours.spec = kept


def test_weight_of_the_norm_applies_before_the_cast():
    theirs, ours = (mixer.bfloat16() for mixer in first_mixers("bamba"))
    o, z = torch.randn(2, 64, ours.spec.inner_dim, generator=torch.Generator().manual_seed(0))
    o, z = o.bfloat16(), z.bfloat16()
    cast_first = theirs.norm(o, z)  # its own decode: the output of the recurrence is bfloat16
    assert not torch.equal(ours._gate(o, z), cast_first)
    torch.testing.assert_close(ours._gate(o, z), cast_first, rtol=2**-7, atol=0)


# ---- multipliers -------------------------------------------------------------------------------


def test_falcon_folds_its_multipliers_into_the_projection():
    theirs, ours = first_mixers("falcon_h1_norm")
    parts = [96, 96, 2 * 24, 2 * 24, 8]  # z, x, B, C, dt
    multipliers = torch.cat(
        [torch.full((n,), m) for n, m in zip(parts, [0.9, 1.4, 0.6, 1.1, 0.8], strict=True)]
    )
    expected = theirs.in_proj.weight * 1.25 * multipliers[:, None]
    torch.testing.assert_close(ours.in_proj.weight, expected, rtol=1e-6, atol=0)
    # The multiplier of the input does not reach the bias.
    torch.testing.assert_close(ours.in_proj.bias, theirs.in_proj.bias * multipliers)


def test_multipliers_of_attention_and_logits():
    falcon, granite = make("falcon_h1"), make("granitemoehybrid")
    for hf_model, scale, logits_scale in ((falcon, 32**-0.5, 0.6), (granite, 0.15, 1 / 6)):
        model = th.adapt(hf_model)
        assert {entry.spec.scale for entry in model.table.of_kind("paged_attention")} == {scale}
        assert model.logits_scale == logits_scale


# ---- models of one kind of layer ---------------------------------------------------------------


PURE: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "bamba without attention": ("bamba", {"attn_layer_indices": None}, ("mamba2",)),
    "granite without Mamba2": (
        "granitemoehybrid_dense",
        {"layer_types": ["full_attention"] * 4},
        ("paged_attention",),
    ),
    "nemotron of Mamba2 and MLP": (
        "nemotron_h",
        {"layer_types": ["mlp", "linear_attention", "mlp"], "use_bias": True, "mlp_bias": True},
        ("mamba2",),
    ),
}


@pytest.mark.parametrize("name", PURE)
def test_one_kind_of_mixer(name: str):
    family, options, kinds = PURE[name]
    hf_model = make(family, **options)
    oracle = ask(hf_model, make_texts([70, 3]))
    model = th.adapt(hf_model)
    assert model.table.kinds == kinds
    runner = th.Runner(model, **TINY)
    assert_serves(runner, oracle, whole([70, 3]), chunked([70, 3], 32), decoded([70, 3], 2))


def test_experts_behind_a_latent_projection():
    hf_model = make("nemotron_h", moe_latent_size=24)
    oracle = ask(hf_model, make_texts([70]))
    assert_serves(th.Runner(th.adapt(hf_model), **TINY), oracle, chunked([70], 32))


# ---- refusals ----------------------------------------------------------------------------------


def refusal(family: str, **options: Any) -> str:
    return error_text(th.UnsupportedError, spec_of, make(family, **options))


def test_refusals():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    refusals = [
        refusal("bamba", hidden_act="gelu"),
        refusal("bamba", rope_parameters=rope),
        refusal("falcon_h1", rope_parameters=rope),
        refusal("granitemoehybrid", position_embedding_type="alibi"),
        refusal("nemotron_h", mamba_hidden_act="gelu"),
        refusal("nemotron_h", mlp_hidden_act="silu"),
        refusal("nemotron_h", sliding_window=64),
        refusal("nemotron_h", residual_in_fp32=True),
        refusal("bamba", attn_rotary_emb=16),
        refusal("granitemoehybrid", normalization_function="layernorm"),
    ]
    assert_expected_inline(
        "\n".join(refusals),
        """\
bamba: config field hidden_act must be one of ['silu'], got 'gelu'
bamba: config field rope_parameters.rope_type must be one of ['default', 'linear', 'llama3', 'yarn'], got 'dynamic'
falcon_h1: config field rope_parameters.rope_type must be one of ['default', 'linear', 'llama3', 'yarn'], got 'dynamic'
granitemoehybrid: config field position_embedding_type must be one of ['None', 'nope', 'rope'], got 'alibi'
nemotron_h: config field mamba_hidden_act must be one of ['silu'], got 'gelu'
nemotron_h: config field mlp_hidden_act must be one of ['relu2'], got 'silu'
nemotron_h: config field sliding_window must be one of ['None'], got 64
nemotron_h: config field residual_in_fp32 must be one of ['False'], got True
bamba: config field attn_rotary_emb must be one of ['8'], got 16
granitemoehybrid: config field normalization_function must be one of ['rmsnorm'], got 'layernorm'""",  # noqa: E501
    )


def test_an_mlp_alone_may_have_any_activation():
    hf_model = make("nemotron_h", mlp_hidden_act="gelu", layer_types=["linear_attention", "mlp"])
    oracle: Oracle = ask(hf_model, make_texts([40]))
    assert_serves(th.Runner(th.adapt(hf_model), **TINY), oracle, whole([40]))
