"""Models with random weights of 8 bits, made on a device by the loader, from a checkpoint without a
file: it has the names, shapes and dtypes that the hub's has, but for experts, which are stacked."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_hybrid import HybridModel
from torch_hybrid.models.adapt import adapted
from torch_hybrid.models.checkpoint.content import Stored
from torch_hybrid.models.checkpoint.files import Checkpoint
from torch_hybrid.models.checkpoint.unread import Unread
from torch_hybrid.models.families import architecture_of
from torch_hybrid.models.scaled_weights import hold_scales
from torch_hybrid.models.shard import cut
from torch_hybrid.models.transformers_weights import make_unread
from torch_hybrid.ops.formats.block_scales import BLOCK, DTYPE, num_blocks
from torch_hybrid.ranks import Ranks

# What the published checkpoint of Qwen3-Next leaves in 16 bits.
KEPT = re.compile(r".*(embed_tokens|lm_head|norm|conv1d|gate|in_proj_ba)\.weight|.*(A_log|dt_bias)")
_SPREAD = 100.0  # of random numbers of 8 bits
_FROM_ZERO = re.compile(r".*(layernorm|[qk]_norm|model\.norm)\.weight")  # 1 is added to these


def make_fp8_model(config: Any, device: torch.device, ranks: Ranks | None = None) -> HybridModel:
    """Make a transformers model of that config in FP8, its mixers ours; of ranks, a part."""
    checkpoint, architecture = random_checkpoint(config), architecture_of(config)
    model = adapted(make_unread(checkpoint, architecture, torch.bfloat16, device), architecture)
    if ranks is not None:
        cut(model, ranks, "tensor")
    hold_scales(model)
    fill_unread(model, device)
    return model


def random_checkpoint(config: Any) -> Checkpoint:
    """Names, shapes and dtypes, of tensors that no file has."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        weights = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    tensors = {}
    for name, weight in weights.items():
        stored = Stored(
            name=name, file=Path(), start=0, dtype=torch.bfloat16, shape=tuple(weight.shape)
        )
        if weight.ndim > 1 and not KEPT.fullmatch(name):
            *leading, num_rows, depth = weight.shape
            shape = (*leading, num_blocks(num_rows), num_blocks(depth))
            scales = replace(stored, dtype=torch.float32, shape=shape)
            stored = replace(stored, dtype=DTYPE, scales=scales)
        tensors[name] = stored
    return Checkpoint(folder=Path(__file__).parent, tensors=tensors, stamps={})


def fill_unread(model: nn.Module, device: torch.device) -> None:
    """Draw every unread weight so that activations keep their scale."""
    generator = torch.Generator(device).manual_seed(0)
    for path, module in model.named_modules():
        for name, weight in list(module._parameters.items()):
            if isinstance(weight, Unread):
                drawn = _draw(f"{path}.{name}", weight, device, generator)
                module._parameters[name] = nn.Parameter(drawn, requires_grad=False)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def _draw(name: str, like: Unread, device: torch.device, generator: torch.Generator) -> Tensor:
    shape = like.shape

    def normal(std: float) -> Tensor:
        drawn = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return drawn.normal_(std=std, generator=generator)

    if like.dtype == DTYPE:
        return normal(_SPREAD).clamp_(-448, 448).to(DTYPE)
    if "scale" in name:
        drawn = torch.empty(shape, device=device).uniform_(0.75, 1.25, generator=generator)
        return drawn.mul_((shape[-1] * BLOCK) ** -0.5 / _SPREAD)
    if name.endswith("A_log"):
        return normal(0).uniform_(1, 16, generator=generator).log_().to(like.dtype)
    if name.endswith("dt_bias"):
        return normal(0).uniform_(-7, -2, generator=generator).to(like.dtype)
    if "norm" in name:
        return normal(0.1).add_(0 if _FROM_ZERO.fullmatch(name) else 1).to(like.dtype)
    return normal(shape[-1] ** -0.5).to(like.dtype)
