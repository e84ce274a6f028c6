"""Models of about 200M parameters, one for each family, with random weights.

The shapes are those of published models with fewer layers and a smaller vocabulary, so that the
embedding does not dominate. Decays have time constants from 1 to 1000 tokens, as trained models
have: no state fades at once or overflows.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

VOCAB_SIZE = 32_000

_LINEAR = {
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_DENSE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 1024,
    "intermediate_size": 2560,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}
_TINY = {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 512}


def _made(name: str, config: dict[str, Any]) -> Any:
    """A model of transformers' class of that name."""
    cls = getattr(import_module("transformers"), name)
    return cls(cls.config_class(**config))


def _qwen3_next(sizes: dict[str, Any]) -> Any:
    config = _DENSE | _LINEAR | {"head_dim": 256, "num_experts": 0} | sizes
    return _made("Qwen3NextForCausalLM", config)


def _qwen3_next_moe(sizes: dict[str, Any]) -> Any:
    """64 experts, 8 for each token, and a shared one, in fewer and narrower layers."""
    experts = {
        "num_hidden_layers": 8,
        "hidden_size": 768,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    }
    return _made("Qwen3NextForCausalLM", _DENSE | _LINEAR | {"head_dim": 256} | experts | sizes)


def _lara_mini(sizes: dict[str, Any]) -> Any:
    """The same experts; attention to a window of 512 keys, and to all in a layer of five."""
    experts = {
        "num_hidden_layers": 10,
        "hidden_size": 768,
        "head_dim": 128,
        "num_experts": 54,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "eos_token_id": None,
    }
    config = _DENSE | _LINEAR | experts | sizes
    del config["intermediate_size"]
    return _made("LaraMiniForCausalLM", config)


def _qwen4_exp(sizes: dict[str, Any]) -> Any:
    """The same experts, in fewer layers; the published indexer, and four residual streams. The
    table of n-grams is small, as no step reads more than a few of its rows."""
    options = {
        "num_hidden_layers": 8,
        "hidden_size": 640,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "hc_lowrank": 128,
        "ple_layer_ids": [1],
        "ngram_vocab_size_base": 20_000,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 128,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
        "eos_token_id": 1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
        },
    }
    config = _DENSE | _LINEAR | {"head_dim": 256} | options | sizes
    config |= {"ple_embed_dim": config["hidden_size"]}
    del config["intermediate_size"]
    return _made("Qwen4ExpForCausalLM", config)


def _glm5_next(sizes: dict[str, Any]) -> Any:
    """GLM-5.3: the same experts, the published blocks and streams; its vision part has next to no
    weights."""
    options = {
        "num_hidden_layers": 8,
        "hidden_size": 640,
        "n_routed_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 128,
        "num_key_value_heads": 8,
        "linear_num_heads": 8,
        "q_lora_rank": 256,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 0,
        "v_head_dim": 128,
        "index_n_heads": 4,
        "index_head_dim": 128,
        "pad_token_id": None,
    }
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 1, "intermediate_size": 16}
    vision |= {"projection_intermediate_size": 16}
    config = {
        "text_config": _DENSE | options | sizes,
        "vision_config": vision | {"out_hidden_size": (options | sizes)["hidden_size"]},
        "tie_word_embeddings": True,
    }
    return _made("Glm5NextForConditionalGeneration", config)


def _qwen3_5(sizes: dict[str, Any]) -> Any:
    return _made("Qwen3_5ForCausalLM", _DENSE | _LINEAR | {"head_dim": 256} | sizes)


