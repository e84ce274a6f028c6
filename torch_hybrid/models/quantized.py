"""Refusals of weights that other libraries have quantized and that are not served."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from torch_hybrid.errors import UnsupportedError

_INSTEAD = (
    "; weights='int8', 'int4', 'mxfp4' or 'nvfp4' quantizes a checkpoint of floats as it is read"
)
# Reasons by the names of methods in configs.
_REASONS = {
    "bitsandbytes": "its numbers of 4 bits are picked from a table (NF4)",
    "hqq": "its groups have zero points",
    "modelopt": "NVFP4 has 4-bit floats with scales of 8 bits for each 16",
    "mxfp4": "it has 4-bit floats with a power of two for each 32",
    "torchao": "it keeps weights in tensors of its own classes",
}
# Methods whose checkpoints are read: see ``stored_formats.py``.
_READ = ("awq", "compressed-tensors", "gptq")
# Libraries whose layers or tensors hold quantized weights, by their packages.
_PACKAGES = {
    "auto_gptq": "gptq",
    "awq": "awq",
    "bitsandbytes": "bitsandbytes",
    "compressed_tensors": "compressed-tensors",
    "gptqmodel": "gptq",
    "hqq": "hqq",
    "torchao": "torchao",
}


def refuse_method(model_type: str, quantization: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for the method of a config's ``quantization_config``."""
    method = quantization.get("quant_method")
    given = f"{model_type}: checkpoints of this quantization are not served, got {method!r}"
    reason = f": {_REASONS[method]}" if method in _REASONS else ""
    raise UnsupportedError(f"{given}{reason}{_INSTEAD}")


def refuse_gguf(path: str) -> None:
    """Raise UnsupportedError where a path is a GGUF file, or a folder of GGUF files alone."""
    folder = Path(path)
    is_file = folder.suffix == ".gguf"
    is_folder = folder.is_dir() and any(folder.glob("*.gguf")) and not any(folder.glob("*.json"))
    if is_file or is_folder:
        raise UnsupportedError(
            f"{path} is GGUF, whose blocks of quantized weights are not served: give a folder of "
            f"safetensors{_INSTEAD}"
        )


def refuse_modules(model: nn.Module) -> None:
    """Raise UnsupportedError where a layer or a weight has a class of a quantization library."""
    for name, module in model.named_modules():
        for what in (module, *module.parameters(recurse=False)):
            package = type(what).__module__.partition(".")[0]
            if package in _PACKAGES:
                method = _PACKAGES[package]
                instead = "th.quantize makes integers of one of floats"
                if method in _READ:
                    instead = f"th.from_pretrained reads a checkpoint of {method}"
                raise UnsupportedError(
                    f"{name} holds a {package} {type(what).__name__}, and models in memory that "
                    f"others quantized are not served: {instead}"
                )
