"""Weights of Ring-2.5 from safetensors of the published layout."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_hybrid.layers.fused_experts import FusedExperts
from torch_hybrid.models.checkpoint.files import Checkpoint
from torch_hybrid.models.ring_2_5.config import Ring25Config
from torch_hybrid.models.ring_2_5.model import Ring25

# Our weights, each with the published ones that it concatenates by rows.
Sources = Mapping[str, Sequence[str]]

_NORMS: Sources = {
    "input_norm.weight": ["input_layernorm.weight"],
    "mlp_norm.weight": ["post_attention_layernorm.weight"],
}
_LIGHTNING: Sources = {
    "mixer.in_proj.weight": ["attention.query_key_value.weight", "attention.g_proj.weight"],
    "mixer.norm_weight": ["attention.g_norm.weight"],
    "mixer.out_proj.weight": ["attention.dense.weight"],
}
_QK_NORM: Sources = {
    "mixer.q_norm_weight": ["attention.query_layernorm.weight"],
    "mixer.k_norm_weight": ["attention.key_layernorm.weight"],
}
_LATENT: Sources = {
    "mixer.kv_a_proj.weight": ["attention.kv_a_proj_with_mqa.weight"],
    "mixer.kv_a_norm.weight": ["attention.kv_a_layernorm.weight"],
    "mixer.attention.kv_b_proj.weight": ["attention.kv_b_proj.weight"],
    "mixer.out_proj.weight": ["attention.dense.weight"],
}
_QUERY: Sources = {"mixer.q_proj.weight": ["attention.q_proj.weight"]}
_LOW_RANK_QUERY: Sources = {
    "mixer.q_proj.0.weight": ["attention.q_a_proj.weight"],
    "mixer.q_proj.1.weight": ["attention.q_a_layernorm.weight"],
    "mixer.q_proj.2.weight": ["attention.q_b_proj.weight"],
}
_ROUTER: Sources = {
    "mlp.router.weight": ["mlp.gate.weight"],
    "mlp.router.expert_bias": ["mlp.gate.expert_bias"],
}
_OUTER: Sources = {
    "word_embeddings.weight": ["model.word_embeddings.weight"],
    "norm.weight": ["model.norm.weight"],
    "lm_head.weight": ["lm_head.weight"],
}


def sources(config: Ring25Config) -> dict[str, Sequence[str]]:
    """List our weights, but for routed experts, with the published ones that make up each."""
    outer = dict(_OUTER)
    if config.tie_word_embeddings:
        outer["lm_head.weight"] = outer["word_embeddings.weight"]
    for layer_id in range(config.num_hidden_layers):
        for name, published in _layer_sources(config, layer_id).items():
            outer[f"layers.{layer_id}.{name}"] = [
                f"model.layers.{layer_id}.{source}" for source in published
            ]
    return outer


def _layer_sources(config: Ring25Config, layer_id: int) -> Sources:
    if config.is_latent(layer_id):
        query = _QUERY if config.q_lora_rank is None else _LOW_RANK_QUERY
        mixer = {**_LATENT, **query}
    else:
        mixer = {**_LIGHTNING, **(_QK_NORM if config.use_qk_norm else {})}
    if config.is_dense(layer_id):
        return {**_NORMS, **mixer, **_mlp_sources("mlp")}
    return {**_NORMS, **mixer, **_ROUTER, **_mlp_sources("mlp.shared_experts")}


def _mlp_sources(name: str) -> Sources:
    return {
        f"{name}.gate_up_proj.weight": [f"{name}.gate_proj.weight", f"{name}.up_proj.weight"],
        f"{name}.down_proj.weight": [f"{name}.down_proj.weight"],
    }


def expert_sources(config: Ring25Config) -> dict[str, list[Sequence[str]]]:
    """List our weights of routed experts, with each expert's published ones."""
    return {
        f"layers.{layer_id}.mlp.experts.{ours}": [
            [f"model.layers.{layer_id}.mlp.experts.{expert}.{name}.weight" for name in published]
            for expert in range(config.num_experts)
        ]
        for layer_id in range(config.first_k_dense_replace, config.num_hidden_layers)
        for ours, published in (
            ("gate_up_proj", ("gate_proj", "up_proj")),
            ("down_proj", ("down_proj",)),
        )
    }


