"""Checkpoints with weights of 8 bits, in the layout that the hub has them in, and their twins.

A linear layer's weight is float8_e4m3fn, with ``weight_scale_inv`` for its blocks of 128 x 128;
embeddings, the head, routers, norms, convolutions and narrow projections are as they were.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.ops.block_scales import in_blocks
from torch_hybrid.ops.formats.block_scales import BLOCK, dequantized

QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["lm_head"],
}
# What the published checkpoints leave as it is.
KEPT = re.compile(
    r".*(embed_tokens|lm_head|norm|conv1d|shared_expert_gate|\.gate|in_proj_(ba|a|b)|\.b_proj"
    r"|word_embeddings)\.weight"
)
# Widths of whole blocks, where two ranks take half of each, and some that are none.
SIZES = {"hidden_size": 192, "intermediate_size": 512, "vocab_size": 199}


def save(hf_model: Any, folder: Path, *, scale_dtype: torch.dtype = torch.float32) -> Path:
    """Write a model in 8 bits.

    Returns:
        The folder of its twin: the same with what those weights are worth, in float32.
    """
    twin = folder / "twin"
    hf_model.float().save_pretrained(twin)
    hf_model.to(torch.bfloat16).save_pretrained(folder)
    weights, worth = load_file(folder / "model.safetensors"), load_file(twin / "model.safetensors")
    for name, weight in list(worth.items()):
        if weight.ndim == 2 and name.endswith(".weight") and not KEPT.fullmatch(name):
            numbers, scales = in_blocks(weight)
            weights[name], weights[f"{name}_scale_inv"] = numbers, scales.to(scale_dtype)
            worth[name] = dequantized(numbers, scales.to(scale_dtype), torch.float32)
        else:
            worth[name] = weights[name].float()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    save_file(worth, twin / "model.safetensors", {"format": "pt"})
    change_config(folder, quantization_config=QUANTIZATION)
    return twin


def change_config(folder: Path, **fields: Any) -> None:
    """Write other fields into a checkpoint's config."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
