"""Checkpoints with weights of 4 and 8 bits as others store them, and their twins.

Tensors are as compressed-tensors, AutoGPTQ and AutoAWQ write them; embeddings, the head, routers,
norms, convolutions and narrow projections are as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.fp8_checkpoint import KEPT, change_config
from torch_hybrid.ops.formats.integers import MXFP4, NVFP4

Tensors = dict[str, Tensor]
GROUP = 32
# Widths of groups, of which two ranks take whole ones.
SIZES = {"hidden_size": 128, "intermediate_size": 128, "vocab_size": 199}


def packed(numbers: Iterable[Tensor]) -> Tensor:
    """Eight numbers of 4 bits in an int32, the first in the lowest bits; or four of 8."""
    given = list(numbers)
    bits = 32 // len(given)
    words = sum(number.long() << bits * i for i, number in enumerate(given))
    assert isinstance(words, Tensor)
    return (words - (words >> 31 << 32)).to(torch.int32)


def quantized(weight: Tensor, *, symmetric: bool, group: int = GROUP) -> tuple[Tensor, ...]:
    """Numbers from 0 to 15 [N, K], scales of 16 bits and zero points [N, G]."""
    groups = weight.unflatten(-1, (-1, group))
    if symmetric:
        scales = (groups.abs().amax(-1) / 7.5).half()
        zeros = torch.full_like(scales, 8)
    else:
        least, largest = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((largest - least) / 15).half()
        zeros = (-least / scales.float()).round().clamp(0, 15)
    stored = (groups / scales.float()[..., None]).round() + zeros.float()[..., None]
    return stored.clamp(0, 15).flatten(-2).to(torch.int32), scales, zeros.to(torch.int32)


def worth(stored: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    groups = stored.unflatten(-1, (scales.shape[-1], -1)) - zeros[..., None]
    return (groups * scales.float()[..., None]).flatten(-2)


def compressed(weight: Tensor, *, symmetric: bool) -> tuple[Tensors, Tensor]:
    """pack-quantized: columns by eight; zero points, if there are, by eight rows."""
    stored, scales, zeros = quantized(weight, symmetric=symmetric)
    tensors = {
        "weight_packed": packed(stored[:, i::8] for i in range(8)),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = packed(zeros[i::8] for i in range(8))
    return tensors, worth(stored, scales, zeros)


def compressed_in_8_bits(weight: Tensor, *, in_words: bool) -> tuple[Tensors, Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 127
    numbers = (weight / scales).round()
    stored = numbers.to(torch.int8)
    if in_words:
        words = packed((numbers + 128)[:, i::4] for i in range(4))
        tensors = {"weight_packed": words, "weight_shape": torch.tensor(weight.shape)}
    else:
        tensors = {"weight": stored}
    return {**tensors, "weight_scale": scales.bfloat16()}, stored * scales.bfloat16().float()


def fp4(weight: Tensor, block: int) -> tuple[Tensors, Tensor]:
    """mxfp4- and nvfp4-pack-quantized: columns by two; nvfp4 divides all scales by a number."""
    groups = weight.unflatten(-1, (-1, block))
    largest = groups.abs().amax(-1)
    if block == MXFP4:
        stored = (largest.log2().floor() - 2 + 127).to(torch.uint8)
        scales, tensors = 2.0 ** (stored.float() - 127), {"weight_scale": stored}
    else:
        divisor = 448 * 6 / largest.max()
        rounded = (largest / 6 * divisor).to(torch.float8_e4m3fn)
        scales = rounded.float() * (1 / divisor)  # which a row keeps as its factor
        tensors = {"weight_scale": rounded, "weight_global_scale": divisor[None]}
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    codes = ((groups / scales[..., None])[..., None] - values).abs().argmin(-1)
    worth = (values[codes] * scales[..., None]).flatten(-2)
    codes = codes.flatten(-2).to(torch.uint8)
    return tensors | {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4}, worth


def gptq(weight: Tensor, *, symmetric: bool, less: int = 1) -> tuple[Tensors, Tensor]:
    """Rows by eight; zero points are stored as so much less."""
    stored, scales, zeros = quantized(weight, symmetric=symmetric)
    if less:
        zeros = zeros.clamp(min=1)  # AutoGPTQ spoils the words of others
    lesser = zeros.T - less
    tensors = {
        "qweight": packed(stored.T[i::8] for i in range(8)),
        "qzeros": packed(lesser[:, i::8] for i in range(8)),
        "scales": scales.T.contiguous(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }
    return tensors, worth(stored, scales, zeros)


def awq(weight: Tensor) -> tuple[Tensors, Tensor]:
    """Columns by eight, in an order of its own."""
    stored, scales, zeros = quantized(weight, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": packed(stored.T[:, i::8] for i in order),
        "qzeros": packed(zeros.T[:, i::8] for i in order),
        "scales": scales.T.contiguous(),
    }
    return tensors, worth(stored, scales, zeros)


def compressed_config(format_: str, **weights: Any) -> dict[str, Any]:
    given = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": GROUP,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
        "observer_kwargs": {},
        "block_structure": None,
    }
    group = {
        "targets": ["Linear"],
        "weights": given | weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "global_compression_ratio": 1.9,
    }


def gptq_config(**fields: Any) -> dict[str, Any]:
    given = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
    return given | {"damp_percent": 0.01, "checkpoint_format": "gptq"} | fields


AWQ_CONFIG = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": GROUP,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": None,
}
_FP4 = {
    "mxfp4": compressed_config("mxfp4-pack-quantized", type="float", scale_dtype="torch.uint8"),
    "nvfp4": compressed_config(
        "nvfp4-pack-quantized",
        type="float",
        strategy="tensor_group",
        group_size=NVFP4,
        scale_dtype="torch.float8_e4m3fn",
    ),
}
_WHOLE_ROWS = {"num_bits": 8, "strategy": "channel", "group_size": None}
Store = Callable[[Tensor], tuple[Tensors, Tensor]]
FORMATS: dict[str, tuple[Store, dict[str, Any]]] = {
    "compressed": (
        lambda weight: compressed(weight, symmetric=True),
        compressed_config("pack-quantized"),
    ),
    "compressed_with_zeros": (
        lambda weight: compressed(weight, symmetric=False),
        compressed_config("pack-quantized", symmetric=False),
    ),
    "compressed_int8": (
        lambda weight: compressed_in_8_bits(weight, in_words=False),
        compressed_config("int-quantized", **_WHOLE_ROWS),
    ),
    "compressed_packed_int8": (
        lambda weight: compressed_in_8_bits(weight, in_words=True),
        compressed_config("pack-quantized", **_WHOLE_ROWS),
    ),
    "gptq": (lambda weight: gptq(weight, symmetric=True), gptq_config()),
    "gptq_with_zeros": (lambda weight: gptq(weight, symmetric=False), gptq_config(sym=False)),
    "gptq_v2": (
        lambda weight: gptq(weight, symmetric=False, less=0),
        gptq_config(sym=False, checkpoint_format="gptq_v2"),
    ),
    "awq": (awq, AWQ_CONFIG),
    "mxfp4": (lambda weight: fp4(weight, MXFP4), _FP4["mxfp4"]),
    "nvfp4": (lambda weight: fp4(weight, NVFP4), _FP4["nvfp4"]),
}


def save(hf_model: Any, folder: Path, name: str) -> Path:
    """Write a model in one of ``FORMATS``.

    Returns:
        The folder of its twin: the same with what those weights are worth, in float32.
    """
    store, config = FORMATS[name]
    twin = folder / "twin"
    hf_model.float().save_pretrained(twin)
    hf_model.to(torch.bfloat16).save_pretrained(folder)
    weights, floats = load_file(folder / "model.safetensors"), load_file(twin / "model.safetensors")
    for key, weight in list(floats.items()):
        if weight.ndim == 2 and key.endswith(".weight") and not KEPT.fullmatch(key):
            del weights[key]
            tensors, floats[key] = store(weight)
            layer = key.removesuffix("weight")
            weights |= {layer + part: tensor.contiguous() for part, tensor in tensors.items()}
        else:
            floats[key] = weights[key].float()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    save_file(floats, twin / "model.safetensors", {"format": "pt"})
    change_config(folder, quantization_config=config)
    return twin
