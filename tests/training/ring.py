"""Ring-2.5, and the reference in float64 in place of a forward of transformers."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers.modeling_outputs import CausalLMOutput

from tests.models.ring_checkpoint import CONFIG
from tests.models.ring_reference import reference_logits
from tests.tiny_models import randomize
from torch_hybrid.training.ring_2_5 import BailingMoeV2_5Config, BailingMoeV2_5ForCausalLM

# A lightning layer with an MLP, and one of latent attention with experts.
FEW: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 3}


def make_ring(seed: int = 0, **options: Any) -> Any:
    """Make a tiny model in which every weight matters."""
    model = BailingMoeV2_5ForCausalLM(BailingMoeV2_5Config(**{**CONFIG, **FEW, **options}))
    randomize(model.requires_grad_(False), seed)
    return model


def with_forward_of_reference(model: Any) -> Any:
    """Exchange a model's forward, in place."""
    model.forward = MethodType(_forward, model)
    return model


def _forward(
    model: Any, input_ids: Tensor, labels: Tensor | None = None, use_cache: bool = False
) -> CausalLMOutput:
    (row,) = input_ids.tolist()
    logits = reference_logits(model.config.to_dict(), published(model), row)
    loss = None if labels is None else cross_entropy(logits[:-1], labels[0, 1:])
    return CausalLMOutput(
        loss=None if loss is None else loss.float(), logits=logits[None].to(torch.float32)
    )


def published(model: Any) -> dict[str, Tensor]:
    """Name weights as checkpoints do, those of experts one by one, with adapters merged."""
    named = {
        name.replace(".base_layer", ""): weight
        for name, weight in model.state_dict(keep_vars=True).items()
        if "lora" not in name
    }
    for name, module in model.named_modules():
        if "lora_A" in dict(module.named_children()):
            weight = module.base_layer.weight + module.get_delta_weight("default")
            named[f"{name}.weight"] = weight
    for name in [name for name in named if ".experts." in name]:
        stacked = named.pop(name)
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
        before, _, last = name.rpartition(".")
        for number, expert in enumerate(stacked):
            for part, each in zip(parts[last], expert.chunk(len(parts[last])), strict=True):
                named[f"{before}.{number}.{part}.weight"] = each
    return named
