"""The weights of a benchmark's model in a GGUF file, as llama.cpp computes with them.

Tensors get the names that the ``gguf`` package knows of transformers' names. What llama.cpp wants
in another form is changed on the way:

    A_log          A = -exp(A_log)
    convolution    [channels, 1, width] as [channels, width]
    norms          of a weight that is added to one: with the one (Qwen3.5)
    value heads    those of one key head far apart, as ggml repeats keys: [key, value] to
                   [value, key] (Qwen3.5)
    multipliers    of activations, in the weights beside them (Falcon-H1)
    gates          those of a key head beside it apart: [q, k, v, z] to [q, k, v] and z (Qwen3-Next)
    experts        gates and what they multiply apart (Qwen3-Next)
    convolutions   of queries, keys and values apart (Kimi, Ling)
    latents        their keys and values apart, the keys transposed: absorbed (Kimi, Ling)

Vectors stay in float32: llama.cpp has no other form of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Named = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How models of a family become a GGUF file.

    Attributes:
        arch: its name in ``gguf.MODEL_ARCH``.
        describe: writes what llama.cpp must know beside the sizes of a dense transformer.
        change: a tensor's name and value, as those that take its place.
        is_tied: the embedding can be the output layer's weight too, as it is in the model.
    """

    arch: str
    describe: Callable[[Any, Any], None]
    change: Callable[[str, Tensor, Any], Named]
    is_tied: bool = True


def write_gguf(model: Any, family: str, path: Path, *, tokens: Sequence[str] | None = None) -> None:
    """Write a transformers model's weights, in its dtype.

    Args:
        model: whose family is in ``LLAMA_CPP``.
        family: as ``benchmarks.models`` names it.
        path: of the file.
        tokens: names of a byte-level vocabulary without merges; None writes no tokenizer.

    Raises:
        ValueError: a weight of the model has no name in llama.cpp.
    """
    import gguf

    kind, config = LLAMA_CPP[family], model.config
    arch = gguf.MODEL_ARCH[kind.arch]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _describe_sizes(writer, config)
    _describe_tokens(writer, tokens)
    kind.describe(writer, config)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    weights = dict(model.state_dict())
    if config.tie_word_embeddings and kind.is_tied:
        del weights["lm_head.weight"]
    for name, weight in weights.items():
        for own_name, value in kind.change(name, weight, config):
            _add(writer, _llama_name(names, own_name), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe_sizes(writer: Any, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    is_lfm2 = config.model_type == "lfm2"
    writer.add_layer_norm_rms_eps(config.norm_eps if is_lfm2 else config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _describe_tokens(writer: Any, tokens: Sequence[str] | None) -> None:
    if tokens is None:
        writer.add_tokenizer_model("none")
        return
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges([f"{tokens[-2]} {tokens[-1]}"])  # llama.cpp wants one
    writer.add_add_bos_token(False)


def _add(writer: Any, name: str, value: Tensor) -> None:
    import gguf

    is_filter = "conv1d" in name or "conv.conv" in name
    if value.dtype is torch.bfloat16 and value.ndim > 1 and not is_filter:
        data = value.contiguous().view(torch.int16).numpy().view("uint8")
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, value.float().contiguous().numpy())


def _llama_name(names: Any, name: str) -> str:
    """llama.cpp's name of a tensor; some name a module, and some all of it."""
    stem, _, last = name.rpartition(".")
    suffix = f".{last}" if last in ("weight", "bias") else ""
    whole: str | None = names.get_name(name)
    found: str | None = names.get_name(stem) if suffix else None
    if found is None and whole is None:
        raise ValueError(f"llama.cpp has no name for {name}")
    return found + suffix if found is not None else str(whole)


def _usual(name: str, value: Tensor) -> tuple[str, Tensor]:
    """What all recurrent mixers have."""
    if name.endswith(".A_log"):
        return name, -torch.exp(value.float())
    if name.endswith(".dt_bias"):
        return name.removesuffix(".dt_bias") + ".dt_proj.bias", value
    if name.endswith(".conv1d.weight"):
        return name, value.squeeze(1)
    return name, value


def _describe_gated_delta(writer: Any, config: Any) -> None:
    rope = config.rope_parameters
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(config.head_dim * rope["partial_rotary_factor"]))
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    recurrent = [kind == "linear_attention" for kind in config.layer_types]
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)


def _describe_qwen3_5(writer: Any, config: Any) -> None:
    _describe_gated_delta(writer, config)
    rope = config.rope_parameters
    sections = [*rope["mrope_section"], 0] if "mrope_section" in rope else [11, 11, 10, 0]
    writer.add_rope_dimension_sections(sections)


