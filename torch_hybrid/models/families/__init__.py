"""The families of models that are served, a file each, by the model types of their configs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.models.architecture import Architecture
from torch_hybrid.models.family import Family

for _file in iter_modules(__path__):  # each defines its families
    import_module(f"{__name__}.{_file.name}")


def _defined(family: type[Family]) -> Iterator[type[Family]]:
    for each in family.__subclasses__():
        yield each
        yield from _defined(each)


_ALL = [family() for family in _defined(Family)]
FAMILIES: dict[str, Family] = {
    model_type: family
    for family in _ALL
    if family.hf_architecture is None
    for model_type in family.model_types
}
# Families that share their model type with another.
BY_ARCHITECTURE = {family.hf_architecture: family for family in _ALL if family.hf_architecture}

# Hybrids that transformers has and this package has no op for.
NOT_SERVED = {
    "nemo_speechlm": "speech to transcribe, of which its text part alone hears nothing",
    **dict.fromkeys(
        ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7"), "another tower before Qwen3.5's text part"
    ),
    "deepseek_v4": "compressors of keys and values, with states of their own",
}


def family_of(model_type: Any, architectures: Sequence[str] | None = None) -> Family:
    """Return the family of a model type, and of the classes that its config names.

    Raises:
        UnsupportedError: no family that is served has this model type.
    """
    for name in architectures or ():
        if name in BY_ARCHITECTURE:
            return BY_ARCHITECTURE[name]
    if model_type in NOT_SERVED:
        raise UnsupportedError(
            f"model type {model_type!r} is not supported: it has {NOT_SERVED[model_type]}"
        )
    if model_type not in FAMILIES:
        raise UnsupportedError(
            f"model type {model_type!r} is not supported; supported are {sorted(FAMILIES)}"
        )
    return FAMILIES[model_type]


def architecture_of(config: Any, *, mtp: bool = False) -> Architecture:
    """Return the architecture that a transformers config describes, with an MTP head or without.

    Raises:
        UnsupportedError: the model type, or a field of the config, is not known here.
    """
    return Architecture.of(config, family_of(config.model_type, config.architectures), mtp=mtp)
