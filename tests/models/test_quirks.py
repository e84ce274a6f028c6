"""Quirks of Kimi delta attention, lightning attention and MLA: each fails when it is "fixed"."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import torch_hybrid as th
from tests.models.oracle import ask, assert_equal_logits, decoded, make_texts, serve, whole
from tests.models.ring_checkpoint import CONFIG, make_weights, save
from tests.models.ring_reference import reference_logits
from tests.tiny_models import BUILDERS, make_model, randomize
from torch_hybrid.layers.lightning_attention import alibi_slopes, geometric_slopes
from torch_hybrid.models.adapt import adapt
from torch_hybrid.models.families import architecture_of
from torch_hybrid.models.kimi_delta import kimi_delta_specs
from torch_hybrid.ops.delta_rule._composed import gated_norm, kimi_gated_norm, kimi_log_decay

LENGTHS = (40, 70)


def make_runner(model: Any, **options: Any) -> th.Runner:
    return th.Runner(model, max_seqs=2, max_tokens=256, kv_tokens=256, compile=False, **options)


def assert_served(hf_model: Any, **options: Any) -> None:
    """Prefill and decode are as transformers computes."""
    oracle = ask(hf_model, make_texts(LENGTHS))
    runner = make_runner(th.adapt(hf_model), **options)
    assert_equal_logits(serve(runner, oracle.texts, whole(LENGTHS)), oracle)
    assert_equal_logits(serve(runner, oracle.texts, decoded(LENGTHS, 8)), oracle)


def last_logits(runner: th.Runner, tokens: list[int]) -> Tensor:
    [seq] = runner.new_sequences(1)
    logits = runner.extend([seq], [tokens])[0].clone()
    runner.free([seq])
    return logits


@pytest.mark.parametrize(
    ("family", "layer_type", "is_rotated"),
    [
        ("kimi_linear", "full_attention", False),
        ("bailing_hybrid", "full_attention", True),
        *((f, "full_attention", False) for f in {"lara_mini"} & BUILDERS.keys()),
        *((f, "sliding_attention", True) for f in {"lara_mini"} & BUILDERS.keys()),
    ],
)
def test_attention_without_positions_sees_a_set_of_tokens(
    family: str, layer_type: str, is_rotated: bool
):
    """The order of the context does not matter to a single layer of it."""
    layers = {"num_hidden_layers": 1, "layer_types": [layer_type]}
    runner = make_runner(th.adapt(make_model(family, **layers)))
    [tokens] = make_texts([30])
    first = last_logits(runner, tokens)
    other = last_logits(runner, [*reversed(tokens[:-1]), tokens[-1]])
    error = (first - other).abs().max() / first.abs().max()
    assert (error > 1e-2) if is_rotated else (error < 2e-5)


HUB_LAYERS = {
    "kda_layers": [1, 2, 4],
    "full_attn_layers": [3],
    "head_dim": 20,
    "num_heads": 3,
    "short_conv_kernel_size": 4,
}


def test_layer_lists_of_kimi_linear_count_from_one(tmp_path: Path):
    layer_types = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
    hf_model = make_model("kimi_linear", layer_types=layer_types, seed=1)
    hf_model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    for name in ("layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"):
        del config[name]
    file.write_text(json.dumps({**config, "linear_attn_config": HUB_LAYERS}))
    model = th.from_pretrained(tmp_path)
    assert [model.table[layer_id].kind for layer_id in range(4)] == [
        "kimi_delta_attention",
        "kimi_delta_attention",
        "latent_attention",
        "kimi_delta_attention",
    ]
    oracle = ask(hf_model, make_texts(LENGTHS))
    assert_equal_logits(serve(make_runner(model), oracle.texts, whole(LENGTHS)), oracle)


def test_dense_layer_of_kimi_linear_under_either_name(tmp_path: Path):
    """transformers writes a dense MLP as ``block_sparse_moe``, the hub as ``mlp``."""
    hf_model = make_model("kimi_linear", seed=3)
    hf_model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    written, published = "model.layers.0.block_sparse_moe.", "model.layers.0.mlp."
    assert any(name.startswith(written) for name in weights)
    renamed = {name.replace(written, published): weight for name, weight in weights.items()}
    save_file(renamed, file, {"format": "pt"})
    oracle = ask(hf_model, make_texts(LENGTHS))
    runner = make_runner(th.from_pretrained(tmp_path))
    assert_equal_logits(serve(runner, oracle.texts, whole(LENGTHS)), oracle)


def test_slopes_where_the_heads_are_no_power_of_two():
    exponents = torch.tensor([2.0, 4.0, 6.0, 8.0, 1.0, 3.0])
    assert torch.equal(alibi_slopes(6), 2**-exponents)
    plain = torch.tensor([2 ** (-8 * (head + 1) / 6) for head in range(6)])
    torch.testing.assert_close(geometric_slopes(6), plain, rtol=1e-7, atol=0)
    assert torch.equal(alibi_slopes(8), geometric_slopes(8))


@pytest.mark.parametrize("num_heads", [4, 6])
def test_decay_of_each_layer_of_minimax(num_heads: int):
    kinds = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": 2}
    hf_model = make_model("minimax", layer_types=kinds, **heads)
    rates = {
        layer_id: hf_model.model.layers[layer_id].self_attn.slope_rate.flatten()
        for layer_id in (0, 1, 3)
    }
    model = th.adapt(hf_model)
    for layer_id, rate in rates.items():
        slopes = model.hf_model.model.layers[layer_id].self_attn.mixer.slopes
        torch.testing.assert_close(slopes, rate, rtol=1e-6, atol=0)
        factor = 1 - layer_id / 3.00001 + 1e-5
        torch.testing.assert_close(slopes, geometric_slopes(num_heads) * factor, rtol=1e-4, atol=0)


def test_decay_of_each_layer_of_ring(tmp_path: Path):
    save(tmp_path, CONFIG, make_weights(CONFIG, seed=0))
    model = th.from_pretrained(tmp_path)
    for layer_id in (0, 2):
        factor = 1 - layer_id / 4 + 1e-5
        slopes = model.layers[layer_id].self_attn.mixer.slopes
        torch.testing.assert_close(slopes, alibi_slopes(6) * factor, rtol=1e-6, atol=0)


def test_lightning_attention_of_minimax_is_not_scaled_and_keeps_its_own_eps():
    hf_model = make_model("minimax", rms_norm_eps=0.05)
    [spec] = {entry.spec for entry in th.adapt(hf_model).table.of_kind("lightning_attention")}
    assert (spec.scale, spec.norm_eps) == (1.0, 1e-6)
    assert_served(make_model("minimax", rms_norm_eps=0.05))


def yarn(**fields: float) -> dict[str, Any]:
    return {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            **fields,
        },
        "max_position_embeddings": 512,
    }


@pytest.mark.parametrize("absorbed", ["always", "never"])
@pytest.mark.parametrize("family", ["deepseek_v3", "bailing_hybrid"])
def test_scale_of_mla_is_that_of_expanded_heads(family: str, absorbed: str):
    """The width of a head counts, not that of a cached row; YaRN's mscale, and it squared."""
    options = yarn(mscale=1.0, mscale_all_dim=0.7)
    hf_model = make_model(family, **options)
    qk_dim = hf_model.config.qk_nope_head_dim + hf_model.config.qk_rope_head_dim
    [spec] = {entry.spec for entry in th.adapt(hf_model).table.of_kind("latent_attention")}
    mscale = 0.1 * 0.7 * math.log(8.0) + 1
    assert math.isclose(spec.scale, qk_dim**-0.5 * mscale**2)
    policy = th.PrefixPolicy(absorbed=absorbed)
    assert_served(make_model(family, seed=1, **options), backends=th.Backends(prefix=policy))