def _olmo_hybrid(sizes: dict[str, Any]) -> Any:
    """Head dims of the delta rule 96 and 192, as many key heads as value heads."""
    linear = {
        "linear_num_key_heads": 10,
        "linear_num_value_heads": 10,
        "linear_key_head_dim": 96,
        "linear_value_head_dim": 192,
        "num_key_value_heads": 8,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    return _made("OlmoHybridForCausalLM", _DENSE | linear | sizes)


def _qwen3(sizes: dict[str, Any]) -> Any:
    """Full attention alone, the control."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    return _made("Qwen3ForCausalLM", _DENSE | heads | {"intermediate_size": 3072} | sizes)


_MAMBA2 = {"mamba_n_heads": 32, "mamba_n_groups": 1, "mamba_d_state": 128}


def _bamba(sizes: dict[str, Any]) -> Any:
    """Mamba2 with heads of 64 and one group, full attention in every fourth layer."""
    return _made("BambaForCausalLM", _DENSE | _MAMBA2 | {"attn_layer_indices": [3, 7, 11]} | sizes)


def _granitemoehybrid(sizes: dict[str, Any]) -> Any:
    """The dense form: the same layers, no positions, and the published multipliers."""
    options = {
        "num_local_experts": 0,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 1 / 128,
        "logits_scaling": 8.0,
    }
    config = _DENSE | _MAMBA2 | options | sizes
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(12)]
    config |= {
        "layer_types": kinds[: config["num_hidden_layers"]],
        "shared_intermediate_size": config["intermediate_size"],
    }
    return _made("GraniteMoeHybridForCausalLM", config)


def _falcon_h1(sizes: dict[str, Any]) -> Any:
    """Attention and Mamba2 in every layer, without a norm after the gate."""
    options = {
        "num_hidden_layers": 13,
        "intermediate_size": 2048,
        "head_dim": 64,
        "mamba_d_ssm": 1536,
        "mamba_n_heads": 24,
        "mamba_d_state": 128,
        "ssm_multipliers": [0.35, 0.25, 0.35, 0.5, 0.35],
        "ssm_in_multiplier": 1.25,
        "key_multiplier": 0.4,
        "embedding_multiplier": 5.7,
    }
    return _made("FalconH1ForCausalLM", _DENSE | options | sizes)


def _nemotron_h(sizes: dict[str, Any]) -> Any:
    """Mamba2 with 8 groups, attention and MLPs as layers of their own.

    Steps have hardly a lower limit: transformers does not keep to it in decode.
    """
    kinds = [*["linear_attention", "mlp"] * 3, "full_attention", "mlp"] * 2
    config = _DENSE | {"intermediate_size": 5376, "num_hidden_layers": len(kinds)} | sizes
    config |= {
        "layer_types": kinds[-config.pop("num_hidden_layers") :],
        "mamba_num_heads": 32,
        "time_step_min": 1e-9,
    }
    return _made("NemotronHForCausalLM", config)


def _layer_types(sizes: dict[str, Any]) -> dict[str, Any]:
    """Full attention, or MLA, in every fourth layer."""
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    return {"layer_types": [kinds[i % 4] for i in range((_DENSE | sizes)["num_hidden_layers"])]}


_LATENT = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_key_value_heads": 8,
    "first_k_dense_replace": 12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}


def _deepseek_v3(sizes: dict[str, Any]) -> Any:
    """MLA in every layer, the control of the hybrids with MLA; MLPs without experts."""
    options = {"q_lora_rank": 512, "intermediate_size": 3072}
    return _made("DeepseekV3ForCausalLM", _DENSE | _LATENT | options | sizes)


def _kimi_linear(sizes: dict[str, Any]) -> Any:
    """Kimi delta attention and MLA without rotary embedding; MLPs without experts."""
    config = _DENSE | _LATENT | {"linear_num_heads": 8} | _layer_types(sizes) | sizes
    return _made("KimiLinearForCausalLM", config)


def _bailing_hybrid(sizes: dict[str, Any]) -> Any:
    """Ling-3: Kimi delta attention of bounded decay and gated MLA; MLPs without experts."""
    config = _DENSE | _LATENT | {"intermediate_size": 2048} | _layer_types(sizes) | sizes
    return _made("BailingHybridForCausalLM", config)


def _minimax(sizes: dict[str, Any]) -> Any:
    """Lightning attention and full attention. Every MLP is an expert: here one, that all take.

    The first layer has full attention: with another, transformers' cache loses count of tokens.
    """
    options = {"num_local_experts": 1, "num_experts_per_tok": 1}
    kinds = _layer_types(sizes)["layer_types"]
    config = _DENSE | options | {"layer_types": [kinds[-1], *kinds[:-1]]} | sizes
    return _made("MiniMaxForCausalLM", config)


def _mamba2(sizes: dict[str, Any]) -> Any:
    """Mamba2 in every layer, and nothing else."""
    names = ["vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings"]
    own = {name: (_DENSE | {"num_hidden_layers": 24} | sizes)[name] for name in names}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    heads = {"num_heads": own["hidden_size"] * 2 // 64, "n_groups": 1}
    return _made("Mamba2ForCausalLM", own | tokens | heads)


def _zamba2(sizes: dict[str, Any]) -> Any:
    """Mamba2 in every layer; a block of attention and an MLP before every sixth, of one set of
    weights."""
    names = ["vocab_size", "hidden_size", "tie_word_embeddings", "max_position_embeddings"]
    own = {name: (_DENSE | sizes)[name] for name in names}
    kinds = [*["linear_attention"] * 5, "hybrid"]
    num_layers = sizes.get("num_hidden_layers", 18)
    options = {
        "num_hidden_layers": num_layers,
        "layers_block_type": [kinds[(i - num_layers) % 6] for i in range(num_layers)],
        "num_attention_heads": 16,
        "n_mamba_heads": own["hidden_size"] * 2 // 64,
        "use_shared_attention_adapter": True,
        "use_mem_rope": True,
    }
    return _made("Zamba2ForCausalLM", own | options)


def _zamba(sizes: dict[str, Any]) -> Any:
    """Mamba of two heads in every layer; a block of attention and an MLP before every sixth, of one
    set of weights."""
    names = ["vocab_size", "hidden_size", "tie_word_embeddings", "max_position_embeddings"]
    own = {name: (_DENSE | sizes)[name] for name in names}
    num_layers = sizes.get("num_hidden_layers", 18)
    period = min(6, num_layers // 2)  # transformers takes no block that one layer has alone
    kinds = [*["linear_attention"] * (period - 1), "hybrid"]
    options = {
        "intermediate_size": 4 * own["hidden_size"],
        "num_hidden_layers": num_layers,
        "layers_block_type": [kinds[(i - num_layers) % period] for i in range(num_layers)],
    }
    return _made("ZambaForCausalLM", own | options)


def _mamba(sizes: dict[str, Any]) -> Any:
    """Mamba in every layer, and nothing else."""
    return _made("MambaForCausalLM", _mamba_sizes(sizes))


def _falcon_mamba(sizes: dict[str, Any]) -> Any:
    """The same with norms of what selects."""
    return _made("FalconMambaForCausalLM", _mamba_sizes(sizes))


def _mamba_sizes(sizes: dict[str, Any]) -> dict[str, Any]:
    names = ["vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings"]
    own = {name: (_DENSE | {"num_hidden_layers": 24} | sizes)[name] for name in names}
    return own | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}


def _jamba(sizes: dict[str, Any]) -> Any:
    """Mamba, full attention in every fourth layer, 8 experts, 2 for each token, in every other."""
    options = {
        "intermediate_size": 640,
        "num_experts": 8,
        "attn_layer_period": 4,
        "attn_layer_offset": 3,
    }
    return _made("JambaForCausalLM", _DENSE | options | sizes)


def _lfm2(sizes: dict[str, Any]) -> Any:
    """Gated short convolutions, full attention in every third layer."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8}
    options = {"intermediate_size": 3072, "block_auto_adjust_ff_dim": False}
    config = _DENSE | heads | options | _convolutions(sizes) | sizes
    return _made("Lfm2ForCausalLM", config)


def _lfm2_moe(sizes: dict[str, Any]) -> Any:
    """The same with 32 experts, 4 for each token, in all but the first two layers."""
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4}
    experts = {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 192,
    }
    config = _DENSE | heads | experts | _convolutions(sizes) | sizes
    return _made("Lfm2MoeForCausalLM", config)