def _is_of_draft(name: str, num_layers: int) -> bool:
    """Tell whether a weight belongs to the layers after the last, which are an MTP head."""
    head, _, rest = name.partition("model.layers.")
    return head == "" and rest != "" and int(rest.partition(".")[0]) >= num_layers


def make_unread_ring_2_5(
    checkpoint: Checkpoint,
    sizes: Ring25Config,
    config: Mapping[str, Any],
    dtype: torch.dtype | str,
    device: torch.device,
) -> Ring25:
    """Make a model of the unread weights of a checkpoint.

    Args:
        checkpoint: the tensors of the checkpoint.
        sizes: sizes of the model, from its ``config.json``.
        config: the whole ``config.json``.
        dtype: dtype of the weights; "auto" takes the config's.
        device: the device to which they will be read.

    Raises:
        ValueError: a weight is missing, unexpected, or of another shape than the config says.
    """
    model = Ring25(sizes, _dtype(dtype, config), _generation_config(checkpoint.folder))
    plain, experts = sources(sizes), expert_sources(sizes)
    needed = {name for published in plain.values() for name in published}
    needed |= {name for each in experts.values() for names in each for name in names}
    _check_names(checkpoint, needed, sizes.num_hidden_layers)
    unread = checkpoint.unread(device)

    def made_of(names: Sequence[str], shape: Sequence[int]) -> Tensor:
        parts: list[Tensor] = [unread[name] for name in names]
        _check_rows(checkpoint.folder, names, parts, shape)
        return torch.cat(parts)

    weights: dict[str, Tensor] = {}
    for name, like in model.state_dict().items():
        if name in experts:
            each = [made_of(names, like.shape[1:]) for names in experts[name]]
            weights[name] = torch.stack(each).to(like.dtype)
        else:
            weights[name] = made_of(plain[name], like.shape).to(like.dtype)
    model.load_state_dict(weights, assign=True)
    if sizes.tie_word_embeddings:
        model.lm_head.weight = model.word_embeddings.weight
    for layer_id in range(sizes.first_k_dense_replace, sizes.num_hidden_layers):
        moe: Any = model.layers[layer_id].get_submodule("mlp")
        moe.experts = FusedExperts(moe.experts.gate_up_proj, moe.experts.down_proj)
    return model.eval().requires_grad_(False)


def _check_names(checkpoint: Checkpoint, needed: set[str], num_layers: int) -> None:
    """Raise ValueError if needed weights are missing, or these layers have others."""
    given = checkpoint.tensors.keys()
    foreign = {name for name in given if not _is_of_draft(name, num_layers)} - needed
    if missing := needed - given:
        raise ValueError(checkpoint.lacks(missing))
    if foreign:
        raise ValueError(
            f"the checkpoint {checkpoint.folder} has unexpected keys: {sorted(foreign)}"
        )


def _check_rows(
    folder: Path, names: Sequence[str], parts: Sequence[Tensor], shape: Sequence[int]
) -> None:
    """Raise ValueError unless some weights, row after row, make up ``shape``."""
    shapes = [[*part.shape] for part in parts]
    rows, *rest = shape
    if sum(given[0] for given in shapes) != rows or any(given[1:] != rest for given in shapes):
        raise ValueError(
            f"the checkpoint {folder} has mismatched keys: the rows of {' and '.join(names)} must "
            f"give a weight of shape {[*shape]}, got {' and '.join(map(str, shapes))}"
        )


def _dtype(dtype: torch.dtype | str, config: Mapping[str, Any]) -> torch.dtype:
    if dtype == "auto":
        dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    chosen: torch.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return chosen


def _generation_config(folder: Path) -> dict[str, Any]:
    """Read the checkpoint's sampling and end tokens; return nothing if it has none."""
    file = folder / "generation_config.json"
    config: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return config
