"""Random models of transformers, small enough for a test, in which every weight matters.

Fresh from their constructors the models have norms of one, biases of zero and decays that forget
within a few tokens: a wrong state or a swapped weight would go unseen.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from torch_hybrid.models.adapt import adapt
from torch_hybrid.models.families import architecture_of
from torch_hybrid.models.hybrid_model import HybridModel

VOCAB_SIZE = 199
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
# Axes of unequal width, so that one taken for another shows.
MROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [7, 5, 4],
}


def qwen3_next(**options: Any) -> nn.Module:
    """With experts."""
    sizes = {**SIZES, **LINEAR, **EXPERTS, "head_dim": 32, **options}
    return tf.Qwen3NextForCausalLM(tf.Qwen3NextConfig(**sizes))


def qwen3_next_dense(**options: Any) -> nn.Module:
    """Without experts."""
    return qwen3_next(**{"num_experts": 0, **options})


def qwen3_5(**options: Any) -> nn.Module:
    sizes = {**SIZES, **LINEAR, "head_dim": 64, "rope_parameters": MROPE, **options}
    return tf.Qwen3_5ForCausalLM(tf.Qwen3_5TextConfig(**sizes))


def qwen3_5_moe(**options: Any) -> nn.Module:
    sizes = {**SIZES, **LINEAR, **EXPERTS, "head_dim": 64, "rope_parameters": MROPE, **options}
    return tf.Qwen3_5MoeForCausalLM(tf.Qwen3_5MoeTextConfig(**sizes))


def lara_mini(**options: Any) -> nn.Module:
    """A window that ends inside of pages."""
    sizes = {
        **{name: size for name, size in SIZES.items() if name != "intermediate_size"},
        **LINEAR,
        **EXPERTS,
        "layer_types": [*["linear_attention", "sliding_attention"] * 2, "full_attention"],
        "num_hidden_layers": 5,
        "head_dim": 32,
        "sliding_window": 37,
        "eos_token_id": None,
    }
    return tf.LaraMiniForCausalLM(tf.LaraMiniConfig(**{**sizes, **options}))


def qwen4_exp(**options: Any) -> nn.Module:
    """Blocks of 4 tokens, of which 5 are picked; n-grams in two layers, and a token that ends
    texts in the midst of them."""
    layer_types = options.get("layer_types", ["linear_attention", "indexed_attention"] * 2)
    linear = [i for i, layer_type in enumerate(layer_types, 1) if layer_type == "linear_attention"]
    sizes = {
        **SIZES,
        **LINEAR,
        **EXPERTS,
        "layer_types": layer_types,
        "head_dim": 64,
        "rope_parameters": MROPE,
        "output_gate_type": "sigmoid",  # as published
        "hc_count": 3,
        "hc_lowrank": 20,
        "ple_layer_ids": linear,
        "ple_embed_dim": 24,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 200,
        "split_ngram_parts": 2,
        "indexer_n_heads": 8,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 48,
        "indexer_budget": 20,
        "indexer_compress_ratio": 4,
        "eos_token_id": 7,
        "pad_token_id": None,
    }
    del sizes["intermediate_size"]
    return tf.Qwen4ExpForCausalLM(tf.Qwen4ExpTextConfig(**{**sizes, **options}))


def glm5_next(**options: Any) -> nn.Module:
    """With a vision part, as published. Blocks of 4 tokens, of which 5 are picked; gates and rows
    of experts beyond their limit."""
    count = options.get("num_hidden_layers", 4)
    sizes = {
        **SIZES,
        **NO_SPECIAL_TOKENS,
        "num_key_value_heads": 4,
        "layer_types": (["linear_attention", "indexed_attention"] * count)[:count],
        "mlp_layer_types": (["dense", "sparse"] * count)[:count],
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "swiglu_limit": 0.7,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        **LATENT,
        "qk_rope_head_dim": 0,
        "index_n_heads": 8,
        "index_head_dim": 48,
        "index_topk": 20,
        "index_kpool": 4,
        "hc_mult": 3,
        "hc_sinkhorn_iters": 3,
    }
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
    vision_config = {**vision, "out_hidden_size": 64, "projection_intermediate_size": 32}
    text_config = {**sizes, **options}
    return tf.Glm5NextForConditionalGeneration(
        tf.Glm5NextConfig(text_config=text_config, vision_config=vision_config)
    )


def olmo_hybrid(**options: Any) -> nn.Module:
    sizes = {**SIZES, **LINEAR, "pad_token_id": 0, "eos_token_id": None, **options}
    return tf.OlmoHybridForCausalLM(tf.OlmoHybridConfig(**sizes))


def qwen3(**options: Any) -> nn.Module:
    return tf.Qwen3ForCausalLM(tf.Qwen3Config(**{**SIZES, "head_dim": 32, **options}))


# Sizes that every implementation of latent and ragged attention takes.
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
}
GROUPED_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}


def deepseek_v3(**options: Any) -> nn.Module:
    sizes = {**SIZES, **LATENT, **GROUPED_EXPERTS, **options}
    return tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**sizes))


# The families with Kimi delta attention call some fields otherwise.
KIMI_EXPERTS = {
    **{name: size for name, size in GROUPED_EXPERTS.items() if name != "n_routed_experts"},
    "num_local_experts": 8,
}
NO_SPECIAL_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
LINEAR_FIRST = {"layer_types": ["linear_attention", "full_attention"] * 2}


def kimi_linear(**options: Any) -> nn.Module:
    """Heads of another number and width in linear layers than in the others."""
    linear = {"linear_num_heads": 3, "linear_head_dim": 20}
    sizes = {**SIZES, **LATENT, **KIMI_EXPERTS, **LINEAR_FIRST, **NO_SPECIAL_TOKENS, **linear}
    return tf.KimiLinearForCausalLM(tf.KimiLinearConfig(**{**sizes, **options}))


def bailing_hybrid(**options: Any) -> nn.Module:
    latent = {name: size for name, size in LATENT.items() if name != "q_lora_rank"}
    sizes = {**SIZES, **latent, **KIMI_EXPERTS, **LINEAR_FIRST, **NO_SPECIAL_TOKENS, "head_dim": 20}
    config = tf.BailingHybridConfig(**{**sizes, "rope_theta": 1e4, **options})
    return tf.BailingHybridForCausalLM(config)


def minimax(**options: Any) -> nn.Module:
    """Residuals and branches weighed, each pair otherwise."""
    weights = {
        "full_attn_alpha_factor": 1.3,
        "full_attn_beta_factor": 0.8,
        "linear_attn_alpha_factor": 0.9,
        "linear_attn_beta_factor": 1.2,
        "mlp_alpha_factor": 1.1,
        "mlp_beta_factor": 0.7,
    }
    experts = {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 48}
    sizes = {**SIZES, **experts, **weights, **LINEAR_FIRST, **NO_SPECIAL_TOKENS, "head_dim": 16}
    return tf.MiniMaxForCausalLM(tf.MiniMaxConfig(**{**sizes, **options}))


MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
}


def bamba(**options: Any) -> nn.Module:
    sizes = {**SIZES, **MAMBA2, "attn_layer_indices": [1, 3], "eos_token_id": None, **options}
    return tf.BambaForCausalLM(tf.BambaConfig(**sizes))


def granitemoehybrid(**options: Any) -> nn.Module:
    """With experts, and attention without positions."""
    sizes = {
        **SIZES,
        **MAMBA2,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "shared_intermediate_size": 48,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.15,
        "logits_scaling": 6.0,
        "eos_token_id": None,
        **options,
    }
    return tf.GraniteMoeHybridForCausalLM(tf.GraniteMoeHybridConfig(**sizes))


def granitemoehybrid_dense(**options: Any) -> nn.Module:
    """Without experts, and with rotary attention."""
    dense = {"num_local_experts": 0, "position_embedding_type": "rope"}
    return granitemoehybrid(**{**dense, **options})


def falcon_h1(**options: Any) -> nn.Module:
    """Every multiplier another one, so that one left out or taken for another shows."""
    multipliers = {
        "embedding_multiplier": 1.7,
        "lm_head_multiplier": 0.6,
        "mlp_multipliers": [0.8, 1.3],
        "key_multiplier": 0.7,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.9,
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.75,
        "ssm_multipliers": [0.9, 1.4, 0.6, 1.1, 0.8],
    }
    sizes = {**SIZES, **MAMBA2, **multipliers, "mamba_d_ssm": 96, "head_dim": 32}
    config = tf.FalconH1Config(**{**sizes, "eos_token_id": None, **options})
    return tf.FalconH1ForCausalLM(config)


def falcon_h1_norm(**options: Any) -> nn.Module:
    """The variant with a norm, before the gate; and every bias."""
    biases = dict.fromkeys(["mamba_proj_bias", "projectors_bias", "attention_bias"], True)
    norm = {"mamba_rms_norm": True, "mamba_norm_before_gate": True}
    return falcon_h1(**{**norm, **biases, **options})


def nemotron_h(**options: Any) -> nn.Module:
    """Every kind of layer; an eighth of the steps of Mamba2 lie below its lower limit."""
    sizes = {
        "layer_types": ["linear_attention", "moe", "linear_attention", "mlp", "full_attention"],
        "head_dim": 32,
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "n_groups": 2,
        "ssm_state_size": 24,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
        "routed_scaling_factor": 1.5,
        "eos_token_id": None,
    }
    sizes = {name: size for name, size in SIZES.items() if name != "num_hidden_layers"} | sizes
    return tf.NemotronHForCausalLM(tf.NemotronHConfig(**{**sizes, **options}))


def mamba2(**options: Any) -> nn.Module:
    """With every bias."""
    sizes = {
        **NO_SPECIAL_TOKENS,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 2,
        "state_size": 24,
        "use_bias": True,
    }
    return tf.Mamba2ForCausalLM(tf.Mamba2Config(**{**sizes, **options}))


def zamba2(**options: Any) -> nn.Module:
    """Two blocks, one of which two layers share, with adapters of their own; every bias."""
    sizes = {
        **NO_SPECIAL_TOKENS,
        **{name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size")},
        "layers_block_type": ["linear_attention", *["hybrid"] * 3],
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_mem_blocks": 2,
        "use_shared_attention_adapter": True,
        "adapter_rank": 4,
        "use_mem_rope": True,
        "add_bias_linear": True,
        "n_mamba_heads": 8,
        "mamba_ngroups": 2,
        "mamba_d_state": 24,
    }
    return tf.Zamba2ForCausalLM(tf.Zamba2Config(**{**sizes, **options}))


def zamba(**options: Any) -> nn.Module:
    """A block that two layers share, heads of Mamba, and its biases."""
    sizes = {
        **NO_SPECIAL_TOKENS,
        **{name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size")},
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_mamba_heads": 4,
        "mamba_d_state": 12,
        "mamba_proj_bias": True,
    }
    return tf.ZambaForCausalLM(tf.ZambaConfig(**{**sizes, **options}))


def mamba(**options: Any) -> nn.Module:
    """With every bias, and states that are no vector."""
    sizes = {
        **NO_SPECIAL_TOKENS,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "state_size": 12,
        "use_bias": True,
    }
    return tf.MambaForCausalLM(tf.MambaConfig(**{**sizes, **options}))


def falcon_mamba(**options: Any) -> nn.Module:
    sizes = {
        **NO_SPECIAL_TOKENS,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "time_step_rank": 10,
        "mixer_rms_eps": 1e-3,
    }
    return tf.FalconMambaForCausalLM(tf.FalconMambaConfig(**{**sizes, **options}))


def jamba(**options: Any) -> nn.Module:
    """Attention in the second layer of four, experts in the first and the third."""
    sizes = {
        **SIZES,
        **NO_SPECIAL_TOKENS,
        "attn_layer_period": 4,
        "attn_layer_offset": 1,
        "expert_layer_offset": 0,
        "num_experts": 5,
        "mamba_proj_bias": True,
        "rms_norm_eps": 1e-3,
    }
    return tf.JambaForCausalLM(tf.JambaConfig(**{**sizes, **options}))


def lfm2(**options: Any) -> nn.Module:
    """With every bias."""
    sizes = {
        **SIZES,
        **NO_SPECIAL_TOKENS,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "conv_bias": True,
        "block_multiple_of": 8,
    }
    return tf.Lfm2ForCausalLM(tf.Lfm2Config(**{**sizes, **options}))


def lfm2_moe(**options: Any) -> nn.Module:
    sizes = {
        **SIZES,
        **NO_SPECIAL_TOKENS,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.5,
    }
    return tf.Lfm2MoeForCausalLM(tf.Lfm2MoeConfig(**{**sizes, **options}))


def lfm3(**options: Any) -> nn.Module:
    """A window that ends inside of pages."""
    sizes = {
        **SIZES,
        **NO_SPECIAL_TOKENS,
        "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
        "head_dim": 32,
        "sliding_window": 37,
    }
    return tf.Lfm3ForCausalLM(tf.Lfm3Config(**{**sizes, **options}))


def recurrent_gemma(**options: Any) -> nn.Module:
    """A recurrence that is wider than the model, a window that ends inside of pages, and a bound
    that logits come near to."""
    sizes = {
        **{name: size for name, size in SIZES.items() if name != "num_key_value_heads"},
        **NO_SPECIAL_TOKENS,
        "intermediate_size": 192,
        "num_key_value_heads": 1,
        "attention_bias": True,
        "attention_window_size": 37,
        "lru_width": 96,
        "logits_soft_cap": 5.0,
    }
    return tf.RecurrentGemmaForCausalLM(tf.RecurrentGemmaConfig(**{**sizes, **options}))


def zaya(**options: Any) -> nn.Module:
    """Convolutions of other widths than published, a window that ends inside of pages."""
    count = options.get("num_hidden_layers", 4)
    sizes = {
        **{name: size for name, size in SIZES.items() if name != "intermediate_size"},
        **NO_SPECIAL_TOKENS,
        "layer_types": (["hybrid", "hybrid_sliding"] * count)[:count],
        "sliding_window": 37,
        "head_dim": 16,
        "cca_time0": 3,
        "num_experts": 5,
        "moe_intermediate_size": 32,
        "router_hidden_size": 24,
    }
    return tf.ZayaForCausalLM(tf.ZayaConfig(**{**sizes, **options}))


INKLING = {
    "head_dim": 32,
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window_size": 37,
    "d_rel": 8,
    "rel_extent": 50,
    "log_scaling_n_floor": 20,
    "log_scaling_alpha": 0.3,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "route_scale": 1.5,
}


def inkling(**options: Any) -> nn.Module:
    """A window that ends inside of pages, biases that end before texts do, heads of another number
    and width in layers with windows, and growth that begins within texts."""
    count = options.get("num_hidden_layers", 4)
    sizes = {
        **SIZES,
        **NO_SPECIAL_TOKENS,
        "layer_types": (["hybrid_sliding", "hybrid"] * count)[:count],
        "mlp_layer_types": (["dense", "sparse", "sparse"] * count)[:count],
        **INKLING,
        "logits_mup_width_multiplier": 2.0,
    }
    return tf.InklingForCausalLM(tf.InklingTextConfig(**{**sizes, **options}))


INKLING2 = {
    "unpadded_vocab_size": VOCAB_SIZE,
    **INKLING,
    "qk_l2_clip_threshold": 3.0,
    "rel_l2_clip_threshold": 1.5,
    "n_layers_per_attn_res_block": 3,
    "mlp_gate_softcap": 0.5,
    "mlp_up_softcap": 1.5,
    "final_logit_softcapping": 5.0,
}


def inkling2(**options: Any) -> nn.Module:
    """The same with blocks of residuals that end within the layers, clips that are met and softcaps
    that bend."""
    count = options.get("num_hidden_layers", 4)
    sizes = {
        **{name: size for name, size in SIZES.items() if name != "intermediate_size"},
        **NO_SPECIAL_TOKENS,
        "layer_types": (["hybrid_sliding", "hybrid"] * count)[:count],
        **INKLING2,
    }
    return tf.Inkling2ForCausalLM(tf.Inkling2TextConfig(**{**sizes, **options}))


def inkling2_loop(**options: Any) -> nn.Module:
    """The same with two blocks of layers of both kinds that run three times, before others."""
    count = options.get("num_hidden_layers", 7)
    sizes = {
        **{name: size for name, size in SIZES.items() if name != "intermediate_size"},
        **NO_SPECIAL_TOKENS,
        **INKLING2,
        "n_routed_experts": 3,
        "num_hidden_layers": count,
        "layer_types": (["hybrid_sliding", "hybrid"] * count)[:count],
        "n_layers_per_attn_res_block": 2,
        "loop_layer_index_start": 2,
        "loop_layer_index_end": 6,
        "loop_num_passes": 3,
        "loop_gate_rank": 8,
    }
    config = tf.Inkling2LoopTextConfig(**{**sizes, **options})
    return tf.Inkling2LoopForCausalLM(config)


def rwkv(**options: Any) -> nn.Module:
    """With a residual that is halved within the layers."""
    sizes = {
        **NO_SPECIAL_TOKENS,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "rescale_every": 2,
    }
    return tf.RwkvForCausalLM(tf.RwkvConfig(**{**sizes, **options}))


def xlstm(**options: Any) -> nn.Module:
    """Values that are wider than keys, and caps that gates and logits come near to."""
    sizes = {
        **NO_SPECIAL_TOKENS,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_heads": 4,
        "qk_dim_factor": 1.0,
        "v_dim_factor": 2.0,
        "ffn_proj_factor": 1.5,
        "ffn_round_up_to_multiple_of": 32,
        "gate_soft_cap": 8.0,
        "output_logit_soft_cap": 5.0,
    }
    return tf.xLSTMForCausalLM(tf.xLSTMConfig(**{**sizes, **options}))


def jet_nemotron(**options: Any) -> nn.Module:
    """Layers by their published names, values that are wider than keys, a window that ends inside
    of pages."""
    from torch_hybrid.models.families.jet_nemotron.classes import (
        JetNemotronConfig,
        JetNemotronForCausalLM,
    )

    block = {
        "num_heads": 4,
        "head_dim": 12,
        "expand_v": 2.6666666667,
        "conv_size": 4,
        "dconv_generator_reduction": 8,
        "norm_eps": "1e-5",
        "mode": "chunk",
    }
    sizes = {
        **SIZES,
        "num_hidden_layers": 5,
        "layer_types": ["jet", "swa", "jet", "attn", "jet"],
        "efficient_attention_config": {"jet": block, "swa": {"window_size": 37}},
        "tie_word_embeddings": False,
    }
    return JetNemotronForCausalLM(JetNemotronConfig(**{**sizes, **options}))


def kimi_k3(**options: Any) -> nn.Module:
    """Blocks of two layers, experts of a narrower latent, and softcaps that values come near to."""
    from torch_hybrid.models.families.kimi_k3.classes import KimiK3ForCausalLM, KimiK3TextConfig

    linear = {"num_heads": 4, "head_dim": 20, "short_conv_kernel_size": 4}
    sizes = {
        **SIZES,
        **LATENT,
        **KIMI_EXPERTS,
        **LINEAR_FIRST,
        **NO_SPECIAL_TOKENS,
        "num_hidden_layers": 5,
        "layer_types": [*["linear_attention", "full_attention"] * 2, "linear_attention"],
        "hidden_act": "situ",
        "activation_situ_beta": 1.5,
        "activation_situ_linear_beta": 2.5,
        "routed_expert_hidden_size": 48,
        "attn_res_block_size": 2,
        "linear_attn_config": {**linear, "use_full_rank_gate": True, "gate_lower_bound": -5.0},
    }
    return KimiK3ForCausalLM(KimiK3TextConfig(**{**sizes, **options}))


def ring_2_5(**options: Any) -> nn.Module:
    """Two whole groups of layers and one layer past them, with a draft layer."""
    from tests.models.ring_checkpoint import CONFIG
    from torch_hybrid.models.families.ring_2_5.classes import (
        BailingMoeV2_5Config,
        BailingMoeV2_5ForCausalLM,
    )

    sizes = {**CONFIG, **LATENT, "num_attention_heads": 4, "group_norm_size": 2}
    return BailingMoeV2_5ForCausalLM(BailingMoeV2_5Config(**{**sizes, **options}))


# Families that the installed transformers does not have: their cases are left out.
_YOUNGER_THAN_5_20 = {
    "lfm3": "Lfm3Config",
    "inkling2": "Inkling2Config",
    "lara_mini": "LaraMiniConfig",
    "inkling2_loop": "Inkling2LoopConfig",
}
MISSING = frozenset(name for name, cls in _YOUNGER_THAN_5_20.items() if not hasattr(tf, cls))
# All functions above that make a model, by their names.
BUILDERS: dict[str, Callable[..., nn.Module]] = {
    name: build
    for name, build in list(globals().items())
    if isinstance(build, FunctionType)
    and build.__annotations__.get("return") == "nn.Module"
    and name not in MISSING
}


# Every kind of mixer, alone in its layer and beside another, experts, and streams of residuals.
EACH_KIND = tuple(
    family
    for family in (
        *("qwen3_next", "qwen4_exp", "glm5_next", "kimi_linear", "minimax", "falcon_h1", "jamba"),
        *("lfm2", "recurrent_gemma", "zaya", "inkling2", "rwkv", "xlstm", "jet_nemotron"),
    )
    if family in BUILDERS
)
_TWO = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
_CONVOLUTION = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
_WINDOW = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "sliding_attention", "full_attention"],
}
# Layers of every kind that a family has, and no more of them.
FEWEST_LAYERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(BUILDERS, _TWO),
    "qwen3": {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
    "deepseek_v3": {"num_hidden_layers": 2},
    "bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1]},
    "falcon_h1": {"num_hidden_layers": 2},
    "falcon_h1_norm": {"num_hidden_layers": 2},
    "nemotron_h": {"layer_types": ["moe", "linear_attention", "mlp", "full_attention"]},
    "mamba2": {"num_hidden_layers": 2},
    "rwkv": {"num_hidden_layers": 2},
    "xlstm": {"num_hidden_layers": 2},
    "zamba": {  # of a block that no other layer has, transformers cannot tie the weights
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    },
    "zamba2": {"num_hidden_layers": 2, "layers_block_type": ["linear_attention", "hybrid"]},
    "mamba": {"num_hidden_layers": 2},
    "falcon_mamba": {"num_hidden_layers": 2},
    "jamba": {"num_hidden_layers": 2},
    "lfm2": _CONVOLUTION,
    "lfm2_moe": _CONVOLUTION,
    "lfm3": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "sliding_attention", "full_attention"],
    },
    "lara_mini": _WINDOW,
    "jet_nemotron": _WINDOW,
    "zaya": {"num_hidden_layers": 2, "layer_types": ["hybrid", "hybrid_sliding"]},
    "inkling": {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]},
    "inkling2": {"num_hidden_layers": 2, "layer_types": ["hybrid_sliding", "hybrid"]},
    "inkling2_loop": {  # one block before two that run twice
        "num_hidden_layers": 3,
        "layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid"],
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "loop_num_passes": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 2, "block_types": ["recurrent", "attention"]},
}


def make_model(family: str, *, seed: int = 0, **options: Any) -> Any:
    """A random transformers model of one family; ``options`` go to its config. Tests of a family
    that the installed transformers lacks are skipped."""
    if family in MISSING:
        pytest.skip(f"transformers {tf.__version__} has no {family}")
    if family == "mamba2" and tf.__version__ < "5.23":  # and checkpoints have groups
        pytest.skip(f"transformers {tf.__version__} norms all groups of Mamba2 as one")
    model = BUILDERS[family](**options).eval().requires_grad_(False)
    randomize(model, seed)
    return model


def kinds_of(families: Iterable[str]) -> set[str]:
    """The kinds of mixers that these families have."""
    with torch.device("meta"):
        tables = [architecture_of(BUILDERS[family]().config).table for family in families]
    return {kind for table in tables for kind in table.kinds}


def make_hybrid(family: str = "qwen3_next_dense", *, seed: int = 0, **options: Any) -> HybridModel:
    """The same, adapted. By default one linear and one full layer of width 32."""
    kinds = ["linear_attention", "full_attention"]
    if family == "qwen3":
        kinds = ["full_attention"] * 2
    two_layers = {"num_hidden_layers": 2, "hidden_size": 32, "layer_types": kinds}
    return adapt(make_model(family, seed=seed, **{**two_layers, **options}))


# Of runners whose steps of such a model Inductor compiles: what it made for one test is there for
# the others.
COMPILED_SIZES = {"max_seqs": 12, "max_tokens": 384, "kv_tokens": 1600, "page_size": 16}


_NORMS = (".ln1", ".ln2", ".pre_ln", ".ln_out")  # that are not called so
_SCALES = ("states_scale", "residual_scale", "global_scale")


def randomize(model: nn.Module, seed: int) -> None:
    """Draw every weight so that activations keep their scale and no weight is neutral."""
    generator = torch.Generator().manual_seed(seed)

    def normal(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator)

    decays: dict[str, Tensor] = {}
    for name, weight in model.named_parameters():
        layer, _, kind = name.rpartition(".")
        if kind == "A_log":
            weight.copy_(torch.rand(weight.shape, generator=generator) * 3 - 1)
            decays[layer] = weight
        elif kind == "dt_bias":
            pass  # below: it takes A_log into account
        elif kind == "recurrent_param":  # half an open gate forgets over 1 to 1000 tokens
            tokens = 1000 ** torch.rand(weight.shape, generator=generator)
            weight.copy_(torch.expm1(1 / (4 * tokens)).log())
        elif kind == "bias" and layer.endswith("fgate_preact"):  # forgets over 1 to 1000 tokens
            tokens = 1000 ** torch.rand(weight.shape, generator=generator)
            weight.copy_(torch.logit((-1 / tokens).exp()))
        elif kind == "time_decay":  # forgets over 1 to 1000 tokens
            weight.copy_(-torch.rand(weight.shape, generator=generator) * math.log(1000))
        elif kind.startswith("time_mix"):
            weight.uniform_(generator=generator)
        elif kind == "time_first":
            weight.copy_(normal(weight))
        elif "norm" in name or layer.endswith(_NORMS) or kind.endswith(_SCALES):
            weight.add_(0.2 * normal(weight))
        elif (
            "conv" in name
            and "proj" not in name
            and not name.endswith((".w1.weight", ".w2.weight"))
        ):
            weight.copy_(0.4 * normal(weight))
        elif layer.endswith(".linear"):  # of a block without residuals, which magnifies rounding
            weight.copy_(0.3 * normal(weight) * weight.shape[-1] ** -0.5)
        else:
            weight.copy_(normal(weight) * weight.shape[-1] ** -0.5)
    for name, bias in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            bias.copy_(0.1 * normal(bias))
        elif name.endswith("balancing_biases"):  # transformers sets the last one as it loads
            bias[:-1] = 0.1 * normal(bias[:-1])
    for layer, A_log in decays.items():
        spread_time_constants(model.get_submodule(layer), A_log, generator)


def spread_time_constants(module: Any, A_log: Tensor, generator: torch.Generator) -> None:
    """Choose ``dt_bias`` so that heads, or their channels, forget over 1 to 1000 tokens.

    Time constants are log-uniform.
    """
    if isinstance(getattr(module, "dt_proj", None), nn.Linear):  # of the slowest state of a channel
        dt_bias, A_log = module.dt_proj.bias, A_log.amin(1)
    elif hasattr(module, "dt_proj_bias"):
        dt_bias, A_log = module.dt_proj_bias.view(-1), A_log.amin(2)
    else:
        dt_bias = module.dt_bias
    tokens = torch.exp(torch.rand(dt_bias.shape, generator=generator) * math.log(1000))
    rate = A_log.exp().flatten().repeat_interleave(dt_bias.numel() // A_log.numel())
    lower_bound = getattr(module, "safe_gate_lower_bound", None)
    if getattr(module, "safe_gate", False):
        lower_bound = module.lower_bound
    if lower_bound is not None:
        dt_bias.copy_(torch.logit(-1 / (tokens * lower_bound)) / rate)
    else:
        dt_bias.copy_(torch.expm1(1 / (tokens * rate)).log())


def in_double(model: Any) -> Any:
    """A copy in float64, with the decay rates that its config says.

    MiniMax keeps them in buffers, which are rounded where a model is cast; xLSTM rounds states.
    """
    exact = cast(copy.deepcopy(model), torch.float64)
    for module in exact.modules():
        if type(module).__name__ == "MiniMaxLightningAttention":
            rate = module.get_slope_rate().double()
            decays = module.decay_factors(rate)
            module.slope_rate = rate
            module.query_decay, module.key_decay, module.diagonal_decay = decays
        elif type(module).__name__ == "xLSTMBackend":
            for name in ("mlstm_sequence_kernel", "mlstm_step_kernel"):
                module._inference_fn.keywords[name].keywords["dtype_state"] = torch.float64
    return exact


def cast(model: Any, dtype: torch.dtype) -> Any:
    """The model in a dtype, but for routers and gates of Inkling-2, which take weights of float32
    alone."""
    model.to(dtype)
    for module in model.modules():
        if type(module).__name__ in ("Inkling2TopKRouter", "Inkling2LoopTopKRouter"):
            module.float()
        elif type(module).__name__ == "Inkling2LoopMessageGate":
            module.forget_gate_proj.float()
            module.message_gate_proj.float()
    return model


def as_made(model: Any) -> None:
    """Undo what a forward of RWKV does to its weights: it divides some, which would be saved so."""
    for module in model.modules():
        if type(module).__name__ == "RwkvModel":
            module.train()
            module._rescale_layers()
            module.eval()


@contextmanager
def router_gaps(model: nn.Module) -> Iterator[list[float]]:
    """Collects how near the routers of a model come to another choice of experts.

    The gap of a token is between the score of the last expert taken and the first not, or of the
    last group of experts and the first not.
    """
    gaps: list[float] = []

    def record(router: Any, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
        logits = outputs[0].float()
        if hasattr(router, "num_group"):
            scores = logits.sigmoid() + router.e_score_correction_bias
            groups = scores.unflatten(-1, (router.num_group, -1))
            totals = groups.topk(2, dim=-1).values.sum(-1)
            gaps.extend(_gaps(totals, router.topk_group))
            refused = totals < totals.topk(router.topk_group).values[:, -1:]
            scores = groups.masked_fill(refused[..., None], -math.inf).flatten(1)
        elif hasattr(router, "n_shared_experts"):
            scores = logits.sigmoid() + router.e_score_correction_bias
        elif len(inputs) == 2:
            scores = logits.sigmoid() + (0 if inputs[1] is None else inputs[1])
        else:
            scores = logits.softmax(-1) + getattr(router, "balancing_biases", 0.0)
        gaps.extend(_gaps(scores, router.top_k))

    routers = [module for module in model.modules() if type(module).__name__.endswith("Router")]
    handles = [router.register_forward_hook(record) for router in routers]
    yield gaps
    for handle in handles:
        handle.remove()


@contextmanager
def block_gaps(model: nn.Module) -> Iterator[list[float]]:
    """Collects how near the indexers of a model come to another choice of blocks: the score of the
    last block taken less that of the first not, for each token."""
    gaps: list[float] = []

    def record(indexer: Any, inputs: tuple[Any, ...], named: Any, _output: object) -> None:
        if named:
            scores = _pooled_scores(indexer, named["hidden_states"], named["q_resid"])
            size, taken = indexer.index_kpool, indexer.index_topk // indexer.index_kpool
        else:
            scores = _mean_scores(indexer, *inputs[:2])
            size, taken = indexer.compress_ratio, indexer.block_topk
        for token in range(taken * size, len(scores)):
            gaps.extend(_gaps(scores[token, : (token + 1) // size][None], taken))

    indexers = [module for module in model.modules() if type(module).__name__.endswith("Indexer")]
    handles = [indexer.register_forward_hook(record, with_kwargs=True) for indexer in indexers]
    yield gaps
    for handle in handles:
        handle.remove()


def _pooled_scores(indexer: Any, hidden: Tensor, q_source: Tensor) -> Tensor:
    """[tokens, blocks] of one text, by GLM-5.3's indexer."""
    keys = indexer.k_norm(indexer.wk(hidden))
    gates = hidden @ indexer.index_kpool_compress_gate.T
    keys, _, _ = indexer.get_pooled_states(
        torch.cat([keys, gates, torch.ones_like(keys[..., :1])], -1)
    )
    q = indexer.wq_b(q_source[0]).unflatten(-1, (indexer.n_heads, -1))
    similar = torch.einsum("thd,nd->thn", q.float(), keys[0].float()).relu()
    weights = indexer.weights_proj(hidden[0]).float() / indexer.n_heads**0.5
    return torch.einsum("th,thn->tn", weights, similar) / indexer.head_dim**0.5