@pytest.mark.parametrize("family", ["deepseek_v3", "kimi_linear", "bailing_hybrid"])
def test_norms_inside_mla_keep_their_own_eps(family: str):
    assert_served(make_model(family, seed=1, rms_norm_eps=0.05))


def test_norms_inside_mla_of_ring_keep_their_own_eps(tmp_path: Path):
    config = {**CONFIG, "rms_norm_eps": 0.05}
    weights = make_weights(config, seed=0)
    save(tmp_path, config, weights)
    [text] = make_texts([40])
    expected = reference_logits(config, weights, text)
    [actual] = serve(make_runner(th.from_pretrained(tmp_path)), [text], whole([40]))
    assert (actual - expected).abs().max() < 2e-5 * expected.abs().max()


def test_order_of_casts_in_the_gated_norms():
    """Kimi's weight and gate apply in float32; the gated delta rule's weight after the cast."""
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    o, gate = torch.randn(2, 50, 2, 16, dtype=torch.bfloat16).unbind(0)
    weight = 1 + 0.3 * torch.randn(16, dtype=torch.bfloat16)
    results = []
    for ours, theirs in (
        (kimi_gated_norm(o, gate, weight, eps=1e-6), KimiLinearRMSNormGated(16)),
        (gated_norm(o, gate, weight, gate="silu", eps=1e-6), Qwen3NextRMSNormGated(16)),
    ):
        theirs.bfloat16().weight.data.copy_(weight)
        results.append(ours)
        assert torch.equal(results[-1], theirs(o, gate))
    normed = (o.float() * torch.rsqrt(o.float().square().mean(-1, keepdim=True) + 1e-6)).bfloat16()
    cast_before_weight = (weight * normed * gate.float().sigmoid()).bfloat16()
    assert not torch.equal(results[0], cast_before_weight)