def _change_qwen3_5(name: str, value: Tensor, config: Any) -> Named:
    if "norm" in name and not name.endswith("linear_attn.norm.weight"):
        value = value.float() + 1
    if ".linear_attn." in name:
        value = _values_far_apart(name.rpartition("linear_attn.")[2], value, config)
    yield _usual(name, value)


def _values_far_apart(name: str, value: Tensor, config: Any) -> Tensor:
    """A tensor of a mixer with its value heads in the order of llama.cpp."""
    num_keys, head_dim = config.linear_num_key_heads, config.linear_value_head_dim
    num_each = config.linear_num_value_heads // num_keys
    heads = torch.arange(num_keys * num_each).view(num_keys, num_each).T.flatten()
    values = (heads[:, None] * head_dim + torch.arange(head_dim)).flatten()
    num_qk = 2 * num_keys * config.linear_key_head_dim
    match name:
        case "A_log" | "dt_bias" | "in_proj_a.weight" | "in_proj_b.weight":
            return value[heads]
        case "in_proj_z.weight":
            return value[values]
        case "in_proj_qkv.weight" | "conv1d.weight":
            return torch.cat([value[:num_qk], value[num_qk:][values]])
        case "out_proj.weight":
            return value[:, values]
    return value


def _describe_qwen3_next(writer: Any, config: Any) -> None:
    _describe_gated_delta(writer, config)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _change_qwen3_next(name: str, value: Tensor, config: Any) -> Named:
    if name.endswith(".in_proj_qkvz.weight"):
        num_keys, key_dim = config.linear_num_key_heads, config.linear_key_head_dim
        num_each = config.linear_num_value_heads // num_keys * config.linear_value_head_dim
        parts = value.view(num_keys, -1, value.shape[-1]).split([key_dim] * 2 + [num_each] * 2, 1)
        *qkv, z = (part.flatten(0, 1) for part in parts)
        yield name.replace("qkvz", "qkv"), torch.cat(qkv)
        yield name.replace("qkvz", "z"), z
    elif name.endswith(".experts.gate_up_proj"):
        gate, up = value.chunk(2, dim=1)
        yield name.replace("gate_up_proj", "gate_proj.weight"), gate
        yield name.replace("gate_up_proj", "up_proj.weight"), up
    elif name.endswith(".experts.down_proj"):
        yield f"{name}.weight", value
    elif "norm" in name and not name.endswith("linear_attn.norm.weight"):
        yield name, value.float() + 1
    elif name.endswith(".shared_expert_gate.weight"):
        yield name, value.flatten()
    else:
        yield _usual(name, value)


def _describe_kimi_delta(writer: Any, config: Any) -> None:
    """Kimi delta attention and latents, kept as one head of keys; MLPs without experts."""
    import gguf

    if "sparse" in config.mlp_layer_types:
        raise ValueError("a model with Kimi delta attention is written with dense MLPs alone")
    kinds = {"linear_attention": 0, "full_attention": 1}
    key_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    writer.add_head_count_kv([kinds[kind] for kind in config.layer_types])
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(key_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_kda_head_dim(config.linear_head_dim)
    writer.add_leading_dense_block_count(config.num_hidden_layers)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.num_shared_experts)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _change_kimi_linear(name: str, value: Tensor, config: Any) -> Named:
    name = name.replace(".forget_gate.", ".")
    stem = name.rpartition(".self_attn.")[0] + ".self_attn"
    if name.endswith(".conv1d.weight"):
        for which, part in zip("qkv", value.squeeze(1).chunk(3), strict=True):
            yield f"{stem}.{which}_conv1d.weight", part[None, :, None]
    elif name.endswith(".A_log"):
        yield name, -torch.exp(value.float()).view(1, 1, -1, 1)
    elif name.endswith(".kv_b_proj.weight"):
        heads = value.view(config.num_attention_heads, -1, config.kv_lora_rank)
        keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        yield f"{stem}.k_b_proj.weight", keys.transpose(1, 2)
        yield f"{stem}.v_b_proj.weight", values
    else:
        yield _usual(name, value)


def _describe_bailing(writer: Any, config: Any) -> None:
    _describe_kimi_delta(writer, config)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_kda_safe_gate(config.kda_safe_gate)
    writer.add_kda_gate_lower_bound(config.kda_lower_bound)


