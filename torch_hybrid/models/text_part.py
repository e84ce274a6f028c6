"""A multimodal model in parts: the text part, which is served, and the tower, kept or dropped."""

from __future__ import annotations

import warnings
from typing import Any

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.host.defaults import on_meta
from torch_hybrid.models.architecture import Architecture
from torch_hybrid.models.families import FAMILIES
from torch_hybrid.models.family import Family
from torch_hybrid.models.tower import Tower


def check_has_tower(architecture: Architecture) -> None:
    """Refuse to keep the tower of a model that has none, or one of which nothing is known."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    config = architecture.config
    has_tower = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if not (has_tower and architecture.family.vision):
        raise UnsupportedError(no_tower(config.model_type))


def no_tower(model_type: str) -> str:
    """Say why a tower of this type of model cannot be kept."""
    seeing = sorted(name for name, family in FAMILIES.items() if family.vision)
    return (
        f"model type {model_type!r} has no tower that is served: vision=True is for the multimodal "
        f"ones of {seeing}"
    )


def text_and_tower(hf_model: Any, family: Family) -> tuple[Any, Tower]:
    """Separate a multimodal model into its language model and its tower; the model is changed."""
    text = text_part(hf_model, family)
    rest = hf_model.model
    del rest.language_model
    rest.eval().requires_grad_(False)
    tower = Tower(rest, family.vision, has_positions=family.num_position_axes == 3)
    return text, tower


def text_part(hf_model: Any, family: Family) -> Any:
    """Return the language model of a multimodal one, as transformers has it alone; weights are
    shared."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if text := dict(hf_model.named_children()).get("language_model"):
        text.generation_config = hf_model.generation_config
        return text
    config = hf_model.config.get_text_config()
    if "language_model" not in dict(hf_model.model.named_children()):
        raise ValueError("hf_model was adapted before")
    # Made without from_config, which sets the default dtype of the whole process meanwhile.
    text_class = family.text_class() or MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with on_meta():
        text = text_class(config)
    text.model = hf_model.model.language_model
    text.lm_head = hf_model.lm_head
    text.generation_config = hf_model.generation_config
    return text


def warn_of_dropped(config: Any) -> None:
    """Warn that prompts are texts alone, where a checkpoint could see or hear."""
    given = config.to_dict()
    names = [name for name in config.sub_configs if name != "text_config" and given.get(name)]
    dropped = [name.removesuffix("_config") for name in names]
    if dropped:
        parts = " and ".join(sorted(dropped))
        warnings.warn(
            f"{config.model_type}: the text part alone is served, without the {parts} part",
            stacklevel=2,
        )