def _convolutions(sizes: dict[str, Any]) -> dict[str, Any]:
    kinds = ["conv", "conv", "full_attention"]
    return {"layer_types": [kinds[i % 3] for i in range((_DENSE | sizes)["num_hidden_layers"])]}


def _lfm3(sizes: dict[str, Any]) -> Any:
    """Convolutions of seven inputs, windows of 256 keys, gated attention, norms on both sides."""
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    config = _DENSE | {"intermediate_size": 3072} | tokens | sizes
    return _made("Lfm3ForCausalLM", config)


def _recurrent_gemma(sizes: dict[str, Any]) -> Any:
    """Two recurrent layers to each of attention with one head of keys and a window."""
    options = {
        "intermediate_size": 6144,  # of both halves, as this config counts
        "num_key_value_heads": 1,
        "attention_window_size": 2048,
    }
    return _made("RecurrentGemmaForCausalLM", _DENSE | options | sizes)


def _zaya(sizes: dict[str, Any]) -> Any:
    """16 experts, one for each token, in fewer layers; all of them attend to all keys."""
    options = {"num_hidden_layers": 10, "head_dim": 128, "moe_intermediate_size": 256}
    config = _DENSE | options | sizes
    del config["intermediate_size"]
    return _made("ZayaForCausalLM", config)


def _inkling(sizes: dict[str, Any]) -> Any:
    """Biases by distance, windows of 512 keys in five of six layers; 24 experts, 4 for each token,
    and two that all take."""
    options = {
        "hidden_size": 768,
        "num_attention_heads": 8,
        "head_dim": 128,
        "swa_num_attention_heads": 8,
        "swa_num_key_value_heads": 4,
        "n_routed_experts": 24,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 192,
        "mlp_layer_types": ["dense", *["sparse"] * ((_DENSE | sizes)["num_hidden_layers"] - 1)],
        "route_scale": 1.0,
        "logits_mup_width_multiplier": 1.0,
        "tie_word_embeddings": False,
    }
    return _made("InklingForCausalLM", _DENSE | options | sizes)


_INKLING2 = {
    "hidden_size": 768,
    "num_attention_heads": 8,
    "head_dim": 128,
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 4,
    "sliding_window_size": 512,
    "n_routed_experts": 26,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 192,
    "route_scale": 1.0,
    "tie_word_embeddings": False,
    "eos_token_id": None,
}