@pytest.mark.parametrize("bound", [-5.0, -2.0])
def test_decay_of_ling_3_is_bounded(bound: float):
    hf_model = make_model("bailing_hybrid", kda_lower_bound=bound)
    gate = hf_model.model.layers[0].self_attn.forget_gate
    gate.dt_bias.add_(2.0)  # well into the bound
    x = torch.randn(1, 40, 64)
    expected = gate(x)[0]
    mixer = th.adapt(hf_model).hf_model.model.layers[0].self_attn.mixer
    actual = kimi_log_decay(
        gate.f_proj(x)[0], mixer.A_log, mixer.dt_bias, mixer.spec.gate_lower_bound
    )
    assert bound <= actual.min() < 0.99 * bound
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_decay_of_ling_3_without_a_bound():
    hf_model = make_model("bailing_hybrid", kda_safe_gate=False, seed=1)
    assert_served(hf_model)


def test_decay_of_kimi_linear_has_no_bound():
    """A channel may forget all at once."""
    hf_model = make_model("kimi_linear", seed=3)
    randomize(hf_model, seed=3)
    hf_model.model.layers[0].self_attn.forget_gate.dt_bias[::7] = 60.0
    assert_served(hf_model)


def test_mixer_that_no_adapter_knows():
    config = make_model("kimi_linear").config
    config.layer_types = ["linear_attention", "mamba", "linear_attention", "full_attention"]
    with pytest.raises(th.UnsupportedError) as caught:
        kimi_delta_specs(config, full=None, gate_lower_bound=None)  # type: ignore[arg-type]
    assert str(caught.value) == (
        "kimi_linear: config field layer_types must be one of "
        "['full_attention', 'linear_attention'], got 'mamba'"
    )


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("kimi_linear", "mla_use_nope", False),
        ("kimi_linear", "moe_router_activation_func", "softmax"),
        ("bailing_hybrid", "no_kda_lora", False),
        ("bailing_hybrid", "score_function", "softmax"),
        ("minimax", "sliding_window", 8),
        ("qwen4_exp_text", "indexer_compress_ratio", 5),
        ("qwen4_exp_text", "hidden_act", "gelu"),
    ],
)
def test_config_field_that_is_not_served(tmp_path: Path, family: str, field: str, value: object):
    make_model(family.removesuffix("_text")).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    with pytest.raises(th.UnsupportedError, match=f"{family}: config field {field} must be one of"):
        th.from_pretrained(tmp_path)


@pytest.mark.parametrize("family", ["deepseek_v3", "kimi_linear", "bailing_hybrid"])
def test_latent_rank_that_does_not_match_the_checkpoint(tmp_path: Path, family: str):
    hf_model = make_model(family)
    hf_model.save_pretrained(tmp_path)
    config, file = hf_model.config, tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "kv_lora_rank": 48}))
    with pytest.raises(ValueError, match=r"has mismatched keys: .*kv_a_proj_with_mqa") as caught:
        th.from_pretrained(tmp_path)
    for rank in (config.kv_lora_rank, 48):
        assert f"[{rank + config.qk_rope_head_dim}, {config.hidden_size}]" in str(caught.value)


def test_the_gate_of_qwen4_exp_may_be_silu():
    assert_served(make_model("qwen4_exp", output_gate_type=None, seed=12))


def test_blocks_of_qwen4_exp_lie_in_one_page():
    model = adapt(make_model("qwen4_exp"))
    with pytest.raises(th.UnsupportedError, match=r"page_size must be a multiple of 4.*got 6"):
        th.Runner(model, page_size=6, compile=False)


def test_the_convolution_over_n_grams_has_an_end():
    config = make_model("qwen4_exp", ple_conv_kernel_size=6, ngram_size=4).config
    with pytest.raises(th.UnsupportedError, match="back over 16 tokens, got 21"):
        architecture_of(config)