def _change_bailing(name: str, value: Tensor, config: Any) -> Named:
    name = name.replace(".forget_gate.f_proj.", ".f_a_proj.")
    if name.endswith(".A_log"):
        yield name.replace(".forget_gate.", "."), torch.exp(value.float())[:, None]
    elif name.endswith(".g_proj.weight") and len(value) > config.num_attention_heads:
        yield name.replace(".g_proj.", ".g_a_proj."), value  # a gate of each channel, not head
    else:
        yield from _change_kimi_linear(name, value, config)


def _describe_mamba2(writer: Any, config: Any, inner_size: int) -> None:
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)
    writer.add_ssm_inner_size(inner_size)


def _mamba2(name: str, value: Tensor, config: Any) -> tuple[str, Tensor]:
    """A mixer's A and D as columns, and its norm by groups."""
    name, value = _usual(name, value)
    if name.endswith((".A_log", ".mamba.D")):
        return name, value.float()[:, None]
    if name.endswith(".mamba.norm.weight"):
        return name, value.float().view(config.mamba_n_groups, -1)
    return name, value


def _describe_falcon_h1(writer: Any, config: Any) -> None:
    _describe_mamba2(writer, config, config.mamba_d_ssm)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def _change_falcon_h1(name: str, value: Tensor, config: Any) -> Named:
    name, value = _mamba2(name, value, config)
    if (factor := _factor_of_falcon_h1(name, config)) is not None:
        value = (value.float() * factor).to(value.dtype)
    yield name, value


def _factor_of_falcon_h1(name: str, config: Any) -> float | Tensor | None:
    """What multiplies the result of a projection, its input's multiplier included."""
    gate, down = config.mlp_multipliers
    key = config.key_multiplier * config.attention_in_multiplier
    factors = {
        "embed_tokens": config.embedding_multiplier,
        "lm_head": config.lm_head_multiplier,
        "gate_proj": gate,
        "down_proj": down,
        "q_proj": config.attention_in_multiplier,
        "k_proj": key,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
    }
    module = name.removesuffix(".weight").rpartition(".")[2]
    if module != "in_proj":
        return factors.get(module)
    groups = config.mamba_n_groups * config.mamba_d_state
    rows = [config.mamba_d_ssm, config.mamba_d_ssm, groups, groups, config.mamba_n_heads]
    each = torch.tensor(config.ssm_multipliers).repeat_interleave(torch.tensor(rows))
    return config.ssm_in_multiplier * each[:, None]


def _describe_granite(writer: Any, config: Any) -> None:
    _describe_mamba2(writer, config, config.mamba_expand * config.hidden_size)
    heads = {"linear_attention": 0, "mamba": 0}  # others have full attention
    writer.add_head_count_kv([heads.get(k, config.num_key_value_heads) for k in config.layer_types])
    writer.add_rope_scaling_finetuned(False)  # which means that it has no positions
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def _change_granite(name: str, value: Tensor, config: Any) -> Named:
    layer, _, last = name.rpartition(".shared_mlp.")
    if last == "input_linear.weight":
        yield f"{layer}.mlp.gate_proj.weight", value[: config.shared_intermediate_size]
        yield f"{layer}.mlp.up_proj.weight", value[config.shared_intermediate_size :]
    elif last == "output_linear.weight":
        yield f"{layer}.mlp.down_proj.weight", value
    else:
        yield _mamba2(name, value, config)


def _describe_lfm2(writer: Any, config: Any) -> None:
    heads = [0 if kind == "conv" else config.num_key_value_heads for kind in config.layer_types]
    writer.add_head_count_kv(heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_shortconv_l_cache(config.conv_L_cache)


def _change_lfm2(name: str, value: Tensor, config: Any) -> Named:
    yield name, value.squeeze(1) if name.endswith("conv.conv.weight") else value


LLAMA_CPP = {
    "qwen3_5": Family(arch="QWEN35", describe=_describe_qwen3_5, change=_change_qwen3_5),
    "falcon_h1": Family(
        arch="FALCON_H1", describe=_describe_falcon_h1, change=_change_falcon_h1, is_tied=False
    ),
    "granitemoehybrid": Family(
        arch="GRANITE_HYBRID", describe=_describe_granite, change=_change_granite
    ),
    "qwen3_next_moe": Family(
        arch="QWEN3NEXT", describe=_describe_qwen3_next, change=_change_qwen3_next
    ),
    "kimi_linear": Family(
        arch="KIMI_LINEAR",
        describe=_describe_kimi_delta,
        change=_change_kimi_linear,
        is_tied=False,
    ),
    "bailing_hybrid": Family(
        arch="BAILINGMOE3", describe=_describe_bailing, change=_change_bailing, is_tied=False
    ),
    "lfm2": Family(arch="LFM2", describe=_describe_lfm2, change=_change_lfm2),
}