def _inkling2(sizes: dict[str, Any]) -> Any:
    """The same with sinks and gates, and 26 experts, of which none is everyone's."""
    config = _DENSE | _INKLING2 | sizes
    config["unpadded_vocab_size"] = config["vocab_size"]
    del config["intermediate_size"]
    return _made("Inkling2ForCausalLM", config)


def _inkling2_loop(sizes: dict[str, Any]) -> Any:
    """The same, of which half of the layers run three times."""
    config = _DENSE | _INKLING2 | sizes
    config["unpadded_vocab_size"] = config["vocab_size"]
    num_layers = config["num_hidden_layers"]
    block = num_layers // 4
    config |= {
        "n_layers_per_attn_res_block": block,
        "loop_layer_index_start": block,
        "loop_layer_index_end": 3 * block,
    }
    del config["intermediate_size"]
    return _made("Inkling2LoopForCausalLM", config)


def _rwkv(sizes: dict[str, Any]) -> Any:
    """Head and embedding apart, as published."""
    names = ["vocab_size", "hidden_size", "num_hidden_layers"]
    own = {name: (_DENSE | sizes)[name] for name in names}
    return _made("RwkvForCausalLM", own)


def _xlstm(sizes: dict[str, Any]) -> Any:
    """Heads of half the published width, as the model is a quarter as wide and has half as many."""
    names = ["vocab_size", "hidden_size", "num_hidden_layers"]
    own = {name: (_DENSE | sizes)[name] for name in names}
    return _made("xLSTMForCausalLM", own | {"num_heads": 4})


FAMILIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "qwen3_next": _qwen3_next,
    "qwen3_5": _qwen3_5,
    "olmo_hybrid": _olmo_hybrid,
    "qwen3_next_moe": _qwen3_next_moe,
    "lara_mini": _lara_mini,
    "qwen4_exp": _qwen4_exp,
    "glm5_next": _glm5_next,
    "qwen3": _qwen3,
    "deepseek_v3": _deepseek_v3,
    "kimi_linear": _kimi_linear,
    "bailing_hybrid": _bailing_hybrid,
    "minimax": _minimax,
    "bamba": _bamba,
    "granitemoehybrid": _granitemoehybrid,
    "falcon_h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
    "mamba2": _mamba2,
    "zamba": _zamba,
    "zamba2": _zamba2,
    "mamba": _mamba,
    "falcon_mamba": _falcon_mamba,
    "jamba": _jamba,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_moe,
    "lfm3": _lfm3,
    "recurrent_gemma": _recurrent_gemma,
    "zaya": _zaya,
    "inkling": _inkling,
    "inkling2": _inkling2,
    "inkling2_loop": _inkling2_loop,
    "rwkv": _rwkv,
    "xlstm": _xlstm,
}


def make_model(
    family: str,
    dtype: torch.dtype = torch.float32,
    *,
    quick: bool = False,
    device: str = "cpu",
    **sizes: Any,
) -> Any:
    """A transformers model of a family, the same weights at every call.

    Args:
        family: a name in FAMILIES.
        dtype: of the weights.
        quick: tiny sizes, to see that a benchmark runs.
        device: where its weights are drawn; wide ones take minutes on a host.
        sizes: fields of the config that differ.
    """
    generator = torch.Generator(device).manual_seed(0)
    with torch.device(device):
        model = FAMILIES[family]((_TINY if quick else {}) | sizes)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            fill(name, weight, generator)
    return model.to(dtype).eval().requires_grad_(False)


def fill(name: str, weight: torch.Tensor, generator: torch.Generator) -> None:
    """Random values for a weight of that name, on the generator's device."""
    if name.endswith("A_log"):
        weight.uniform_(1, 16, generator=generator).log_()
    elif name.endswith(("dt_bias", "dt_proj.bias", "dt_proj_bias")):
        weight.uniform_(-7, -2, generator=generator)
    elif name.endswith("fgate_preact.bias"):
        weight.uniform_(0, 7, generator=generator)
    elif name.endswith("recurrent_param"):
        weight.uniform_(-9, -3, generator=generator)
    elif name.endswith("time_decay"):
        weight.uniform_(-7, 0, generator=generator)
    elif "time_mix" in name:
        weight.uniform_(generator=generator)
    elif name.endswith(".linear.weight"):  # of a block without residuals, which magnifies rounding
        weight.normal_(std=0.1 * weight.shape[-1] ** -0.5, generator=generator)
    elif "norm" in name or ".ln" in name or name.endswith(("states_scale", "residual_scale")):
        noise = torch.randn(weight.shape, generator=generator, device=generator.device)
        weight.add_(noise, alpha=0.1)
    else:
        weight.normal_(std=weight.shape[-1] ** -0.5, generator=generator)