def _mean_scores(indexer: Any, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """[tokens, blocks] of one text, by Qwen4-Exp's indexer."""
    size, dim = indexer.compress_ratio, indexer.index_head_dim
    q, k = indexer.index_qk_proj(hidden[0]).split([indexer.index_n_heads * dim, dim], dim=-1)
    num_blocks = len(k) // size
    keys = k[: num_blocks * size].unflatten(0, (-1, size)).float().mean(1).to(k.dtype)

    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b, rest = x.split([cos.shape[-1] // 2] * 2 + [x.shape[-1] - cos.shape[-1]], dim=-1)
        return torch.cat([torch.cat([a, b], -1) * cos + torch.cat([-b, a], -1) * sin, rest], -1)

    cos, sin = (x[0] for x in rotary)
    starts = slice(0, num_blocks * size, size)
    q = rotated(indexer.q_layernorm(q.unflatten(-1, (-1, dim))), cos[:, None], sin[:, None])
    keys = rotated(indexer.k_layernorm(keys), cos[starts], sin[starts])
    return torch.einsum("thd,nd->htn", q.float(), keys.float()).relu().sum(0) / dim**0.5


def _gaps(scores: Tensor, taken: int) -> list[float]:
    """The least difference over the rows of ``scores`` between the last taken and the next."""
    if taken >= scores.shape[-1]:
        return []
    ordered = scores.sort(dim=-1, descending=True).values
    return [(ordered[:, taken - 1] - ordered[:, taken]).min().item()]
